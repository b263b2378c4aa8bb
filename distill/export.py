"""A published version, or a run's result, as a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from distill.config import RunConfig
from sync.errors import ConfigError
from sync.stores import open_store
from sync.weights.mirror import Mirror
from sync.wire import Version


def export(config: RunConfig, version: Version, target: Path) -> Path:
    """Write `version` from the run's store to `target`, verified; it appears whole or not at all.

    Raises ConfigError when `target` exists, SnapshotError or StoreError when the version cannot be had.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: name a folder that does not, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    store = open_store(config.weights.store, config.run_dir / "store")
    unfinished = Path(tempfile.mkdtemp(prefix=".export-", dir=target.parent))
    try:
        with Mirror(unfinished / "mirror", store, config.run.name) as mirror:
            staged = mirror.stage(version)
            folder = unfinished / "model"
            shutil.copytree(staged.path, folder)
        folder.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def keep_best(folder: Path, target: Path) -> None:
    """Make `target` a copy of the model in `folder`; whoever reads it finds the old one or the new one whole."""
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for left in (pending, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, pending)
    if target.exists():
        target.rename(old)
    pending.rename(target)
    shutil.rmtree(old, ignore_errors=True)
