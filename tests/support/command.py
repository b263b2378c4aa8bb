"""`distill` in this process, as a shell would run it."""

from __future__ import annotations

import pytest

from distill.cli.main import main


def left(*words: str) -> object:
    """Run `distill WORDS`; its exit status."""
    with pytest.raises(SystemExit) as leaving:
        main([*words])
    return leaving.value.code
