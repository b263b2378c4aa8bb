"""Publisher and mirror on small checkpoints: chains, refusals, recovery."""

from __future__ import annotations

import errno
import re
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import published
import pytest
import torch
from flat_tensors import digest, digests
from memory_store import MemoryStore
from published import bits_of, publisher_of, saved, v

from sync.base.errors import AlreadyPublished, SnapshotError, StoreError
from sync.base.settings import WeightsConfig
from sync.weights.delta.file import Slice
from sync.weights.publish import Publisher
from sync.weights.snapshots import admin, checkpoint
from sync.weights.snapshots.manifest import manifest_key, read_latest, read_manifest
from sync.weights.stores import Store
from sync.weights.subscribe import Mirror
from sync.wire import Published, RunIdentity, Version

RUN = "run"
SHAPES = {"embed": (40, 24), "layer.weight": (24, 24), "norm": (24,), "scalar": (1,), "empty": (0, 4)}


class Trainer:
    """Weights as f2 bits, random steps, and one publisher per rank over contiguous shards."""

    def __init__(
        self, store: Store, folder: Path, world_size: int = 1, run_id: str | None = None, **options: Any
    ) -> None:
        self.random = np.random.default_rng(0)
        self.store, self.folder, self.world_size = store, folder, world_size
        self.weights = {
            name: (self.random.standard_normal(int(np.prod(shape))) * 0.02).astype("f2").view("u2")
            for name, shape in SHAPES.items()
        }
        model = checkpoint.model_fingerprint({name: (SHAPES[name], "f2") for name in SHAPES})
        self.run = RunIdentity(RUN, run_id, model)
        options = {"world_size": world_size, "weights": WeightsConfig(**options)}
        self.publishers = [
            Publisher(store, self.run, self.slices(rank), rank=rank, **options) for rank in range(world_size)
        ]

    def slices(self, rank: int) -> list[Slice]:
        out = []
        for name, bits in self.weights.items():
            each = -(-bits.size // self.world_size)
            start = min(rank * each, bits.size)
            out.append(Slice(name, SHAPES[name], "f2", start, min(each, bits.size - start)))
        return out

    def shards(self, rank: int) -> dict[str, np.ndarray]:
        held = {part.name: slice(part.start, part.start + part.count) for part in self.slices(rank)}
        return {name: self.weights[name][where].copy() for name, where in held.items()}

    def step(self, share: float = 0.05) -> None:
        for name, bits in self.weights.items():
            hit = self.random.random(bits.size) < share
            moved = bits + self.random.choice([1, 65535], bits.size)
            self.weights[name] = np.where(hit, moved, bits).astype("u2")

    def save(self) -> Path:
        tensors = {name: bits.view("f2").reshape(SHAPES[name]) for name, bits in self.weights.items()}
        return saved(self.folder, tensors)

    def anchor(self, version: Version, parent: Version | None = None) -> Published:
        folders = {0: self.save()}
        return self._all(
            lambda rank: self.publishers[rank].anchor(version, parent, folders.get(rank), self.shards(rank))
        )

    def delta(self, version: Version) -> Published:
        return self._all(lambda rank: self.publishers[rank].delta(version, self.shards(rank)))

    def next(self, version: Version, share: float = 0.05) -> Published:
        """A step, published as a delta."""
        self.step(share)
        return self.delta(version)

    def digests(self) -> dict[str, str]:
        return {name: digest(bits) for name, bits in self.weights.items()}

    def _all(self, call: Callable[[int], Published]) -> Published:
        """Of rank 0, which ends when all ranks have."""
        with ThreadPoolExecutor(self.world_size) as ranks:
            first, *_ = [ranks.submit(call, rank) for rank in range(self.world_size)]
        return first.result()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


Begin = Callable[..., Trainer]


@pytest.fixture
def begin(store: MemoryStore, tmp_path: Path) -> Begin:
    """Begins a run: its trainer has published version 0."""

    def begun(*size: int, at: Store = store, **options: Any) -> Trainer:
        trainer = Trainer(at, tmp_path / "saved", *size, **options)
        trainer.anchor(v(0))
        return trainer

    return begun


@pytest.fixture
def trainer(begin: Begin) -> Trainer:
    return begin()


@pytest.fixture
def mirror(store: MemoryStore, tmp_path: Path) -> Iterator[Mirror]:
    with Mirror(tmp_path / "mirror", store, RUN) as mirror:
        yield mirror


def follow(mirror: Mirror, version: Version, trainer: Trainer | None = None) -> None:
    """Bring the mirror to a version, which must hold the bits of `trainer`; None: they are not compared."""
    published.follow(mirror, version)
    assert trainer is None or digests(mirror.path or Path()) == trainer.digests()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("codec", ["fast", "small"])
def test_mirrors_that_follow_or_join_late_hold_the_trainers_bits(
    begin: Begin, store: MemoryStore, mirror: Mirror, tmp_path: Path, world_size: int, codec: str
) -> None:
    trainer = begin(world_size, codec=codec)
    for step in range(1, 12):
        trainer.step(0.5 if step % 4 == 0 else 0.03)
        report = trainer.anchor(v(step)) if step == 6 else trainer.delta(v(step))
        assert report.kind == ("full" if step == 6 else "delta")
        assert (report.encode_seconds > 0) == (report.kind == "delta")
        assert report.encode_seconds <= report.seconds
        follow(mirror, v(step), trainer)
    with Mirror(tmp_path / "late", store, RUN) as late:
        follow(late, v(11), trainer)
        assert (late.path or tmp_path).joinpath("config.json").read_text() == "{}"
    assert read_latest(store, RUN) == v(11)
    assert [*admin.ls(store, RUN).manifests] == [v(step) for step in range(12)]


class TimedStore(MemoryStore):
    """Takes `rate` bytes a second by a clock of its own."""

    rate, now = 1e6, 0.0

    def create(self, key: str, data: bytes | Path) -> None:
        super().create(key, data)
        self.now += (len(data) if isinstance(data, bytes) else data.stat().st_size) / self.rate

    def monotonic(self) -> float:
        return self.now

    time = staticmethod(time.time)


def test_codec_auto_is_small_while_the_store_is_slow_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sync.weights.publish._TIMED_BYTES", 1000)
    timed = TimedStore()
    monkeypatch.setattr("sync.weights.publish.time", timed)
    trainer = Trainer(timed, tmp_path / "saved")
    (publisher,) = trainer.publishers
    assert publisher.codec == "fast", "nothing was measured yet"
    assert trainer.anchor(v(0)).note == "weights.codec auto: small, as the store takes 1 MB/s"
    assert (publisher.codec, trainer.next(v(1)).note) == ("small", "")
    timed.rate = 5e6
    assert trainer.anchor(v(2)).note == "weights.codec auto: fast, as the store takes 5 MB/s"
    assert (publisher.codec, trainer.next(v(3)).note) == ("fast", "")


def test_a_slot_is_live_until_a_promotion_and_a_delta_is_read_once(trainer: Trainer, mirror: Mirror) -> None:
    follow(mirror, v(0))
    for step in range(1, 5):
        before, report = trainer.digests(), trainer.next(v(step))
        staged = mirror.stage(v(step))
        assert staged.bytes_read == report.bytes == read_manifest(trainer.store, RUN, v(step)).bytes
        assert (mirror.version, digests(mirror.path or Path())) == (v(step - 1), before)
        assert digests(staged.path) == trainer.digests()
        mirror.promote(v(step))
        assert (mirror.version, mirror.path) == (v(step), staged.path)


@contextmanager
def no_room_for(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a mirror does inside is refused, as a full disk fails `what`."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    why = "cannot be written.* room for two checkpoints"
    with monkeypatch.context() as patch, pytest.raises(StoreError, match=why):
        patch.setattr(what, full)
        yield


def test_what_a_full_disk_refuses_to_a_mirror_changes_nothing_and_is_done_once_there_is_room(
    trainer: Trainer, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = mirror.stage(v(0))
    assert mirror.stage(v(0)).bytes_read == 0
    with no_room_for("sync.weights.subscribe.write", monkeypatch):
        mirror.promote(v(0))
    assert (mirror.version, mirror.holds(v(0)), mirror.holds(v(1))) == (None, True, False)
    mirror.promote(v(0))
    assert (mirror.version, mirror.path) == (v(0), staged.path)
    assert mirror.stage(v(0)).bytes_read == 0
    trainer.next(v(1))
    with no_room_for("shutil.copytree", monkeypatch):
        mirror.stage(v(1))
    with pytest.raises(SnapshotError, match="stage it again"):
        mirror.promote(v(1))
    assert mirror.version == v(0)
    follow(mirror, v(1), trainer)


def test_an_altered_file_is_refused_and_the_old_version_stays(trainer: Trainer, mirror: Mirror) -> None:
    follow(mirror, v(0))
    before = trainer.digests()
    trainer.next(v(1))
    key = "run/L000-v00000001/delta-00000.bin"
    good = trainer.store.read(key)
    for bad in (good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        trainer.store.replace(key, bad)
        with pytest.raises(SnapshotError, match="cut or altered"):
            mirror.stage(v(1))
        assert mirror.version == v(0)
        assert digests(mirror.path or Path()) == before
    trainer.store.replace(key, good)
    follow(mirror, v(1), trainer)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (None, "broken at L000-v00000002"),
        ({"base": [0, 0]}, "mixed up"),
        ({"fingerprint": "0" * 64}, r"is of model 000000000000, this mirror holds .*dtypes differ"),
    ],
    ids=["a gap", "another base", "another model"],
)
def test_a_chain_with_a_gap_or_a_delta_of_another_base_or_model_is_refused_up_to_the_next_anchor(
    store: MemoryStore, trainer: Trainer, mirror: Mirror, forged: dict[str, object] | None, why: str
) -> None:
    follow(mirror, v(0))
    for step in (1, 2, 3):
        trainer.next(v(step))
    key = manifest_key(RUN, v(2))
    manifest = msgspec.json.decode(store.read(key))
    store.delete(key)
    if forged is not None:
        store.create(key, msgspec.json.encode(manifest | forged))
    for step in (2, 3) if forged else (3,):
        with pytest.raises(SnapshotError, match=why):
            mirror.stage(v(step))
    assert mirror.version == v(0)
    trainer.anchor(v(4))
    follow(mirror, v(4), trainer)


def test_a_spoilt_spare_or_one_whose_deltas_are_gone_is_healed_from_the_live_slot(
    trainer: Trainer, mirror: Mirror, tmp_path: Path
) -> None:
    follow(mirror, v(0))
    for step in (1, 2):
        trainer.next(v(step))
        follow(mirror, v(step))
    file = mirror.path.parent / ("b" if mirror.path.name == "a" else "a") / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    trainer.next(v(3))
    follow(mirror, v(3), trainer)
    trainer.next(v(4))
    trainer.store.delete("run/L000-v00000003/delta-00000.bin")
    (tmp_path / "mirror/deltas/L000-v00000003/00000.bin").unlink()
    follow(mirror, v(4), trainer)


def test_a_mirror_is_of_one_process_and_one_run_and_another_runs_snapshot_is_refused(
    store: MemoryStore, trainer: Trainer, mirror: Mirror, tmp_path: Path
) -> None:
    follow(mirror, v(0))
    store.create(manifest_key("other", v(0)), store.read(manifest_key(RUN, v(0))))
    with Mirror(tmp_path / "other", store, "other") as other, pytest.raises(SnapshotError, match="mixed up"):
        other.stage(v(0))
    with pytest.raises(SnapshotError, match="in use by another process"):
        Mirror(tmp_path / "mirror", store, RUN)
    mirror.close()
    with pytest.raises(SnapshotError, match="mirrors run"):
        Mirror(tmp_path / "mirror", store, "other")
    Mirror(tmp_path / "mirror", store, RUN).close()


def test_a_mirror_goes_on_after_a_restart_of_its_process_but_not_of_the_machine(
    store: MemoryStore, trainer: Trainer, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(mirror, v(0))
    mirror.close()
    with Mirror(tmp_path / "mirror", store, RUN) as again:
        assert again.version == v(0)
    boot = tmp_path / "boot_id"
    boot.write_text("another start")
    monkeypatch.setattr("sync.weights.subscribe._BOOT", boot)
    with Mirror(tmp_path / "mirror", store, RUN) as rebooted:
        assert rebooted.version is None
        follow(rebooted, v(0), trainer)


def test_a_new_lineage_starts_with_an_anchor_that_names_its_parent(trainer: Trainer, mirror: Mirror) -> None:
    for step in (1, 2, 3):
        trainer.next(v(step))
    follow(mirror, v(3))
    trainer.anchor(v(2, lineage=1), parent=v(2))
    trainer.next(v(3, lineage=1))
    assert read_manifest(trainer.store, RUN, v(3, lineage=1)).parent == v(2)
    follow(mirror, v(3, lineage=1), trainer)
    assert read_latest(trainer.store, RUN) == v(3, lineage=1)


def test_a_version_is_published_once(store: MemoryStore, trainer: Trainer, tmp_path: Path) -> None:
    rival = Trainer(store, tmp_path / "rival")
    for _ in range(2):  # not on a second try either
        with pytest.raises(AlreadyPublished):
            rival.anchor(v(0))


class Failing(MemoryStore):
    """Fails once, at the first key that ends in `at`; `late`: behind the write. A key is taken from the first
    try on, as by the claims of object stores, which no listing shows and `delete` removes."""

    at, late = "", False

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.claims: set[str] = set()

    def _write(self, key: str, write: Callable[[], None]) -> None:
        if fails := bool(self.at) and key.endswith(self.at):
            self.at = ""
        if not fails or self.late:
            write()
        if fails:
            raise StoreError("the store went away")

    def create(self, key: str, data: bytes | Path) -> None:
        if key in self.claims:
            raise self._taken(key)
        self.claims.add(key)
        self._write(key, lambda: MemoryStore.create(self, key, data))

    def replace(self, key: str, data: bytes) -> None:
        self._write(key, lambda: MemoryStore.replace(self, key, data))

    def delete(self, key: str) -> None:
        self.claims.discard(key)
        super().delete(key)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", ["delta-00000.bin", "part-00001.json", "manifest.json", "LATEST"])
def test_a_version_that_failed_is_published_under_the_same_name(
    at: str, late: bool, begin: Begin, store: MemoryStore, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time-out a rank has used what it slept: a busy machine uses up none of it."""
    slept, sleep = list[float](), time.sleep
    clock = SimpleNamespace(monotonic=lambda: sum(slept), time=time.time)
    clock.sleep = lambda seconds: (sleep(seconds), slept.append(seconds))
    monkeypatch.setattr("sync.weights.publish.time", clock)
    failing = Failing(store._objects)
    trainer = begin(2, at=failing, timeout_seconds=1.0)
    failing.at, failing.late = at, late
    with suppress(StoreError):
        trainer.next(v(1))
    assert not failing.at
    for failing.at in ("model.safetensors", "manifest.json", ""):  # now as an anchor, until nothing fails
        with suppress(StoreError):
            trainer.anchor(v(1))
    trainer.next(v(2))
    follow(mirror, v(1))
    follow(mirror, v(2), trainer)
    assert read_latest(store, RUN) == v(2)


def test_the_last_shards_are_let_go_before_those_of_an_anchor_are_copied(trainer: Trainer) -> None:
    """On a GPU the shard fills memory that training needs."""
    (publisher,), held = trainer.publishers, weakref.ref(trainer.publishers[0]._shard)

    class Watched(dict[str, np.ndarray]):
        def __getitem__(self, name: str) -> np.ndarray:
            assert held() is None
            return super().__getitem__(name)

    publisher.anchor(v(1), None, trainer.save(), Watched(trainer.shards(0)))
    assert held() is None


def test_a_publisher_of_anchors_alone_keeps_no_copy_of_the_shard(trainer: Trainer, mirror: Mirror) -> None:
    publisher = Publisher(trainer.store, trainer.run, trainer.slices(0), anchors_only=True)
    for step in (1, 2):
        trainer.step()
        tensors = {name: torch.from_numpy(bits.view("i2")) for name, bits in trainer.shards(0).items()}
        publisher.anchor(v(step), None, trainer.save(), tensors)
        assert (publisher._shard, publisher.anchor_due) == (None, True)
        follow(mirror, v(step), trainer)
    trainer.save()
    trainer.step(1.0)
    objects = trainer.store.list("")
    with pytest.raises(SnapshotError, match="saved at another step"):
        publisher.anchor(v(3), None, trainer.folder, trainer.shards(0))
    assert trainer.store.list("") == objects
    with pytest.raises(SnapshotError, match="publish an anchor first"):
        publisher.delta(v(3), trainer.shards(0))


def test_a_rank_that_leaves_no_receipt_or_one_on_another_base_is_named(begin: Begin) -> None:
    trainer = begin(2, timeout_seconds=0.05)
    first, second = trainer.publishers
    with pytest.raises(StoreError, match="rank 1 of 2 left no receipt of L000-v00000001"):
        first.delta(v(1), trainer.shards(0))
    assert first.anchor_due
    assert [*admin.ls(trainer.store, RUN).manifests] == [v(0)]
    trainer.anchor(v(2))
    second.delta(v(3), trainer.shards(1))
    second.delta(v(4), trainer.shards(1))
    with pytest.raises(SnapshotError, match="every rank must publish every version"):
        first.delta(v(4), trainer.shards(0))


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (np.zeros(23, "u2"), "uint16(23,)"),
        (np.zeros(24, "u4"), "uint32(24,)"),
        (torch.zeros(24, dtype=torch.float16), "torch.float16(24,)"),
        (None, "nothing"),
    ],
)
def test_shards_of_another_shape_or_type_are_refused(trainer: Trainer, wrong: Any, got: str) -> None:
    (publisher,), shards = trainer.publishers, trainer.shards(0) | {"norm": wrong}
    why = re.escape(f"rank 0 got {got} for 'norm', its slice has 24 elements of f2: pass flat uint16 bits")
    with pytest.raises(SnapshotError, match=why):
        publisher.delta(v(1), shards)
    with pytest.raises(SnapshotError, match=why):
        publisher.anchor(v(2), None, None, shards)


def test_an_anchor_is_due_when_the_deltas_cost_the_set_share(begin: Begin) -> None:
    trainer = begin(anchor_share=0.5)
    (publisher,), spent, step = trainer.publishers, 0, 0
    while not publisher.anchor_due:
        step += 1
        report = trainer.next(v(step), 0.3)
        assert spent < 0.5 * report.full_bytes
        spent += report.bytes
    assert spent >= 0.5 * report.full_bytes
    trainer.anchor(v(step + 1))
    assert not publisher.anchor_due


def test_slices_that_leave_out_a_part_of_the_model_are_refused(trainer: Trainer) -> None:
    trainer.publishers = [Publisher(trainer.store, trainer.run, trainer.slices(0)[1:])]
    trainer.anchor(v(1))
    with pytest.raises(SnapshotError, match="every element belongs to exactly one rank"):
        trainer.next(v(2))


def test_an_adapter_is_published_and_staged_as_a_folder_of_its_own_kind(
    store: MemoryStore, mirror: Mirror, tmp_path: Path
) -> None:
    weights = {"lora_A": np.arange(8, dtype="f4")}
    folder = saved(tmp_path / "adapter", weights)
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(folder / f"adapter_{name}")
    publisher = publisher_of(store, weights)
    assert publisher.anchor(v(0), None, folder, bits_of(weights), "lora").kind == "lora"
    staged = mirror.stage(v(0))
    assert {path.name for path in staged.path.iterdir()} == {path.name for path in folder.iterdir()}
    assert digests(staged.path) == {"lora_A": digest(bits_of(weights)["lora_A"])}


def test_versions_of_another_run_of_the_same_name_are_neither_read_nor_kept_and_those_of_none_are_taken(
    begin: Begin, store: MemoryStore, mirror: Mirror
) -> None:
    begin(run_id="old")
    mirror.follow("old")
    follow(mirror, v(0))
    mirror.follow("new")
    assert mirror.version is None
    with pytest.raises(SnapshotError, match=r"is of another run 'run' \(id old\), this one has id new"):
        mirror.stage(v(0))
    for run_id in ("new", None):
        mirror.follow("new")
        store._objects.clear()
        trainer = begin(run_id=run_id)
        trainer.next(v(1))
        follow(mirror, v(1), trainer)
        mirror.follow("new")
        assert mirror.version == v(1)
        mirror.follow("another")
