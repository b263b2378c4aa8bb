"""Small file systems in memory; where none may be mounted, the test is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults import mount, unmount

from sync.base.errors import ConfigError


@contextmanager
def mounted(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of that size at `folder`."""
    try:
        mount(folder, kibibytes)
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        yield folder
    finally:
        unmount(folder)
