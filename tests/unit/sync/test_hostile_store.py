"""Whatever a store holds costs its readers a message: never memory, disk, or what else is in it."""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import hostile_store as hostile
import msgspec
import numpy as np
import pytest
from hostile_store import RUN, delta_file, nested, parts_of, put_file, safetensors
from memory_store import MemoryStore
from published import bits_of, publisher_of, saved, v
from safetensors.numpy import load_file
from waiting import until

from sync.base.errors import SnapshotError, StoreError
from sync.weights.snapshots import admin, checkpoint
from sync.weights.snapshots.checkpoint import check_no_code, refused
from sync.weights.snapshots.manifest import Lease, dump, lease, leased, manifest_key, read_manifest
from sync.weights.stores import MOST_SMALL, read_small
from sync.weights.stores.store import DirectoryStore
from sync.weights.subscribe import Mirror
from sync.wire import Version

MUTANTS = int(os.environ.get("MUTANTS", "200"))
MIB = 1 << 20


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    store = MemoryStore()
    hostile.publish(store, tmp_path_factory.mktemp("published") / "model")
    return store


class Watched(MemoryStore):
    """Remembers what was fetched; says of a key what it is told to."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.fetched: list[str] = []
        self.sizes: dict[str, int] = {}

    def fetch(self, key: str, path: Path) -> None:
        self.fetched.append(key)
        super().fetch(key, path)

    def read(self, key: str) -> bytes:
        assert self.sizes.get(key, 0) <= MOST_SMALL, f"{key} was read"
        return super().read(key)

    def size(self, key: str) -> int:
        return self.sizes.get(key) or super().size(key)


@pytest.fixture
def store(published: MemoryStore) -> Watched:
    """Version 0, and three deltas on it."""
    return Watched(dict(published._objects))


def refusal(store: MemoryStore, version: Version) -> str:
    """Why a new mirror does not take `version`."""
    with TemporaryDirectory() as folder, Mirror(Path(folder), store, RUN) as mirror:
        with pytest.raises((SnapshotError, StoreError)) as refused:
            mirror.stage(version)
        assert mirror.version is None
    return str(refused.value)


def peak(work: Callable[[], object]) -> int:
    """Most bytes that Python held at once meanwhile, beyond what it held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_mutant_of_a_store_raises_anything_but_messages_or_takes_memory(
    published: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ls, verify and gc go through each to its end; a reader follows a version, or is told why not."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng = random.Random(int(os.environ.get("SEED", "5")))

    def all_of(store: MemoryStore) -> None:
        admin.ls(store, RUN)
        admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, dry_run=True)
        assert sum(name.startswith("L000-v0000000") for name, _ in admin.verify(store, RUN)) >= 3

    for i in range(MUTANTS):
        store = MemoryStore(dict(published._objects))
        for _ in range(rng.randrange(1, 3)):
            hostile.mutate_store(store, published, rng)
        taken = peak(lambda store=store: all_of(store))
        assert taken < 4 * MIB, (i, taken)


# --- delta files --------------------------------------------------------------------------------------------


def test_a_header_that_unpacks_to_much_is_refused_at_the_price_of_its_length(store: MemoryStore) -> None:
    """To hundreds of megabytes."""
    head, _ = parts_of(store.read("run/L000-v00000001/delta-00000.bin"))
    head["ranges"] = [["a", 0, 0, "f4", 0, 0, 0, b""]] * 1_500_000
    bomb = delta_file(msgspec.msgpack.encode(head), b"")
    assert len(bomb) < 8192
    put_file(store, v(1), "delta-00000.bin", bomb)

    def stage() -> None:
        assert "impossible length" in refusal(store, v(1))

    assert peak(stage) < MIB


def test_a_delta_that_no_publisher_writes_is_one_message(store: MemoryStore) -> None:
    """It has more ranges than there are tensors, or nothing at all."""
    head, blobs = parts_of(store.read("run/L000-v00000001/delta-00000.bin"))
    head["ranges"] += [["a", 0, 1, "f4", 0, 0, 0, b""]] * 9
    put_file(store, v(1), "delta-00000.bin", delta_file(msgspec.msgpack.encode(head), blobs))
    assert "has 12 ranges, the model 3 tensors" in refusal(store, v(1))
    put_file(store, v(1), "delta-00000.bin", b"")
    assert "it is another file" in refusal(store, v(1))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (
            [f"delta-{rank:05d}.bin" for rank in range(4097)],
            "names 4097 files, a delta has one of each rank and at most 4096",
        ),
        (["delta-00001.bin"], "names 'delta-00001.bin' in the place of delta-00000.bin"),
        (["delta-00000.bin"] * 2, "names 2 files, some twice"),
    ],
    ids=["more than ranks", "another rank's", "one twice"],
)
def test_a_delta_is_one_file_of_each_rank_in_turn(store: MemoryStore, names: list[str], why: str) -> None:
    key = manifest_key(RUN, v(1))
    told = msgspec.json.decode(store.read(key)) | {"bytes": 0}
    told["files"] = [{"key": name, "size": 0, "blake3": "0" * 64} for name in names]
    store.replace(key, msgspec.json.encode(told))
    with pytest.raises(SnapshotError, match=why):
        read_manifest(store, RUN, v(1))


def test_what_is_too_large_for_its_manifest_its_model_or_the_disk_is_not_fetched(
    store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "run/L000-v00000000/model/model.safetensors"
    store.sizes[key] = 1 << 50
    assert f"{key} has {1 << 50} bytes, the manifest says" in refusal(store, v(0))
    assert key not in store.fetched
    for small in ("run/LATEST", "run/L000-v00000000/manifest.json"):
        store.sizes = {small: MOST_SMALL + 1}
        with pytest.raises(StoreError, match="at most 1048576 belong"):
            read_small(store, small)
    store.sizes.clear()
    put_file(store, v(1), "delta-00000.bin", bytes(20_000))
    assert "has 20000 bytes of delta, the whole model would take" in refusal(store, v(1))
    assert "run/L000-v00000001/delta-00000.bin" not in store.fetched
    store.fetched.clear()
    disk = SimpleNamespace(free=1000)
    monkeypatch.setattr("sync.weights.snapshots.manifest.shutil.disk_usage", lambda _: disk)
    assert "has 1000: free some" in refusal(store, v(0))
    assert store.fetched == []


# --- checkpoints --------------------------------------------------------------------------------------------


def file_of(size: int, *tensors: tuple[int, int, list[int]], kind: str = "F32") -> bytes:
    """Tensors "a", "b" …, each from byte to byte and of a shape, over so many bytes."""
    header = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        for name, (start, end, shape) in zip("abc", tensors, strict=False)
    }
    return safetensors(json.dumps(header).encode(), bytes(size))


ODD_KIND = file_of(4, (0, 4, [1]), kind="F33")
OVERLAPPING = file_of(12, (0, 8, [2]), (4, 12, [2]))
WITH_A_HOLE = file_of(12, (0, 4, [1]), (8, 12, [1]))


@pytest.mark.parametrize("content", [OVERLAPPING, WITH_A_HOLE, ODD_KIND, safetensors(nested(90_000), b"")])
def test_a_checkpoint_whose_tensors_do_not_tile_their_file_is_one_message(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SnapshotError, match="F33" if content == ODD_KIND else "as safetensors"):
        checkpoint.tensors(tmp_path)


def test_a_tensor_may_be_empty_however_long_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of(0, (0, 0, [2**31, 0])))
    assert set(checkpoint.tensors(tmp_path)) == {"a"}


# --- what is looked after -----------------------------------------------------------------------------------


class GivenBack(MemoryStore):
    """Its leases are given back while they are read."""

    def read(self, key: str) -> bytes:
        self.delete(key)
        return super().read(key)


def test_one_bad_entry_of_each_kind_stops_neither_ls_nor_verify_nor_gc(
    store: MemoryStore, tmp_path: Path
) -> None:
    """The last version, of another model, makes all others superfluous."""
    weights = {"w": np.zeros(4, "f4")}
    publisher_of(store, weights).anchor(v(4), None, saved(tmp_path / "other", weights), bits_of(weights))
    store.replace("run/L000-v00000002/manifest.json", b"{")
    store.replace("run/L1-v2/manifest.json", b"{}")
    store.replace("run/Lovely/notes.txt", b"")
    store.replace("run/LATEST", b"\xff\xfe")
    store.replace("run/leases/a.json", nested(90_000))
    store.replace("run/leases/b.json", dump(Lease(v(0), time.time() + 3e7)))
    names = {"'L1-v2'", "'Lovely'", "L000-v00000002", "LATEST"}
    listing = admin.ls(store, RUN)
    assert listing.odd.keys() == names
    assert [version.step for version in listing.manifests] == [0, 1, 3, 4]
    results = dict(admin.verify(store, RUN))
    assert {name for name, problem in results.items() if problem is None} == {str(v(0)), str(v(1))}
    done = admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, now=time.time() + 10)
    assert done.odd.keys() == names | {"'run/leases/a.json'", "'run/leases/b.json'"}
    assert (done.removed, done.kept) == ([v(0), v(1)], [v(3), v(4)]), "nobody can tell what 3 is built on"
    assert leased(GivenBack(store._objects), RUN, time.time()) == (set(), {}), "that is no fault"


@pytest.mark.parametrize(
    "key",
    ["model/../../x.json", "/model/x.json", "model/x\0.json", "model/.x.json", "delta-00000.bin", "model/x",
     "model/a.py", "model/pytorch_model.bin", "model/pytorch_model.bin.index.json", "model/x.pt", "x.json"],
)  # fmt: skip
def test_files_that_leave_the_folder_or_could_run_are_refused(store: MemoryStore, key: str) -> None:
    assert refused(key) is not None
    path = manifest_key(RUN, v(0))
    manifest = msgspec.json.decode(store.read(path))
    manifest["files"][0]["key"] = key
    store.replace(path, msgspec.json.encode(manifest))
    with pytest.raises(SnapshotError, match="altered"):
        read_manifest(store, RUN, v(0))


def test_code_that_a_config_names_never_comes_from_a_store(store: MemoryStore, tmp_path: Path) -> None:
    put_file(store, v(0), "model/config.json", b'{"auto_map": {"AutoModel": "x.X"}}')
    assert "config.json from a store has 'auto_map'" in refusal(store, v(0))
    config = tmp_path / "folder/config.json"
    config.parent.mkdir()
    for text in (b'{"auto\\u005fmap": {}}', b'{"megatron_config": {}}', b"[]", nested(90_000)):
        config.write_bytes(text)
        with pytest.raises(SnapshotError, match=r"from a store has|no file of settings"):
            check_no_code(config.parent)
    config.write_bytes(b'{"auto_map": null, "megatron_config": null, "hidden_size": 8}')
    check_no_code(config.parent)


def test_a_publisher_leaves_code_out(tmp_path: Path) -> None:
    weights = {"w": np.zeros(4, "f4")}
    store, folder = MemoryStore(), saved(tmp_path / "model", weights)
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "x.X"}, "hidden_size": 8}')
    (folder / "x.py").write_text("raise SystemExit")
    publisher_of(store, weights).anchor(v(0), None, folder, bits_of(weights))
    assert not any(key.endswith(".py") for key in store.list(""))
    with Mirror(tmp_path / "mirror", store, RUN) as mirror:
        staged = mirror.stage(v(0)).path
    assert json.loads((staged / "config.json").read_text()) == {"hidden_size": 8}
    assert set(load_file(staged / "model.safetensors")) == {"w"}


def test_a_link_out_of_a_store_is_not_followed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.create("run/whole", b"inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"outside")
    (tmp_path / "store/run/link").symlink_to(tmp_path / "outside/secret")
    (tmp_path / "store/run/folder").symlink_to(tmp_path / "outside")
    for key in ("run/link", "run/folder/secret"):
        for work in (store.read, store.size, lambda key: store.fetch(key, tmp_path / "copy")):
            with pytest.raises(StoreError, match="link"):
                work(key)
    with pytest.raises(StoreError, match="leads out"):
        store.create("run/folder/new", b"")
    store.delete("run/link")
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == ["secret"]
    assert store.read("run/whole") == b"inside"


# --- leases -------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_for_as_long_as_its_reader_reads(store: MemoryStore) -> None:
    with lease(store, RUN, v(1), seconds=0.3):
        (key,) = store.list("run/leases/")
        first = json.loads(store.read(key))["expires"]
        until(lambda: json.loads(store.read(key))["expires"] >= first + 0.5)
        assert leased(store, RUN, first + 0.1)[0] == {v(1)}
    assert store.list("run/leases/") == []


def test_a_store_that_refuses_a_lease_and_its_renewals_does_not_stop_the_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(MemoryStore):
        def replace(self, key: str, data: bytes) -> None:
            raise StoreError("no")

    with lease(Refusing(), RUN, v(1), seconds=0.03):
        until(lambda: caplog.text.count(f"the lease on {v(1)} was not written: no") >= 3)
