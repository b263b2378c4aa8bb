"""A model folder and a publisher of it: what a test of versions begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sync.weights import Mirror, Publisher, RunIdentity, Slice, Version, checkpoint
from sync.weights.stores import Store

Weights = Mapping[str, np.ndarray]


def v(step: int, lineage: int = 0) -> Version:
    return Version(lineage, step)


def follow(mirror: Mirror, version: Version) -> None:
    """Bring the mirror to a version."""
    mirror.promote(mirror.stage(version).version)
    assert mirror.version == version


def saved(folder: Path, weights: Weights) -> Path:
    """The checkpoint folder with these tensors and an empty config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**weights}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def bits_of(weights: Weights) -> dict[str, np.ndarray]:
    """Flat bits of each tensor, a copy."""
    return {name: values.ravel().view(f"u{values.itemsize}").copy() for name, values in weights.items()}


def publisher_of(
    store: Store, weights: Weights, run: str = "run", run_id: str | None = None, **options: Any
) -> Publisher:
    """A publisher of one rank that holds all of these tensors, "f2" or "f4"."""
    kinds = {name: (values.shape, f"f{values.itemsize}") for name, values in weights.items()}
    slices = [Slice(name, shape, kind, 0, weights[name].size) for name, (shape, kind) in kinds.items()]
    return Publisher(store, RunIdentity(run, run_id, checkpoint.model_fingerprint(kinds)), slices, **options)
