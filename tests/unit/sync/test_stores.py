"""One contract for every store."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from sync.errors import AlreadyPublished, StoreError
from sync.stores import Store, open_store
from sync.stores.config import DirectoryStoreConfig
from sync.stores.directory import DirectoryStore
from sync.stores.memory import MemoryStore


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return DirectoryStore(tmp_path / "store")


def test_what_was_created_reads_back_from_bytes_and_from_a_file(store: Store, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    source = tmp_path / "source"
    source.write_bytes(content)
    store.create("run/L000-v00000001/a.bin", content)
    store.create("run/L000-v00000001/b.bin", source)
    store.fetch("run/L000-v00000001/b.bin", tmp_path / "copy")
    assert store.read("run/L000-v00000001/a.bin") == content
    assert (tmp_path / "copy").read_bytes() == content


def test_an_empty_object_is_kept(store: Store, tmp_path: Path) -> None:
    store.create("run/empty", b"")
    store.fetch("run/empty", tmp_path / "copy")
    assert store.read("run/empty") == b""
    assert (tmp_path / "copy").read_bytes() == b""
    assert store.exists("run/empty")


def test_a_key_is_created_once_even_with_the_same_bytes(store: Store) -> None:
    store.create("run/key", b"first")
    for again in (b"first", b"second"):
        with pytest.raises(AlreadyPublished, match="run/key"):
            store.create("run/key", again)
    assert store.read("run/key") == b"first"


def test_of_two_writers_that_race_one_wins_and_the_other_is_told(store: Store) -> None:
    barrier, won, told = threading.Barrier(2), [], []

    def write(content: bytes) -> None:
        barrier.wait()
        try:
            store.create("run/raced", content)
            won.append(content)
        except AlreadyPublished:
            told.append(content)

    writers = [threading.Thread(target=write, args=(content,)) for content in (b"a" * 1000, b"b" * 1000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(won) == len(told) == 1
    assert store.read("run/raced") == won[0]


def test_replace_makes_and_overwrites(store: Store) -> None:
    store.replace("run/LATEST", b"1")
    store.replace("run/LATEST", b"22")
    assert store.read("run/LATEST") == b"22"


def test_a_missing_key_is_named(store: Store, tmp_path: Path) -> None:
    assert not store.exists("run/nothing")
    with pytest.raises(StoreError, match="run/nothing"):
        store.read("run/nothing")
    with pytest.raises(StoreError, match="run/nothing"):
        store.fetch("run/nothing", tmp_path / "copy")


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
    with pytest.raises(StoreError, match="is not a key"):
        store.create(key, b"1")
    with pytest.raises(StoreError, match="is not a key"):
        store.read(key)


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


def test_a_file_in_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot open"):
        DirectoryStore(tmp_path / "store")


def test_a_directory_store_without_a_path_uses_the_default(tmp_path: Path) -> None:
    open_store(DirectoryStoreConfig(), tmp_path / "default").create("key", b"1")
    open_store(DirectoryStoreConfig(path=tmp_path / "own"), tmp_path / "default").create("key", b"2")
    assert (tmp_path / "default" / "key").read_bytes() == b"1"
    assert (tmp_path / "own" / "key").read_bytes() == b"2"
