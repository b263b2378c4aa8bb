"""The best model of a run so far, as a folder that is whole whenever it is there."""

from __future__ import annotations

import shutil
from pathlib import Path


def keep_best(folder: Path, target: Path) -> None:
    """Make `target` a copy of the model in `folder`: a reader finds an old or a new one, never half.

    Between two renames there is none; after a crash there the old one is `.NAME.old`, the new `.NAME.new`.
    """
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for left in (pending, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, pending)
    if target.exists():
        target.rename(old)
    pending.rename(target)
    shutil.rmtree(old, ignore_errors=True)
