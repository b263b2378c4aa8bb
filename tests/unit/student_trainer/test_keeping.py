"""What survives a trainer: checkpoints and the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from student_trainer import checkpoint
from student_trainer.ledger import Ledger, read, trained_twice
from student_trainer.ranks import Ranks
from sync.errors import DataError
from sync.wire import Version

ALONE = Ranks(0, 1, torch.device("cpu"))


class FileEngine:
    """Keeps its state in one file, as DeepSpeed does in several."""

    def __init__(self, state: str = "") -> None:
        self.state = state

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        (Path(folder) / tag).mkdir(parents=True)
        torch.save({"state": self.state, **client_state}, Path(folder) / tag / "rank0.pt")

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict[str, Any]]:
        loaded = torch.load(Path(folder) / tag / "rank0.pt")
        self.state = loaded.pop("state")
        return folder, loaded


def saved(folder: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        checkpoint.save(FileEngine(f"at {step}"), folder, Version(0, step), "print", ALONE, keep)


def test_the_newest_checkpoint_comes_back_with_its_random_state(tmp_path: Path) -> None:
    torch.manual_seed(3)
    saved(tmp_path, 2, 4)
    expected = torch.rand(3)
    torch.manual_seed(99)
    engine, path = FileEngine(), checkpoint.find(tmp_path, None)
    assert path is not None
    assert checkpoint.load(engine, path, "print", ALONE) == Version(0, 4)
    assert engine.state == "at 4"
    assert torch.equal(torch.rand(3), expected)


def test_no_checkpoint_means_a_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "checkpoints", None) is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["L000-v00000004", "L000-v00000006", "latest"]


@pytest.mark.parametrize("harm", ["altered", "cut", "missing", "index"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(tmp_path: Path, harm: str) -> None:
    saved(tmp_path, 2, 4)
    newest = tmp_path / str(Version(0, 4))
    file = newest / "deepspeed/rank0.pt"
    data = bytearray(file.read_bytes())
    if harm == "altered":
        data[100] ^= 1
        file.write_bytes(data)
    elif harm == "cut":
        file.write_bytes(data[:-1])
    elif harm == "missing":
        file.unlink()
    else:
        (newest / "checkpoint.json").write_text('{"version": "L0')
    with pytest.raises(DataError, match='set checkpoint = "L000-v00000002"'):
        checkpoint.find(tmp_path, None)
    assert checkpoint.find(tmp_path, str(Version(0, 2))) == tmp_path / str(Version(0, 2))


@pytest.mark.parametrize(
    "index",
    [b"\xff\xfe", b"[]", b'{"version": "L000-v00000004", "files": []}', b'{"version": 4}', b"{}", b"7"],
)
def test_an_index_of_other_bytes_is_refused_whatever_they_are(tmp_path: Path, index: bytes) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / str(Version(0, 4)) / "checkpoint.json").write_bytes(index)
    with pytest.raises(DataError, match=r"its checkpoint\.json is damaged; to start from an older one"):
        checkpoint.find(tmp_path, None)


def test_a_version_that_is_whole_on_disk_is_never_removed_to_save_it_again(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(OSError, match="not empty"):
        saved(tmp_path, 2)
    assert checkpoint.find(tmp_path, None) == tmp_path / str(Version(0, 2))


def test_a_checkpoint_that_was_never_finished_is_not_there(tmp_path: Path) -> None:
    (tmp_path / ".partial-L000-v00000004").mkdir()
    with pytest.raises(DataError, match=r"has no checkpoint\.json.*no other one is whole"):
        checkpoint.find(tmp_path, "L000-v00000004")
    assert checkpoint.find(tmp_path, None) is None


def test_a_checkpoint_of_other_ranks_or_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    path = tmp_path / str(Version(0, 2))
    with pytest.raises(DataError, match="same ranks and student"):
        checkpoint.load(FileEngine(), path, "other", ALONE)
    index = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(index | {"world_size": 4}))
    with pytest.raises(DataError, match="is of 4 ranks"):
        checkpoint.load(FileEngine(), path, "print", ALONE)


def test_the_ledger_joins_ranks_and_forgets_what_a_branch_left_behind(tmp_path: Path) -> None:
    first = [Ledger(tmp_path, Version(0, 0), None, rank) for rank in (0, 1)]
    for step in (1, 2, 3):
        for rank, part in enumerate(first):
            part.record(step, [f"{step}{rank}"])
    second = Ledger(tmp_path, Version(1, 2), Version(0, 2), 0)
    second.record(3, ["30", "31"])
    lineages = read(tmp_path)
    assert lineages[0].steps == {1: ["10", "11"], 2: ["20", "21"], 3: ["30", "31"]}
    assert lineages[1].parent == Version(0, 2)
    assert trained_twice(lineages, Version(1, 3)) == []
    second.record(4, ["21"])
    assert trained_twice(read(tmp_path), Version(1, 4)) == ["21"]
    assert trained_twice(read(tmp_path), Version(1, 3)) == []


def test_a_lineage_is_never_written_twice(tmp_path: Path) -> None:
    Ledger(tmp_path, Version(0, 0), None, 0)
    with pytest.raises(DataError, match="lineage 0 was trained before"):
        Ledger(tmp_path, Version(0, 0), None, 0)


def test_a_line_that_a_crash_cut_off_does_not_count(tmp_path: Path) -> None:
    part = Ledger(tmp_path, Version(0, 0), None, 0)
    part.record(1, ["a"])
    with (tmp_path / "L000-rank0.jsonl").open("a") as file:
        file.write('{"step": 2, "ids": ["b"')
    assert read(tmp_path)[0].steps == {1: ["a"]}
