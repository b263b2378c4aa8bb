"""What must be on disk, and in which order; a full disk is waited for; a torn line is left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import disks
import numpy as np
import pytest
from disks import fill, free, mounted
from published import bits_of, publisher_of, saved

from sync.base import durable
from sync.base.durable import append, is_full, until_disk_space
from sync.base.errors import DataError
from sync.base.jsonl import JsonLines, read_lines
from sync.weights.snapshots.manifest import read_latest
from sync.weights.stores.store import DirectoryStore
from sync.wire import Version


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return disks.noted(tmp_path, monkeypatch)


def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_before_the_end(
    tmp_path: Path, order: list[str]
) -> None:
    for text in (b"one", b"two"):
        durable.write(tmp_path / "x.json", text, 0o600)
    assert order == ["force .x.json.new", "rename .x.json.new", "force ."] * 2
    assert (tmp_path / "x.json").read_bytes() == b"two"
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600


def test_a_key_of_a_directory_store_is_on_disk_with_all_its_folders(tmp_path: Path, order: list[str]) -> None:
    store = DirectoryStore(tmp_path / "store")
    order.clear()
    store.create("run/L000-v00000001/manifest.json", b"{}")
    assert order[0].startswith("force store/.pending/")
    assert order[1:] == ["force store/run", "force store", "force store/run/L000-v00000001"]


# --- a full disk: a real one where it may be mounted -------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with mounted(tmp_path / "small", 64) as folder:
        yield folder


def test_a_full_disk_is_known_however_it_was_wrapped() -> None:
    real, hidden = OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 576 vs 534")
    hidden.__context__ = real  # as torch does
    told = ValueError("I/O error: No space left on device (os error 28)")
    assert [is_full(error) for error in (real, hidden, told, OSError(errno.EDQUOT, "quota"))] == [True] * 4
    assert not is_full(OSError(errno.EACCES, "Permission denied"))


def test_a_line_is_appended_whole_or_not_at_all(small: Path) -> None:
    path = small / "lines"
    assert append(path, b"one\n")
    fill(small)
    assert not append(path, b"x" * 9000)
    assert path.read_bytes() == b"one\n"
    assert not append(small / "new", b"x" * 9000)
    free(small)
    assert append(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_lines_that_found_no_room_come_with_the_next_one(small: Path) -> None:
    lines = JsonLines(small / "lines")
    fill(small)
    lines.write("one")
    free(small)
    lines.write("two")
    lines.close()
    assert (small / "lines").read_text() == '"one"\n"two"\n'


def test_a_publisher_waits_for_room_and_says_so_once(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(small / "store")
    weights = {"w": np.zeros(4096, np.float32)}
    folder, publisher = saved(small.parent / "model", weights), publisher_of(store, weights)
    fill(small)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert store.list("") == [], "nothing half-written can be seen"
        if len(waits) == 3:
            free(small)

    monkeypatch.setattr(durable, "time", SimpleNamespace(sleep=wait))
    with caplog.at_level("WARNING"):
        publisher.anchor(Version(0, 0), None, folder, bits_of(weights))
    assert read_latest(store, "run") == Version(0, 0)
    assert len(waits) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "disk full: run/L000-v00000000/model/config.json in the store" in caplog.text


def test_other_failures_are_not_waited_for() -> None:
    def refuse() -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        until_disk_space(refuse, "what")


@pytest.mark.parametrize("torn", ["", '{"b": "', '{"b": "é"}', '{"b": "é"}\n', "{", "[1]"], ids=repr)
def test_what_a_crash_tore_is_left_out(tmp_path: Path, torn: str) -> None:
    """A file may end within a character; separators of Unicode are no ends of lines."""
    path, lines = tmp_path / "x.jsonl", '{"a": "\u2028\x85é"}\n{}\n'
    whole = [{"a": "\u2028\x85é"}, {}]
    assert read_lines(path) == [], "a missing file"
    path.touch()
    assert read_lines(path) == [], "an empty one"
    for cut in range(len(torn.encode()) + 1):
        path.write_bytes(lines.encode() + torn.encode()[:cut])
        found = read_lines(path)
        assert found[:2] == whole
        assert found[2:] in ([], [{"b": "é"}])


@pytest.mark.parametrize("line", [b"", b"\xff\xfe", b"3", b"null", b"{", b"[" * 100_000, b'{"a": 1} {}'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: .*; the file was altered"):
        read_lines(path)
