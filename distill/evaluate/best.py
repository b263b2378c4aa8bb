"""The best model of a run so far, as a folder that is always whole."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2."""


def keep_best(folder: Path, target: Path) -> None:
    """Make `target` a copy of the model in `folder`; its name is at every moment the old or the new one's.

    On a file system that cannot exchange two names (NFS) there is none between two renames; a crash just
    there leaves the old one as `.NAME.old`.
    """
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    shutil.rmtree(pending, ignore_errors=True)
    shutil.copytree(folder, pending)
    if not target.exists():
        pending.rename(target)
    elif not exchange(pending, target):
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        pending.rename(target)
    for left in (pending, old):
        shutil.rmtree(left, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once; False: this system cannot, nothing was changed."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0
