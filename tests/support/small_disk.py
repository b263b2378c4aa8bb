"""Small file systems in memory that can be filled; where none may be mounted, the test is skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = ".ballast"


@contextmanager
def mounted(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of that size at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"there is no mount: {error}")
    if done.returncode != 0:
        pytest.skip(f"a file system of its own cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Take all the room there is."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(block)):
                    pass
            except OSError:
                continue


def free(folder: Path) -> None:
    """Give it back."""
    (folder / BALLAST).unlink()
