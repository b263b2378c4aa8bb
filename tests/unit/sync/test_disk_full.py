"""A full disk: recognised, waited for, and nothing half-written; a real one where it may be mounted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults import fill, free
from safetensors.numpy import save_file
from tmpfs import mounted

from sync.base import durable as room
from sync.base.durable import append, is_full, until_disk_space
from sync.base.jsonl import JsonLines
from sync.weights.publish import Publisher, Slice
from sync.weights.snapshots import checkpoint
from sync.weights.snapshots.manifest import read_latest
from sync.weights.stores.store import DirectoryStore
from sync.wire import RunIdentity, Version


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
    folder = small.parent / "model"
    folder.mkdir()
    save_file({"w": np.zeros(4096, np.float32)}, folder / "model.safetensors")
    places = checkpoint.tensors(folder)
    slices = [Slice("w", (4096,), "f4", 0, 4096)]
    publisher = Publisher(store, RunIdentity("run", model=checkpoint.fingerprint_of(places)), slices)
    fill(small)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert store.list("") == [], "nothing half-written can be seen"
        if len(waits) == 3:
            free(small)

    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=wait))
    with caplog.at_level("WARNING"):
        publisher.anchor(Version(0, 0), None, folder, checkpoint.bits(places))
    assert read_latest(store, "run") == Version(0, 0)
    assert len(waits) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "disk full: run/L000-v00000000/model/model.safetensors in the store" in caplog.text


def test_other_failures_are_not_waited_for() -> None:
    with pytest.raises(PermissionError):
        until_disk_space(_refuse, "what")


def _refuse() -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
