"""One contract for every store."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import bucket_server
import httpx
import httpx2
import msgspec
import pytest
import s3_server
from memory_store import MemoryStore
from ports import PATIENCE, Handler, served

from sync.base.errors import AlreadyPublished, StoreError
from sync.base.settings import BucketStoreConfig, DirectoryStoreConfig, ObjectStoreConfig, XetStoreConfig
from sync.weights.stores import Store, object_store, open_store
from sync.weights.stores.bucket import BucketStore
from sync.weights.stores.object_store import ObjectStore
from sync.weights.stores.store import DirectoryStore
from sync.weights.stores.xet import XetStore


@pytest.fixture(scope="module")
def hub() -> Iterator[bucket_server.Hub]:
    with bucket_server.serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Address of an S3 server with a bucket named "bucket"."""
    with s3_server.serve() as address:
        yield address


def options(address: str) -> dict[str, str]:
    return {"endpoint": address, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}


@pytest.fixture(params=["memory", "directory", "xet", "bucket", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of each kind."""
    kind, name = request.param, f"p{abs(hash(request.node.nodeid))}"
    if kind == "memory":
        return MemoryStore()
    if kind == "directory":
        return DirectoryStore(tmp_path / "store")
    if kind == "xet":
        return XetStore(tmp_path / "store")
    if kind == "bucket":
        return BucketStore("acme/weights", name, endpoint=request.getfixturevalue("hub").base, token="t")
    monkeypatch.setattr("sync.weights.stores.object_store._ONE_PUT", 50_000)
    return ObjectStore(f"s3://bucket/{name}", options(request.getfixturevalue("s3")))


@pytest.mark.parametrize("size", [0, 100_000])
def test_what_was_created_reads_back_from_bytes_and_from_a_file(
    store: Store, tmp_path: Path, size: int
) -> None:
    content = os.urandom(size)
    (tmp_path / "source").write_bytes(content)
    for key, source in (("run/v/a.bin", content), ("run/v/b.bin", tmp_path / "source")):
        store.create(key, source)
        store.fetch(key, tmp_path / "copy")
        assert store.read(key) == (tmp_path / "copy").read_bytes() == content
        assert store.exists(key)
        assert store.size(key) == size


def test_a_key_is_created_once_even_with_the_same_bytes_and_may_be_replaced(store: Store) -> None:
    store.create("run/key", b"first")
    for again in (b"first", b"second"):
        with pytest.raises(AlreadyPublished, match="run/key"):
            store.create("run/key", again)
    assert store.read("run/key") == b"first"
    for key in ("run/key", "run/LATEST"):
        for content in (b"1", b"22"):
            store.replace(key, content)
            assert store.read(key) == content


def test_of_two_writers_that_race_one_wins_and_the_other_is_told(store: Store) -> None:
    barrier = threading.Barrier(2)

    def write(content: bytes) -> bool:
        barrier.wait()
        try:
            store.create("run/raced", content)
        except AlreadyPublished:
            return False
        return True

    contents = b"a" * 1000, b"b" * 1000
    with ThreadPoolExecutor(2) as writers:
        (winner,) = itertools.compress(contents, writers.map(write, contents))
    assert store.read("run/raced") == winner


def test_a_missing_key_is_named(store: Store, tmp_path: Path) -> None:
    assert not store.exists("run/nothing")
    for ask in (store.size, store.read, lambda key: store.fetch(key, tmp_path / "copy")):
        with pytest.raises(StoreError, match="run/nothing"):
            ask("run/nothing")


def test_list_gives_exactly_the_keys_under_a_prefix(store: Store) -> None:
    for key in ("a/1/x", "a/1/y", "a/10/x", "b/1/x"):
        store.create(key, b".")
    assert store.list("a/1") == ["a/1/x", "a/1/y", "a/10/x"]
    assert store.list("a/1/") == ["a/1/x", "a/1/y"]
    assert store.list("") == ["a/1/x", "a/1/y", "a/10/x", "b/1/x"]
    assert store.list("c") == []


def test_a_deleted_key_is_gone_and_may_be_created_again(store: Store) -> None:
    store.create("a/b/c", b"1")
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert not store.exists("a/b/c")
    assert store.list("") == []
    store.create("a/b/c", b"2")
    assert store.read("a/b/c") == b"2"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "a/.hidden", "a b", "a\\b", "a/"])
def test_a_key_that_could_leave_its_place_is_refused(store: Store, key: str) -> None:
    for use in (lambda: store.create(key, b"1"), lambda: store.read(key)):
        with pytest.raises(StoreError, match="is not a key"):
            use()


def test_a_full_disk_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "store")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"No space left on device; free space there"):
        store.create("run/key", b"1")
    assert not store.exists("run/key")
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_what_a_killed_writer_left_is_removed_a_day_later(tmp_path: Path) -> None:
    DirectoryStore(tmp_path)
    old, new = tmp_path / ".pending" / "old", tmp_path / ".pending" / "new"
    for path, hours in ((old, 25), (new, 23)):
        path.write_bytes(b"half")
        then = time.time() - 3600 * hours
        os.utime(path, (then, then))
    DirectoryStore(tmp_path)
    assert [*(tmp_path / ".pending").iterdir()] == [new]
    with pytest.raises(StoreError, match="cannot open the store"):
        DirectoryStore(new)


# --- each kind on its own ---------------------------------------------------------------------------------


Fault = Literal["503", "drop", "lost", "cut"]
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "content-encoding", "keep-alive"}


class Proxy(ThreadingHTTPServer):
    """An HTTP proxy in front of one server: `fail` arranges faults, `hits` counts those that happened."""

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Between)
        self.upstream, self.base = upstream, f"http://127.0.0.1:{self.server_port}"
        self.hits, self.lock, self.faults = 0, threading.Lock(), list[tuple[str, Fault]]()

    def fail(self, pattern: str, kind: Fault, times: int = 1) -> None:
        """The next `times` requests whose "METHOD path" matches go wrong.

        503: refused, not forwarded. drop: closed, not forwarded. lost: forwarded, closed without an answer.
        cut: half of the answer, then closed.
        """
        self.faults += [(pattern, kind)] * times

    def fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if re.search(fault[0], line):
                    self.faults.remove(fault)
                    self.hits += 1
                    return fault[1]
        return None


class Between(Handler):
    server: Proxy

    def handle_any(self) -> None:
        body = self.body()
        fault = self.server.fault(f"{self.command} {self.path}")
        self.close_connection = fault is not None
        if fault == "drop":
            return
        if fault == "503":
            self.answer(503, b"busy")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        asked = {"headers": headers, "content": body, "trust_env": False, "timeout": PATIENCE}
        upstream = httpx.request(self.command, self.server.upstream + self.path, **asked)
        if fault == "lost":
            return
        ours = HOP_BY_HOP | {"date", "server"}
        answered = {name: value for name, value in upstream.headers.items() if name.lower() not in ours}
        length = len(upstream.content)
        if self.command == "HEAD":
            length = int(upstream.headers.get("content-length", 0))
        body = upstream.content[: length // 2] if fault == "cut" else upstream.content
        self.answer(upstream.status_code, body, {**answered, "content-length": str(length)})

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = handle_any


@pytest.fixture
def faulty_bucket(hub: bucket_server.Hub) -> Iterator[tuple[Store, Proxy]]:
    direct = hub.base
    with served(Proxy(direct)) as between:
        hub.base = between.base
        yield BucketStore("acme/faulty", uuid4().hex, endpoint=between.base, token="t"), between
        hub.base = direct


@pytest.fixture
def faulty_object(s3: str) -> Iterator[tuple[Store, Proxy]]:
    with served(Proxy(s3)) as between:
        yield ObjectStore(f"s3://bucket/{uuid4().hex}", options(between.base)), between


@pytest.mark.parametrize(
    ("service", "during", "pattern", "kind"),
    [("faulty_object", "write", "PUT .*key", kind) for kind in ("503", "drop", "lost")]
    + [("faulty_object", "read", "GET .*key", kind) for kind in ("503", "drop")]
    + [("faulty_bucket", "write", "batch", "503"), ("faulty_bucket", "write", "/v1/xorbs", "drop")]
    + [("faulty_bucket", "read", "paths-info", "503"), ("faulty_bucket", "read", "GET /xorb", "cut")],
)
def test_a_service_gets_over_faults_while_it_is_written_and_read(
    request: pytest.FixtureRequest, service: str, during: str, pattern: str, kind: Any
) -> None:
    """After a lost answer to a put the client finds its own object in the way, and knows it."""
    store, between = request.getfixturevalue(service)
    content = os.urandom(5000)
    if during == "write":
        between.fail(pattern, kind)
        store.create("run/key", content)
    else:
        store.create("run/key", content)
        between.fail(pattern, kind)
    assert store.read("run/key") == content
    assert between.hits == 1
    with pytest.raises(AlreadyPublished):
        store.create("run/key", content)


def test_a_large_object_of_which_a_part_failed_is_not_there(
    faulty_object: tuple[Store, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, between = faulty_object
    monkeypatch.setattr("sync.weights.stores.object_store._ONE_PUT", 50_000)
    between.fail("PUT .*partNumber", "503", 2)
    store.create("run/retried", os.urandom(12_000_000))
    assert between.hits == 2
    between.fail("POST .*uploadId", "503", 1000)
    monkeypatch.setitem(object_store._RETRY, "max_retries", 1)
    broken = ObjectStore(store._url, options(between.base))  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="cannot write 'run/failed'"):
        broken.create("run/failed", os.urandom(12_000_000))
    assert store.list("") == ["run/retried"]


def test_a_bucket_writer_that_fails_half_way_takes_its_content_back_and_one_that_dies_keeps_the_key_taken(
    hub: bucket_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And unseen, until it is deleted."""
    store = BucketStore("acme/halves", "runs", endpoint=hub.base, token="t")
    monkeypatch.setattr("sync.weights.stores.bucket._CLAIM_TIMEOUT", 0.2)
    batch, path = store._batch, store._path("run/key")

    def lost_at_the_copy(**operations: object) -> None:
        if "copy" in operations:
            raise httpx2.ConnectError("connection lost")
        batch(**operations)

    with monkeypatch.context() as broken, pytest.raises(StoreError, match="connection lost"):
        broken.setattr(store, "_batch", lost_at_the_copy)
        store.create("run/key", b"content")
    assert store._around(path) == {}
    half = [(b"half", f"{path}@{'0' * 32}")]
    batch(add=half)
    assert store.list("") == []
    with pytest.raises(AlreadyPublished):
        store.create("run/key", b"content")
    assert not store.exists("run/key")
    store.delete("run/key")
    store.create("run/key", b"content")
    batch(add=half)
    store.delete("run/key")
    assert store._around(path) == {}


def test_a_bucket_that_is_missing_and_may_not_be_made_is_said(hub: bucket_server.Hub) -> None:
    with pytest.raises(StoreError, match="cannot open the bucket acme/none"):
        BucketStore("acme/none", create=False, endpoint=hub.base, token="t")


def test_equal_content_is_kept_once_by_xet(tmp_path: Path) -> None:
    store, content = XetStore(tmp_path), os.urandom(2_000_000)
    for number in range(3):
        store.create(f"run/{number}", content)
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 2_000_000 < used < 4_000_000


def test_a_xet_store_without_its_chunks_says_so(tmp_path: Path) -> None:
    store = XetStore(tmp_path)
    store.create("run/key", os.urandom(50_000))
    shutil.rmtree(tmp_path / "xet")
    (tmp_path / "xet").mkdir()
    for ask in (store.read, lambda key: store.fetch(key, tmp_path / "copy")):
        with pytest.raises(StoreError, match="chunk missing"):
            ask("run/key")


def test_each_kind_is_opened_by_its_configuration_and_a_folder_without_one_where_the_run_says(
    hub: bucket_server.Hub, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.base)
    at = {"endpoint": s3, "region": "us-east-1"}
    configs = {
        "the store ": DirectoryStoreConfig(path=tmp_path / "d"),
        "the Xet store ": XetStoreConfig(path=tmp_path / "x"),
        "the bucket acme/opened": BucketStoreConfig(bucket="acme/opened"),
        "the store s3://": ObjectStoreConfig(url="s3://bucket/opened", options=at),
    }
    for name, config in configs.items():
        store = open_store(config, tmp_path / "default")
        store.create("run/key", b"content")
        assert store.read("run/key") == b"content"
        assert str(store).startswith(name)
    assert not (tmp_path / "default").exists()
    open_store(DirectoryStoreConfig(), tmp_path / "default").create("run/key", b"content")
    assert (tmp_path / "default/run/key").read_bytes() == (tmp_path / "d/run/key").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("digest", "size"), [(None, 0), (None, 5), ("", 0), ("z", 5), ("0" * 64, -1), ("0" * 64, 1 << 62)]
)
def test_a_pointer_of_xet_that_was_altered_is_one_message(
    tmp_path: Path, size: int, digest: str | None
) -> None:
    store = XetStore(tmp_path / "store")
    pointer = msgspec.msgpack.encode({"hash": digest, "size": size})
    DirectoryStore(tmp_path / "store/keys").create("run/key", pointer)
    with pytest.raises(StoreError, match=r"damaged|failed"):
        store.fetch("run/key", tmp_path / "copy")
