"""A full disk: recognised, waited for, and nothing half-written; a real one where it may be mounted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tmpfs import mounted

from distill.bench.full_disk import fill, free
from distill.metrics.trackers import Lines
from sync import disk_full as room
from sync.disk_full import append, is_full, until_disk_space
from sync.errors import StoreError
from sync.stores.directory import DirectoryStore
from sync.stores.memory import MemoryStore
from sync.stores.retry_on_full import RetryOnFullStore


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with mounted(tmp_path / "small", 64) as folder:
        yield folder


def test_a_full_disk_is_known_however_it_was_wrapped() -> None:
    real = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RuntimeError) as hidden:
        try:
            raise real
        except OSError:
            raise RuntimeError("unexpected pos 576 vs 534")  # noqa: B904  # as torch does
    assert is_full(hidden.value)
    assert is_full(real)
    assert is_full(OSError(errno.EDQUOT, "quota"))
    assert is_full(ValueError("I/O error: No space left on device (os error 28)"))
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
    lines = Lines(small / "lines")
    fill(small)
    lines.write("one")
    free(small)
    lines.write("two")
    lines.close()
    assert (small / "lines").read_text() == "one\ntwo\n"


def test_a_version_is_written_when_there_is_room_and_said_once(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = RetryOnFullStore(DirectoryStore(small / "store"))
    fill(small)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert store.list("") == [], "nothing half-written can be seen"
        if len(waits) == 3:
            free(small)

    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=wait))
    with caplog.at_level("WARNING"):
        store.create("run/file", b"x" * 9000)
    assert store.read("run/file") == b"x" * 9000
    assert len(waits) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "disk full: run/file in the store" in caplog.records[0].getMessage()


def test_other_failures_of_a_store_are_not_waited_for(tmp_path: Path) -> None:
    store = RetryOnFullStore(MemoryStore())
    store.create("key", b"1")
    with pytest.raises(StoreError, match="already has"):
        store.create("key", b"2")
    with pytest.raises(PermissionError):
        until_disk_space(lambda: _refuse(), "what")


def _refuse() -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
