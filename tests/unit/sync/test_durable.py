"""What must be on disk, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sync.base import durable
from sync.weights.stores.store import DirectoryStore


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is forced to disk and what is renamed, in order."""
    noted: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any, *more: Any) -> Any:
            path = what if isinstance(what, Path) else Path(os.readlink(f"/proc/self/fd/{what}"))
            noted.append(f"{name} {path.relative_to(tmp_path)}")
            return real(what, *more)

        return call

    monkeypatch.setattr(os, "fsync", noting("force", os.fsync))
    monkeypatch.setattr(Path, "rename", noting("rename", Path.rename))
    return noted


def test_every_new_folder_has_its_name_on_disk(tmp_path: Path, order: list[str]) -> None:
    durable.make_folder(tmp_path / "a" / "b" / "c")
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert sorted(order) == ["force .", "force a", "force a/b"]


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
