"""Listing, verifying, collecting and exporting versions."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from memory_store import MemoryStore
from published import bits_of, follow, publisher_of, saved, v
from safetensors.numpy import load_file

from sync.base.errors import SnapshotError
from sync.weights.snapshots import admin
from sync.weights.snapshots.manifest import LEASE_SECONDS, dump, lease, manifest_key, read_manifest
from sync.weights.subscribe import Mirror
from sync.wire import Version

RUN = "run"
DAY = 86400.0


def weights(step: int) -> np.ndarray:
    index = np.arange(512, dtype="f4")
    return index * np.float32(0.01) + np.where(index % 4 == 0, np.float32(step), np.float32(0))


def steps(found: list[Version]) -> list[int]:
    return [version.step for version in found]


def problems(store: MemoryStore) -> list[str | None]:
    return [problem for _, problem in admin.verify(store, RUN)]


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """Nine versions of one tensor; 0, 3 and 6 are anchors; version i was created at the Unix time i days."""
    store = MemoryStore()
    publisher = publisher_of(store, {"w": weights(0)})
    for step in range(9):
        version, values = v(step), {"w": weights(step)}
        if step % 3 == 0:
            publisher.anchor(version, None, saved(tmp_path / "saved", values), bits_of(values))
        else:
            publisher.delta(version, bits_of(values))
        aged = msgspec.structs.replace(read_manifest(store, RUN, version), created=step * DAY)
        store.replace(manifest_key(RUN, version), dump(aged))
    return store


def test_ls_tells_what_is_there(store: MemoryStore) -> None:
    listing = admin.ls(store, RUN)
    listed = [*listing.manifests.values()]
    assert steps([entry.version for entry in listed]) == list(range(9))
    assert [entry.kind for entry in listed] == ["full", "delta", "delta"] * 3
    assert (listing.latest, listing.bare, listing.odd) == (v(8), [], {})
    assert listed[7].base == v(6)
    assert listed[6].bytes == listed[7].full_bytes > 2048 > listed[7].bytes


def test_verify_passes_intact_versions_and_names_the_damaged_ones(store: MemoryStore) -> None:
    assert problems(store) == [None] * 9
    key = "run/L000-v00000004/delta-00000.bin"
    store.replace(key, store.read(key)[:-1])
    found = problems(store)
    assert [step for step, problem in enumerate(found) if problem] == [4, 5]
    assert key in (found[4] or "")


def test_gc_keeps_the_newest_anchors_with_what_is_built_on_them(store: MemoryStore) -> None:
    planned = admin.gc(store, RUN, keep_anchors=2, now=9 * DAY, dry_run=True)
    assert len(admin.ls(store, RUN).manifests) == 9
    done = admin.gc(store, RUN, keep_anchors=2, now=9 * DAY)
    assert done == planned
    assert steps(done.removed) == [0, 1, 2]
    assert steps(done.kept) == steps([*admin.ls(store, RUN).manifests]) == [3, 4, 5, 6, 7, 8]
    assert done.bytes > 0
    assert not any("v00000001" in key for key in store.list(""))
    assert problems(store) == [None] * 6


@pytest.mark.parametrize(("hours", "first"), [(0, 6), (71, 6), (73, 3), (24 * 7, 0)])
def test_gc_spares_what_was_superseded_within_the_grace(store: MemoryStore, hours: int, first: int) -> None:
    """Version 3 became superfluous with anchor 6, three days before the ninth; version 0 with anchor 3."""
    done = admin.gc(store, RUN, keep_anchors=1, grace_seconds=hours * 3600, now=9 * DAY)
    assert steps(done.kept)[0] == first


def test_gc_spares_the_chain_of_a_lease_until_it_expires(store: MemoryStore) -> None:
    with lease(store, RUN, v(4)):
        for seconds, kept in ((0, [3, 4, 6, 7, 8]), (LEASE_SECONDS + 1, [6, 7, 8])):
            assert steps(admin.gc(store, RUN, keep_anchors=1, now=time.time() + seconds).kept) == kept
    assert store.list("run/leases/") == []


def test_a_mirror_leases_what_it_reads_from_an_anchor(store: MemoryStore, tmp_path: Path) -> None:
    """A collector that runs while the anchor is being downloaded takes nothing away."""

    class Collecting(MemoryStore):
        def fetch(self, key: str, path: Path) -> None:
            admin.gc(self, RUN, keep_anchors=1, grace_seconds=0)
            super().fetch(key, path)

    with Mirror(tmp_path / "mirror", Collecting(store._objects), RUN) as mirror:
        follow(mirror, v(2))


@pytest.mark.parametrize("now", [-DAY, 0, 9 * DAY, 1e6 * DAY])
def test_what_latest_names_stays_whatever_the_clock_says(store: MemoryStore, now: float) -> None:
    """The newest anchor is there, and LATEST has not moved to it yet."""
    store.replace(f"{RUN}/LATEST", f"{v(5)}\n".encode())
    done = admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, now=now)
    assert {3, 4, 5} <= set(steps(done.kept))


def test_gc_removes_files_that_never_got_a_manifest_unless_they_may_still_get_one(store: MemoryStore) -> None:
    store.create("run/L000-v00000007/part-00009.json", b"{}")
    store.delete("run/L000-v00000005/manifest.json")
    store.create("run/L000-v00000009/delta-00000.bin", b"being written")
    done = admin.gc(store, RUN, keep_anchors=3, now=9 * DAY)
    assert steps(done.removed) == [5]
    assert store.exists("run/L000-v00000009/delta-00000.bin")
    assert store.exists("run/L000-v00000007/part-00009.json")


def test_gc_spares_a_version_whose_manifest_comes_while_it_reads(store: MemoryStore) -> None:
    """Its files are there when they are listed; by the last manifest it is published, and another one too."""
    manifest, key = store.read(manifest_key(RUN, v(7))), manifest_key(RUN, v(7))
    store.replace(f"{RUN}/LATEST", f"{v(6)}\n".encode())
    newer = {name: store.read(name) for name in store.list(f"{RUN}/L000-v00000008/")}
    for name in [key, *newer]:
        store.delete(name)

    class Publishing(MemoryStore):
        def read(self, name: str) -> bytes:
            if name == manifest_key(RUN, v(0)):
                self._objects |= {key: manifest} | newer
                self._objects[f"{RUN}/LATEST"] = f"{v(8)}\n".encode()
            return super().read(name)

    done = admin.gc(Publishing(store._objects), RUN, keep_anchors=1, now=9 * DAY)
    assert steps(done.removed) == [0, 1, 2, 3, 4, 5]
    assert problems(store) == [None] * 3


def test_gc_looks_each_base_up_once_however_long_the_chains_are() -> None:
    looked_up = Counter[int]()

    class Link(SimpleNamespace):
        @property
        def base(self) -> Version | None:
            looked_up[self.step] += 1
            return v(self.step - 1) if self.step else None

    chain: dict[Version, Any] = {v(step): Link(step=step, created=0.0) for step in range(300)}
    assert admin._needed(admin.Listing(manifests=chain), keep_anchors=1, since=1.0) == set(chain)
    assert max(looked_up.values()) <= 4


def test_export_writes_any_version_as_a_checkpoint_folder(store: MemoryStore, tmp_path: Path) -> None:
    for step in (2, 6, 8):
        folder = tmp_path / "out" / str(step)
        admin.export(store, RUN, v(step), folder)
        np.testing.assert_array_equal(load_file(folder / "model.safetensors")["w"], weights(step))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["2", "6", "8"]
    with pytest.raises(SnapshotError, match="is not empty"):
        admin.export(store, RUN, v(8), tmp_path / "out" / "2")
