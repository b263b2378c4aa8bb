"""A model folder and a publisher of it: what a test of versions begins with."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sync.weights import Mirror, Publisher, RunIdentity, Slice, Version, checkpoint
from sync.weights.stores import Store
from sync.wire import Published

Weights = Mapping[str, np.ndarray]


def v(step: int, lineage: int = 0) -> Version:
    return Version(lineage, step)


def follow(mirror: Mirror, version: Version) -> None:
    """Bring the mirror to a version."""
    mirror.stage(version)
    mirror.promote(version)
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


def publisher_of_folder(store: Store, folder: Path) -> Publisher:
    """A publisher of run "tests", of one rank that holds all tensors of the folder."""
    places = checkpoint.tensors(folder)
    slices = [Slice(name, at.shape, at.kind, 0, math.prod(at.shape)) for name, at in places.items()]
    return Publisher(store, RunIdentity("tests", model=checkpoint.fingerprint(places)), slices)


class Moving:
    """Publishes a copy of a folder as it is changed: version n is step n of lineage 1 of run "tests"."""

    def __init__(self, folder: Path, work: Path, store: Store) -> None:
        self._folder, self._step = work / "folder", 0
        shutil.copytree(folder, self._folder)
        self.places = checkpoint.tensors(self._folder)
        self.arrays: dict[str, Any] = checkpoint.bits(self.places, writable=True)
        """Tensor → its bits; a change of them is in the copy."""
        self._publisher = publisher_of_folder(store, self._folder)

    def publish(self, kind: str) -> Published:
        """The next version; a delta needs a full one before it."""
        version = Version(1, self._step)
        self._step += 1
        if kind == "delta":
            return self._publisher.delta(version, self.arrays)
        return self._publisher.anchor(version, None, self._folder, self.arrays, kind)  # type: ignore[arg-type]
