"""Whatever a store holds costs its readers a message: never memory, disk, or what else is in it."""

from __future__ import annotations

import json
import operator
import os
import random
import shutil
import time
import tracemalloc
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_store as hostile
import msgspec
import numpy as np
import pytest
from hostile_store import RUN, delta_file, nested, parts_of, put_file, safetensors
from memory_store import MemoryStore
from published import bits_of, follow, publisher_of, saved, v
from safetensors.numpy import load_file
from waiting import until

from sync.base.errors import SnapshotError, StoreError
from sync.weights.snapshots import admin, checkpoint
from sync.weights.snapshots.checkpoint import check_no_code, refused
from sync.weights.snapshots.manifest import (
    LEASE_SECONDS,
    Lease,
    dump,
    lease,
    leased,
    manifest_key,
    read_manifest,
)
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


@pytest.fixture
def store(published: MemoryStore) -> MemoryStore:
    """Version 0, and three deltas on it."""
    return MemoryStore(dict(published._objects))


def refusal(store: MemoryStore, folder: Path, version: Version) -> str:
    """Why a new mirror does not take `version`."""
    with Mirror(folder / "mirror", store, RUN) as mirror:
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
    published: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ls, verify and gc go through each to its end; a reader follows a version, or is told why not."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng = random.Random(int(os.environ.get("SEED", "5")))

    def all_of(store: MemoryStore, folder: Path) -> None:
        admin.ls(store, RUN)
        admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, dry_run=True)
        results = list(admin.verify(store, RUN, folder))
        assert {result.problem is None for result in results} <= {True, False}
        assert len([one for one in results if isinstance(one.version, Version)]) >= 3

    for i in range(MUTANTS):
        store = MemoryStore(dict(published._objects))
        for _ in range(rng.randrange(1, 3)):
            hostile.mutate_store(store, published, rng)
        folder = tmp_path / str(i)
        folder.mkdir()
        taken = peak(lambda store=store, folder=folder: all_of(store, folder))
        shutil.rmtree(folder)
        assert taken < 4 * MIB, (i, taken)


# --- delta files --------------------------------------------------------------------------------------------


def test_a_header_that_unpacks_to_hundreds_of_megabytes_is_refused_at_the_price_of_its_length(
    store: MemoryStore, tmp_path: Path
) -> None:
    head, _ = parts_of(store.read("run/L000-v00000001/delta-00000.bin"))
    head["ranges"] = [["a", 0, 0, "f4", 0, 0, 0, b""]] * 1_500_000
    bomb = delta_file(msgspec.msgpack.encode(head), b"")
    assert len(bomb) < 8192
    put_file(store, v(1), "delta-00000.bin", bomb)
    with Mirror(tmp_path / "mirror", store, RUN) as mirror:
        follow(mirror, v(0))

        def stage() -> None:
            with pytest.raises(SnapshotError, match="impossible length"):
                mirror.stage(v(1))

        assert peak(stage) < MIB


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ranges: ranges.extend([["a", 0, 1, "f4", 0, 0, 0, b""]] * 9), "12 ranges, the model 3"),
        (lambda ranges: operator.setitem(ranges[0], 2, 0), "is empty or lies outside of it"),
    ],
    ids=["more than tensors", "of nothing"],
)
def test_ranges_that_no_publisher_writes_are_refused(
    store: MemoryStore, tmp_path: Path, change: Callable[[list[Any]], object], why: str
) -> None:
    head, blobs = parts_of(store.read("run/L000-v00000001/delta-00000.bin"))
    change(head["ranges"])
    put_file(store, v(1), "delta-00000.bin", delta_file(msgspec.msgpack.encode(head), blobs))
    assert why in refusal(store, tmp_path, v(1))


def test_a_delta_of_more_files_than_any_run_has_ranks_is_refused(store: MemoryStore) -> None:
    key = manifest_key(RUN, v(1))
    told = msgspec.json.decode(store.read(key))
    told["files"] = [{"key": f"delta-{rank:05d}.bin", "size": 0, "blake3": "0" * 64} for rank in range(4097)]
    store._objects[key] = msgspec.json.encode(told | {"bytes": 0})
    why = "names 4097 files, a delta has one of each rank and at most 4096"
    with pytest.raises(SnapshotError, match=why):
        read_manifest(store, RUN, v(1))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is another file"),
        (delta_file(nested(90_000, b"\x91", b"\x90"), b""), "header cannot be read|impossible length"),
        (b"ODDELTA3" + b"\xff" * 8, "impossible length"),
    ],
    ids=["empty", "nested", "endless"],
)
def test_a_delta_that_is_none_is_one_message(
    store: MemoryStore, tmp_path: Path, data: bytes, why: str
) -> None:
    put_file(store, v(1), "delta-00000.bin", data)
    with Mirror(tmp_path / "mirror", store, RUN) as mirror, pytest.raises(SnapshotError, match=why):
        mirror.stage(v(1))


class Watched(MemoryStore):
    """Remembers what was fetched; says of a key what it is told to."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner._objects)
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


def test_sizes_are_compared_before_a_byte_is_fetched(store: MemoryStore, tmp_path: Path) -> None:
    watched = Watched(store)
    key = "run/L000-v00000000/model/model.safetensors"
    watched.sizes[key] = 1 << 50
    assert f"{key} has {1 << 50} bytes, the manifest says" in refusal(watched, tmp_path, v(0))
    assert key not in watched.fetched
    for small in ("run/LATEST", "run/L000-v00000000/manifest.json"):
        watched.sizes = {small: MOST_SMALL + 1}
        with pytest.raises(StoreError, match="at most 1048576 belong"):
            read_small(watched, small)


def test_a_delta_longer_than_the_model_is_not_fetched(store: MemoryStore, tmp_path: Path) -> None:
    watched, key = Watched(store), "run/L000-v00000001/delta-00000.bin"
    put_file(store, v(1), "delta-00000.bin", bytes(20_000))
    assert "has 20000 bytes of delta, the whole model would take" in refusal(watched, tmp_path, v(1))
    assert key not in watched.fetched


def test_a_version_that_the_disk_has_no_room_for_is_not_fetched(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(store)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("sync.weights.snapshots.manifest.shutil.disk_usage", lambda _: usage(9, 0, 1000))
    assert "and" in refusal(watched, tmp_path, v(0))
    assert watched.fetched == []


def test_a_missing_delta_of_one_source_is_got_from_another(store: MemoryStore, tmp_path: Path) -> None:
    """The spare slot needs a file that is gone; the live one does not."""
    with Mirror(tmp_path / "mirror", store, RUN) as mirror:
        for step in (0, 1, 2):
            follow(mirror, v(step))
        store.delete("run/L000-v00000002/delta-00000.bin")
        (tmp_path / "mirror/deltas/L000-v00000002/00000.bin").unlink()
        follow(mirror, v(3))


# --- checkpoints --------------------------------------------------------------------------------------------


def entry(start: int, end: int, shape: list[int], kind: str = "F32") -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size", "why"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "safetensors"),
        ({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, 8, "safetensors"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12, "safetensors"),
        ({"a": entry(0, 4, [1])}, 12, "safetensors"),
        ({"a": entry(0, 8, [-1, -2])}, 8, "safetensors"),
        ({"a": entry(0, 0, [2**31, 0])}, 0, None),
        ({"a": entry(0, 4, [2**63] * 60)}, 4, "safetensors"),
        ({"a": entry(0, 4, [1], "F33")}, 4, "F33"),
    ],
)
def test_tensors_tile_their_file_or_are_refused(
    tmp_path: Path, header: dict[str, object], size: int, why: str | None
) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(json.dumps(header).encode(), bytes(size)))
    if why is None:
        assert set(checkpoint.tensors(tmp_path)) == {"a"}
    else:
        with pytest.raises(SnapshotError, match=why):
            checkpoint.tensors(tmp_path)


HEADERS = [nested(90_000), b'{"a":' + nested(90_000) + b"}", b"", b"\xff", b"[]"]


@pytest.mark.parametrize("content", [b"", *(safetensors(text, b"") for text in HEADERS)])
def test_a_header_that_is_none_is_one_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SnapshotError, match="safetensors"):
        checkpoint.tensors(tmp_path)


# --- what is looked after -----------------------------------------------------------------------------------


def test_one_bad_entry_of_each_kind_stops_neither_ls_nor_verify_nor_gc(
    store: MemoryStore, tmp_path: Path
) -> None:
    store.replace("run/L000-v00000002/manifest.json", b"{")
    store.replace("run/L1-v2/manifest.json", b"{}")
    store.replace("run/Lovely/notes.txt", b"")
    store.replace("run/LATEST", b"\xff\xfe")
    store.replace("run/leases/a.json", nested(90_000))
    store.replace("run/leases/b.json", dump(Lease(v(0), 1e300)))
    names = {"'L1-v2'", "'Lovely'", "L000-v00000002", "LATEST"}
    listing = admin.ls(store, RUN)
    assert {one.name for one in listing.odd} == names
    assert [version.step for version in listing.manifests] == [0, 1, 3]
    results = {str(one.version): one.problem for one in admin.verify(store, RUN, tmp_path)}
    assert {name for name, problem in results.items() if problem is None} == {str(v(0)), str(v(1))}
    done = admin.gc(store, RUN, keep_anchors=1, grace_seconds=0)
    assert {one.name for one in done.odd} == names | {"'run/leases/a.json'", "'run/leases/b.json'"}
    assert done.kept == [v(0), v(1), v(3)]  # nobody can tell what 3 is built on


def test_gc_removes_no_chain_of_a_manifest_that_it_cannot_read(store: MemoryStore, tmp_path: Path) -> None:
    """0 and what is built on it are superfluous; the manifest of 1 cannot be read, so 2 and 3 stay."""
    weights = {"w": np.zeros(4, "f4")}
    publisher_of(store, weights).anchor(v(4), None, saved(tmp_path / "other", weights), bits_of(weights))
    later = time.time() + 10
    sound = admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, now=later, dry_run=True)
    assert sound.removed == [v(0), v(1), v(2), v(3)]
    store.replace(manifest_key(RUN, v(1)), b"{}")
    done = admin.gc(store, RUN, keep_anchors=1, grace_seconds=0, now=later)
    assert (done.removed, done.kept) == ([v(0)], [v(2), v(3), v(4)])
    assert [one.name for one in done.odd] == [str(v(1))]


@pytest.mark.parametrize(
    "key",
    ["model/../../x.json", "/model/x.json", "model/x\0.json", "model/.x.json", "delta-00000.bin", "model/x",
     "model/a.py", "model/pytorch_model.bin", "model/pytorch_model.bin.index.json", "model/x.pt", "x.json"],
)  # fmt: skip
def test_files_that_leave_the_folder_or_could_run_are_refused(
    store: MemoryStore, tmp_path: Path, key: str
) -> None:
    assert refused(key) is not None
    path = manifest_key(RUN, v(0))
    manifest = msgspec.json.decode(store.read(path))
    manifest["files"][0]["key"] = key
    store.replace(path, msgspec.json.encode(manifest))
    with pytest.raises(SnapshotError, match="altered"):
        read_manifest(store, RUN, v(0))


def test_code_that_a_config_names_never_comes_from_a_store(store: MemoryStore, tmp_path: Path) -> None:
    put_file(store, v(0), "model/config.json", b'{"auto_map": {"AutoModel": "x.X"}}')
    assert "config.json from a store has 'auto_map'" in refusal(store, tmp_path, v(0))
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


@pytest.mark.parametrize("taken", [0, 1])
def test_a_store_that_refuses_leases_or_their_renewals_does_not_stop_the_reader(
    store: MemoryStore, caplog: pytest.LogCaptureFixture, taken: int
) -> None:
    class Failing(Watched):
        writes = 0

        def replace(self, key: str, data: bytes) -> None:
            self.writes += 1
            if self.writes > taken:
                raise StoreError("no")
            super().replace(key, data)

    failing = Failing(store)
    with lease(failing, RUN, v(1), seconds=0.03):
        until(lambda: failing.writes >= 3)
    assert f"the lease on {v(1)} was not written: no" in caplog.text
    assert store.list("run/leases/") == []


def test_leases_hold_for_their_time_and_no_year(store: MemoryStore) -> None:
    now = 1e9
    for name, ahead in {"dead": -1.0, "live": LEASE_SECONDS, "year": 3e7}.items():
        store.replace(f"run/leases/{name}.json", dump(Lease(v(len(name)), now + ahead)))
    store.replace("run/leases/none.json", b"")
    found, odd = leased(store, RUN, now)
    assert found == {v(4)}
    assert set(odd) == {"run/leases/year.json", "run/leases/none.json"}


def test_a_lease_given_back_while_leases_are_read_is_no_fault(store: MemoryStore) -> None:
    class GivenBack(Watched):
        def read(self, key: str) -> bytes:
            store.delete(key)
            return super().read(key)

    store.replace("run/leases/x.json", dump(Lease(v(1), 2.0)))
    assert leased(GivenBack(store), RUN, 1.0) == (set(), {})
