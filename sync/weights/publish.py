"""Publish versions of a sharded model. Delta: each rank writes a file of its own. Anchor: rank 0 uploads it.

A rank compares its flat shard with its copy of the last published one: nothing is gathered. Ranks above 0
leave a receipt in the store; rank 0 waits for them before it writes the manifest.

    every rank   delta-0000R.bin, then (R > 0) part-0000R.json
    rank 0       waits for the receipts → manifest.json (created once) → LATEST
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from blake3 import blake3

from sync.base.durable import until_disk_space
from sync.base.errors import AlreadyPublished, SnapshotError, StoreError
from sync.base.retry import Backoff
from sync.base.settings import WeightsConfig
from sync.weights.delta import file as delta_file
from sync.weights.delta.codec import Bits, Effort, on_host
from sync.weights.delta.file import Header, Slice
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.checkpoint import BITS, refused, without_code
from sync.weights.snapshots.manifest import (
    File,
    Manifest,
    Part,
    dump,
    latest_key,
    load,
    manifest_key,
    read_manifest,
    version_key,
)
from sync.weights.stores import Store, read_small
from sync.wire import Published, RunIdentity, Version

logger = logging.getLogger(__name__)
_POLL: Final = (0.005, 0.25)  # seconds between two looks for a receipt: first, longest
_DEFAULTS: Final = WeightsConfig()
_TIMED_BYTES: Final = 1_000_000  # of a file, from which its writing says how fast the store is
_SLOW_STORE: Final = 5e6
"""Bytes per second below which codec "small" is the sooner one (docs/weight-sync.md, "Which codec")."""


class Publisher:
    """One rank's half of the protocol; every rank makes the same calls in the same order.

    `anchor` comes first; `delta` then takes the last published version as its base. Calls may come from any
    thread and are done one after the other; arrays must not change while a call runs. The publisher keeps a
    copy of the shard (`BaseShard`) unless it publishes `anchors_only`. What is returned is of the version, on
    ranks above 0 of their file and shard. After an error an anchor is due, of the same or a new version.
    """

    def __init__(
        self,
        store: Store,
        run: RunIdentity,
        slices: Sequence[Slice],
        *,
        rank: int = 0,
        world_size: int = 1,
        weights: WeightsConfig = _DEFAULTS,
        anchors_only: bool = False,
    ) -> None:
        """`run`: with the model's fingerprint; its `id` is None for what is published outside a run."""
        assert run.model is not None, "the fingerprint goes into every manifest"
        self._store, self._run, self._fingerprint = store, run, run.model
        self._slices = [part for part in slices if part.count]
        self._rank, self._world_size, self._config = rank, world_size, weights
        self._anchors_only = anchors_only
        self._lock = threading.Lock()
        self._begun: Version | None = None  # the newest version that was begun, unless it is another writer's
        self._base: Version | None = None
        self._parent: Version | None = None
        self._shard: BaseShard | None = None
        self._store_speed: float | None = None  # bytes per second; None: no file was large enough
        self._told: Effort | None = None
        self._delta_bytes, self._full_bytes, self._model_bytes = 0, 0, 0
        self._shard_bytes = sum(part.count * BITS[part.dtype].itemsize for part in self._slices)

    @property
    def anchor_due(self) -> bool:
        """There is no base to build on, or the deltas since the last anchor cost `anchor_share` full ones.
        Meaningful on rank 0."""
        return self._base is None or self._delta_bytes >= self._config.anchor_share * self._full_bytes

    @property
    def codec(self) -> Effort:
        """The codec of the next delta of this rank."""
        if self._config.codec != "auto":
            return self._config.codec
        return "small" if self._store_speed is not None and self._store_speed < _SLOW_STORE else "fast"

    def anchor(
        self,
        version: Version,
        parent: Version | None,
        folder: Path | None,
        shards: Mapping[str, Bits],
        kind: Literal["full", "lora"] = "full",
    ) -> Published:
        """Publish a version that needs no other: rank 0 uploads `folder`; other ranks pass None.

        The folder is a Hugging Face checkpoint or, for kind "lora", an adapter as peft saves it.
        `shards` are this rank's ranges as 1-D bits, by tensor name: arrays, or tensors where the shard lies.
        `parent` is where the version's lineage branched from. What this version left when it failed just
        before is completed or replaced. Raises SnapshotError when the folder disagrees with the shards,
        AlreadyPublished when the version exists, StoreError when the store fails.
        """
        start = time.monotonic()
        with self._lock:
            self._base = self._shard = None  # free the old copy before allocating the new one
            self._check(shards)
            base = None if self._anchors_only else BaseShard(self._slices, shards)
            again, self._begun, total = version == self._begun, version, self._shard_bytes
            if self._rank == 0:
                bits = base.host if base else shards
                total = self._publish_anchor(version, parent, folder, bits, kind, again)
            self._shard, self._parent = base, parent
            self._base = version if base else None
            self._delta_bytes, self._full_bytes = 0, total
            return Published(
                version=version,
                kind=kind,
                bytes=total,
                full_bytes=total,
                seconds=time.monotonic() - start,
                note=self._note() if kind == "full" else "",
            )

    def delta(self, version: Version, shards: Mapping[str, Bits]) -> Published:
        """Publish the difference to the last version that this publisher published. Raises SnapshotError when
        there is none or the ranks disagree about it, AlreadyPublished when the version exists, StoreError
        when the store fails or a rank's receipt does not come in time."""
        start = time.monotonic()
        with self._lock:
            base, self._base, self._begun = self._base, None, version
            if base is None or self._shard is None:
                raise SnapshotError(f"{version} has no base to be a delta of: publish an anchor first")
            self._check(shards)
            begun = time.monotonic()
            header = Header(
                self._run.name, self._fingerprint, version, base, self._rank, self._world_size, []
            )
            copy = self._shard
            data = delta_file.build(header, self._slices, copy.last, shards, self.codec, copy.host)
            encode_seconds = time.monotonic() - begun
            file = File(f"delta-{self._rank:05d}.bin", len(data), blake3(data).hexdigest())
            self._write(self._key(version, file.key), data)
            part = Part(rank=self._rank, base=base, file=file, shard_bytes=self._shard_bytes)
            if self._rank > 0:
                self._write(self._key(version, _receipt(self._rank)), dump(part))
            size = file.size if self._rank > 0 else self._publish_delta(version, base, part)
            self._shard.advance(shards)
            self._base = version
            self._delta_bytes += size
            return Published(
                version=version,
                kind="delta",
                bytes=size,
                full_bytes=self._full_bytes,
                seconds=time.monotonic() - start,
                encode_seconds=encode_seconds,
                note=self._note(),
            )

    def _note(self) -> str:
        if self._config.codec != "auto" or self._store_speed is None or self.codec == self._told:
            return ""
        self._told = self.codec
        return f"weights.codec auto: {self.codec}, as the store takes {self._store_speed / 1e6:.3g} MB/s"

    # --- every rank ---------------------------------------------------------------------------------------

    def _check(self, shards: Mapping[str, Bits]) -> None:
        for part in self._slices:
            bits, dtype = shards.get(part.name), BITS[part.dtype]
            if bits is not None and _fits(bits, part.count, dtype):
                continue
            got = "nothing" if bits is None else f"{bits.dtype}{tuple(bits.shape)}"
            raise SnapshotError(
                f"rank {self._rank} got {got} for {part.name!r}, its slice has {part.count} elements of "
                f"{part.dtype}: pass flat {dtype} bits"
            )

    def _key(self, version: Version, name: str) -> str:
        return version_key(self._run.name, version, name)

    def _write(self, key: str, data: bytes | Path) -> int:
        """Create a key; while the store's disk is full, wait for room. Returns the bytes."""

        def create() -> float:
            begun = time.monotonic()
            try:
                self._store.create(key, data)
            except AlreadyPublished:
                self._begun = None  # another writer has this version
                raise
            return time.monotonic() - begun

        seconds = until_disk_space(create, f"{key} in {self._store}")
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if size >= _TIMED_BYTES:
            self._store_speed = size / seconds
        return size

    # --- rank 0 -------------------------------------------------------------------------------------------

    def _publish_anchor(
        self,
        version: Version,
        parent: Version | None,
        folder: Path | None,
        shards: Mapping[str, Bits],
        kind: Literal["full", "lora"],
        again: bool,
    ) -> int:
        """Upload the folder and write the manifest; returns the bytes of the snapshot."""
        if folder is None:
            raise SnapshotError("rank 0 got no folder for an anchor: save the model and pass its folder")
        self._compare(folder, shards)
        if again and (left := self._left_behind(version)) is not None:
            self._move_latest(left)
            return left.full_bytes
        files = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = f"model/{path.relative_to(folder).as_posix()}"
            if why := refused(name):
                logger.info("%s is left out of %s: %s", path.name, version, why)
                continue
            data, key = without_code(path), self._key(version, name)
            if again:
                self._store.delete(key)  # with what a broken upload left, which no listing shows
            size = self._write(key, data)
            digest = blake3(data) if isinstance(data, bytes) else blake3().update_mmap(data)
            files.append(File(name, size, digest.hexdigest()))
        return self._finish(version, kind, parent, files)

    def _left_behind(self, version: Version) -> Manifest | None:
        """The manifest that this publisher wrote before it failed; None: it wrote none, and its deltas go."""
        keys = self._store.list(self._key(version, ""))
        if manifest_key(self._run.name, version) in keys:
            return read_manifest(self._store, self._run.name, version)
        for key in [*keys, manifest_key(self._run.name, version)]:  # a claim of that is in no list
            self._store.delete(key)
        return None

    def _compare(self, folder: Path, shards: Mapping[str, Bits]) -> None:
        """The folder must hold this model, and this rank's very bits: deltas are taken from those."""
        places = checkpoint.tensors(folder)
        if (fingerprint := checkpoint.fingerprint(places)) != self._fingerprint:
            raise SnapshotError(
                f"{folder} has fingerprint {fingerprint[:12]}, the run's model has {self._fingerprint[:12]}: "
                "names, shapes or dtypes differ"
            )
        self._model_bytes = sum(place.nbytes for place in places.values())
        arrays = checkpoint.bits(places)
        for part in self._slices:
            bits = on_host(shards[part.name])
            if not np.array_equal(arrays[part.name][part.start : part.start + part.count], bits):
                raise SnapshotError(
                    f"{folder} holds other bits of {part.name!r} than rank 0's shard: saved at another step?"
                )

    def _publish_delta(self, version: Version, base: Version, shard: Part) -> int:
        """Wait for every rank's file and write the manifest; returns the bytes of all files."""
        deadline = time.monotonic() + self._config.timeout_seconds
        others = range(1, self._world_size)
        parts = [shard, *(self._await_part(version, base, rank, deadline) for rank in others)]
        files = [part.file for part in parts]
        total = sum(part.shard_bytes for part in parts)
        if total != self._model_bytes:
            raise SnapshotError(
                f"the slices of all {self._world_size} ranks hold {total} bytes, the model "
                f"{self._model_bytes}: every element belongs to exactly one rank"
            )
        return self._finish(version, "delta", self._parent, files, base)

    def _await_part(self, version: Version, base: Version, rank: int, deadline: float) -> Part:
        key = self._key(version, _receipt(rank))
        pauses = Backoff(*_POLL)
        while not self._store.exists(key):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"rank {rank} of {self._world_size} left no receipt of {version} within weights.timeout_"
                    f"seconds = {self._config.timeout_seconds:g}: it died, or the store is slow"
                )
            time.sleep(pauses.next())
        part = load(read_small(self._store, key), Part, key)
        if (part.rank, part.base) != (rank, base):
            raise SnapshotError(
                f"{key} is a delta on {part.base}, rank 0 has {base}: every rank must publish every version"
            )
        return part

    def _finish(
        self,
        version: Version,
        kind: Literal["full", "delta", "lora"],
        parent: Version | None,
        files: list[File],
        base: Version | None = None,
    ) -> int:
        """Write the manifest; returns the bytes of all files."""
        total = sum(file.size for file in files)
        manifest = Manifest(
            run=self._run.name,
            run_id=self._run.id,
            version=version,
            kind=kind,
            parent=parent,
            base=base,
            fingerprint=self._fingerprint,
            files=files,
            bytes=total,
            full_bytes=total if base is None else self._full_bytes,
            created=time.time(),
        )
        self._write(manifest_key(self._run.name, version), dump(manifest))
        self._move_latest(manifest)
        return total

    def _move_latest(self, manifest: Manifest) -> None:
        latest, text = latest_key(self._run.name), f"{manifest.version}\n".encode()
        until_disk_space(lambda: self._store.replace(latest, text), f"{latest} in {self._store}")
        logger.info("published %s (%s, %d bytes)", manifest.version, manifest.kind, manifest.bytes)


def _receipt(rank: int) -> str:
    return f"part-{rank:05d}.json"


# --- the shard as it was published last -----------------------------------------------------------------


class BaseShard:
    """A copy of the last published shard on its device and, for shards on a GPU, another in host memory.

    A device compares its own two copies, and the host copy is updated by applying the resulting blobs. After
    an anchor, shards are copied to the host for effort "small" alone, and ranges that are sent whole.
    """

    def __init__(self, slices: Sequence[Slice], shards: Mapping[str, Bits]) -> None:
        """Copies `shards`, which are flat bits of the slices."""
        bits_of = {part.name: shards[part.name] for part in slices}
        self.host = {name: on_host(bits).copy() for name, bits in bits_of.items()}
        self.last: dict[str, Bits] = {
            name: self.host[name] if isinstance(bits, np.ndarray) else bits.clone()
            for name, bits in bits_of.items()
        }

    def advance(self, shards: Mapping[str, Bits]) -> None:
        """Hold `shards`, to which a delta was taken, from now on."""
        for name, last in self.last.items():
            bits: Any = last
            bits[:] = shards[name]


def _fits(bits: Bits, count: int, dtype: np.dtype) -> bool:
    exact = bits.dtype == dtype if isinstance(bits, np.ndarray) else not bits.dtype.is_floating_point
    return exact and bits.itemsize == dtype.itemsize and tuple(bits.shape) == (count,)
