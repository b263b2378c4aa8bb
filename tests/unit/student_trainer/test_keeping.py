"""What survives a trainer: checkpoints and the ledger."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disks import noted, power_cut
from plain_step import ALONE, by_two_ranks

from student_trainer import checkpoint
from student_trainer import checkpoint_files as files
from student_trainer.checkpoint_files import Index
from student_trainer.ledger import Ledger, read, repeated
from student_trainer.ranks import Ranks, all_done
from sync.base import durable
from sync.base.errors import DataError
from sync.wire import Version


class FileWriter:
    """What DeepSpeed writes with."""

    def makedirs(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)


class FileEngine:
    """Keeps its state in one file, as DeepSpeed does in several."""

    checkpoint_engine: Any

    def __init__(self, state: str = "", file: str = "rank0.pt") -> None:
        self.state, self.file, self.checkpoint_engine = state, file, FileWriter()

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        self.checkpoint_engine.makedirs(f"{folder}/{tag}")
        self.checkpoint_engine.save({"state": self.state, **client_state}, f"{folder}/{tag}/{self.file}")
        self._copy_recovery_script(folder)

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "script.py").write_text("pass")

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict[str, Any]]:
        loaded = torch.load(Path(folder) / tag / self.file)
        self.state = loaded.pop("state")
        return folder, loaded


def save(folder: Path, version: Version, state: str = "", run_id: str | None = None, keep: int = 2) -> None:
    checkpoint.save(FileEngine(state), folder, Index(str(version), 1, "print", run_id), ALONE, keep)


def saved(folder: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save(folder, Version(0, step), f"at {step}", keep=keep)


def newest(folder: Path) -> Path | None:
    """The checkpoint that a trainer goes on from."""
    return checkpoint.find(folder, ALONE)[0]


def test_the_newest_checkpoint_comes_back_for_the_model_that_it_is_of(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    save(tmp_path, Version(0, 6), "at 6", "aa")
    engine = FileEngine()
    index = checkpoint.load(engine, newest(tmp_path), "print", ALONE)
    assert (index.version, index.run_id, engine.state) == ("L000-v00000006", "aa", "at 6")
    with pytest.raises(DataError, match="with the same student"):
        checkpoint.load(FileEngine(), newest(tmp_path), "other", ALONE)


BEFORE, NEWEST = "L000-v00000002", "L000-v00000004"
SHARD, INDEX, DAMAGED = "deepspeed/rank0.pt", "checkpoint.json", f"checkpoint {NEWEST} is damaged: "


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def overwritten(content: bytes) -> tuple[str, Callable[[Path], object], str]:
    return INDEX, lambda file: file.write_bytes(content), f"{DAMAGED}its checkpoint.json is damaged"


HARMS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "altered": (SHARD, flip, f"{DAMAGED}{SHARD} was altered"),
    "cut": (SHARD, lambda file: os.truncate(file, 100), f"{DAMAGED}{SHARD} is missing or cut short"),
    "a file is missing": (SHARD, Path.unlink, f"{DAMAGED}{SHARD} is missing or cut short"),
    "no index": (INDEX, Path.unlink, f"{DAMAGED}it has no checkpoint.json"),
    **{f"index {index!r}": overwritten(index) for index in (b"\xff\xfe", b"7", b'{"version": "L0')},
    "the folder is gone": ("", shutil.rmtree, f"latest names {NEWEST}: it has no checkpoint.json"),
}
"""A file of the newest checkpoint, what becomes of it, and what is said."""


@pytest.mark.parametrize("harm", HARMS)
def test_of_a_damaged_checkpoint_the_one_before_is_used_and_both_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    saved(tmp_path, 2, 4)
    file, damage, said = HARMS[harm]
    damage(tmp_path / NEWEST / file)
    line = files.choose(tmp_path).line
    assert said in line
    assert line.endswith(f"; checkpoint {tmp_path / BEFORE} is used")
    path, altered = checkpoint.find(tmp_path, ALONE)
    assert path == tmp_path / BEFORE
    assert altered == ([line] if harm == "altered" else []), "sizes are the launcher's to say"
    assert caplog.messages == [line]


@pytest.mark.parametrize("content", [None, b"", b"\n", b"../ledger", b"L000-v00000009"])
def test_without_what_latest_should_name_the_newest_whole_checkpoint_is_used(
    tmp_path: Path, content: bytes | None
) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    choice = files.choose(tmp_path)
    assert choice.path == newest(tmp_path) == tmp_path / NEWEST
    assert str(tmp_path / "latest") in choice.line


def test_what_latest_names_is_used_and_where_damaged_one_before_it_rather_than_after(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6, 8, keep=4)
    (tmp_path / "latest").write_text(f"{NEWEST}\n")  # as a rollback leaves it that was cut short
    assert files.choose(tmp_path) == (tmp_path / NEWEST, [])
    (tmp_path / NEWEST / "checkpoint.json").unlink()
    assert files.choose(tmp_path).path == tmp_path / BEFORE
    (tmp_path / BEFORE / "checkpoint.json").unlink()
    assert files.choose(tmp_path).path == tmp_path / str(Version(0, 8))


def test_with_checkpoints_of_which_none_is_whole_there_is_no_step_0(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    for name in (BEFORE, NEWEST):
        flip(tmp_path / name / "deepspeed/rank0.pt")
    for ask in (lambda: files.choose(tmp_path), lambda: checkpoint.find(tmp_path, ALONE)):
        with pytest.raises(DataError, match=f"no checkpoint in {tmp_path} is whole .* or remove that folder"):
            ask()


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / NEWEST / "deepspeed/rank0.pt").unlink()
    save(tmp_path, Version(1, 4))
    assert [path.name for path in files.saved(tmp_path)] == [BEFORE, "L001-v00000004"]


def test_a_large_checkpoint_is_judged_by_its_sizes_before_anything_loads(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    flip(tmp_path / NEWEST / "deepspeed/rank0.pt")
    assert files.choose(tmp_path, digested=100).path == tmp_path / NEWEST


def test_every_rank_digests_its_own_files_when_saving_and_when_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[tuple[str, str]] = []
    real = files.digest

    def noting(path: Path) -> str:
        digested.append((threading.current_thread().name, path.name))
        return real(path)

    monkeypatch.setattr(files, "digest", noting)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]

    def saved_and_found(one: Ranks) -> Path | None:
        threading.current_thread().name = f"rank {one.rank}"
        checkpoint.save(FileEngine(file=names[one.rank]), tmp_path, Index(BEFORE, 2, "print"), one, 2)
        return checkpoint.find(tmp_path, one)[0]

    def refused(one: Ranks) -> None:
        with pytest.raises(DataError, match=rf"is whole \(.*{names[1]} was altered"):
            checkpoint.find(tmp_path, one)

    assert by_two_ranks(saved_and_found) == [tmp_path / BEFORE] * 2
    shares = {("rank 0", "script.py"), ("rank 0", names[0]), ("rank 1", names[1])}
    assert Counter(digested) == dict.fromkeys(shares, 2)
    file = tmp_path / BEFORE / "deepspeed" / names[1]
    file.write_bytes(bytes(len(file.read_bytes())))
    by_two_ranks(refused)


def test_a_version_that_is_whole_on_disk_is_never_removed_to_save_it_again(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(OSError, match="not empty"):
        saved(tmp_path, 2)
    assert newest(tmp_path) == tmp_path / BEFORE


def test_a_checkpoint_that_was_never_finished_is_not_there(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "checkpoints", ALONE) == (None, [])
    (tmp_path / ".partial-L000-v00000004").mkdir()
    assert checkpoint.find(tmp_path, ALONE) == (None, [])
    (tmp_path / "latest").write_text("L000-v00000004")
    with pytest.raises(DataError, match=r"is whole \(.* it has no checkpoint\.json\)"):
        checkpoint.find(tmp_path, ALONE)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (torch, "save"),
        (Path, "mkdir"),
        (FileEngine, "_copy_recovery_script"),
        (checkpoint, "_digests"),
        (checkpoint.durable, "write"),
    ],
)
def test_a_save_blocks_on_a_full_disk_and_latest_is_never_half_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: Any, name: str
) -> None:
    """Torch leaves half a file, and has an error of its own."""
    saved(tmp_path, 2)
    seen: list[Path | None] = []
    monkeypatch.setattr(durable, "time", SimpleNamespace(sleep=lambda _: seen.append(newest(tmp_path))))
    real, left = getattr(where, name), [1]

    def full_once(*arguments: Any, **named: Any) -> Any:
        if left and left.pop():
            full = OSError(errno.ENOSPC, "No space left on device")
            if where is torch:
                arguments[1].write(b"half")
                raise RuntimeError("unexpected pos 576 vs 534") from full
            raise full
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, full_once)
    saved(tmp_path, 4)
    assert seen == [tmp_path / BEFORE], "while it waits, the one before is the newest"
    assert f"disk full: checkpoint {NEWEST} waits for space" in caplog.text
    assert newest(tmp_path) == tmp_path / NEWEST
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEFORE, NEWEST, "latest"]


def test_the_ledger_joins_ranks_and_separates_lineages(tmp_path: Path) -> None:
    first = [Ledger(tmp_path, Version(0, 0), None, rank) for rank in (0, 1)]
    for step in (1, 2, 3):
        for rank, part in enumerate(first):
            part.record(step, [f"{step}{rank}"], f"bits {step}", 5 + rank if step > 1 else None)
    second = Ledger(tmp_path, Version(1, 2), Version(0, 2), 0)
    second.record(3, ["30", "31"], "bits 3")
    lineages = read(tmp_path)
    assert lineages[0].steps == {1: ["10", "11"], 2: ["20", "21"], 3: ["30", "31"]}
    assert lineages[1].parent == Version(0, 2)
    assert lineages[1].steps == {3: ["30", "31"]}
    assert (lineages[0].tokens, lineages[1].tokens) == ({2: 11, 3: 11}, {})
    assert lineages[0].shown[2] == {0: (("20",), "bits 2"), 1: (("21",), "bits 2")}


def test_a_repeated_step_must_have_the_same_bits(tmp_path: Path) -> None:
    first = Ledger(tmp_path, Version(0, 0), None, 0)
    for step in (1, 2, 3, 4):
        first.record(step, [f"r{step}"], f"bits {step}")
    second = Ledger(tmp_path, Version(1, 1), Version(0, 1), 0)
    second.record(2, ["r2"], "bits 2")
    second.record(3, ["r3"], "other bits")
    second.record(4, ["new"], "bits of another batch")
    second.record(5, ["r5"], "bits after another batch")
    first.record(5, ["r5"], "bits 5")
    assert repeated(read(tmp_path)) == ([Version(1, 2)], [Version(1, 3)])


def test_a_start_from_the_model_folder_repeats_the_newest_earlier_one(tmp_path: Path) -> None:
    for lineage, bits in enumerate(("bits", "bits", "other bits")):
        ledger = Ledger(tmp_path, Version(lineage, 0), None, 0)
        ledger.record(1, ["r1"], bits)
    assert repeated(read(tmp_path)) == ([Version(1, 1)], [Version(2, 1)])


def test_a_lineage_is_never_written_twice(tmp_path: Path) -> None:
    Ledger(tmp_path, Version(0, 0), None, 0)
    with pytest.raises(DataError, match="lineage 0 was trained before"):
        Ledger(tmp_path, Version(0, 0), None, 0)


def test_a_line_that_found_no_room_is_written_when_there_is_and_those_of_other_ranks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "time", SimpleNamespace(sleep=lambda _: None))
    ledgers = [Ledger(tmp_path, Version(0, 0), None, rank) for rank in (0, 1)]
    full = [tmp_path / "L000-rank1.jsonl"]

    def append(path: Path, line: bytes, **how: Any) -> bool:
        if path in full:
            full.remove(path)
            return False
        return durable.append(path, line, **how)

    def work(one: Ranks) -> None:
        all_done(one, "the ledger", lambda: ledgers[one.rank].record(1, [f"r{one.rank}"], "bits"))

    monkeypatch.setattr("student_trainer.ledger.append", append)
    by_two_ranks(work)
    (lineage,) = read(tmp_path).values()
    assert (lineage.steps, lineage.damage) == ({1: ["r0", "r1"]}, [])


def test_a_later_lineage_is_newer_whatever_its_step_and_what_latest_names_stays(tmp_path: Path) -> None:
    for version in (Version(0, 8), Version(1, 2), Version(2, 3)):
        save(tmp_path, version)
        os.utime(tmp_path / str(version), (10_000 - version.lineage,) * 2)  # as where a clock is set back
    (tmp_path / "L-v").mkdir()
    assert [path.name for path in files.saved(tmp_path)] == ["L001-v00000002", "L002-v00000003"]
    (tmp_path / "latest").write_text("L001-v00000002\n")
    files.retain(tmp_path, 1)
    assert [path.name for path in files.saved(tmp_path)] == ["L001-v00000002", "L002-v00000003"]
    assert (tmp_path / "L-v").is_dir(), "what is no checkpoint is not ours to remove"


def test_every_name_of_a_checkpoint_is_on_disk_before_latest_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut may leave is what was forced: files before the rename, names before `latest`."""
    order = noted(tmp_path, monkeypatch)
    saved(tmp_path / "checkpoints", 2)
    partial = "checkpoints/.partial-L000-v00000002"
    moved = order.index(f"rename {partial}")
    forced = {line.removeprefix("force ") for line in order[:moved] if line.startswith("force")}
    assert {".", partial, f"{partial}/deepspeed", f"{partial}/deepspeed/rank0.pt"} <= forced
    assert order[moved:] == [
        f"rename {partial}",
        "force checkpoints",
        "force checkpoints/.latest.new",
        "rename checkpoints/.latest.new",
        "force checkpoints",
    ]


@pytest.mark.parametrize("harm", ["flip", "drop", "repeat", "cut"])
def test_a_change_to_any_line_but_the_last_is_detected(tmp_path: Path, harm: str) -> None:
    ledger = Ledger(tmp_path, Version(0, 0), None, 0)
    for step in (1, 2, 3):
        ledger.record(step, [f"r{step}"], "bits")
    path = tmp_path / "L000-rank0.jsonl"
    first, one, two, three = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        {
            "flip": first + one + two.replace(b"r2", b"r7") + three,
            "drop": first + two + three,
            "repeat": first + one + one + two + three,
            "cut": first + one[:9] + b"\n" + two + three,
        }[harm]
    )
    (lineage,) = read(tmp_path).values()
    assert re.search(r"L000-rank0.jsonl line [234] is not what was written there", *lineage.damage)


def test_a_power_cut_spoils_nothing_before_the_last_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, path, sizes = random.Random(0), tmp_path / "L000-rank0.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    ledger = Ledger(tmp_path, Version(0, 0), None, 0)
    del sizes[:-2], sizes[1:]  # of folders
    for step in range(1, 6):
        ledger.record(step, [f"{step}-{i}" for i in range(800)], "bits")
        assert sizes[step:] == [path.stat().st_size], "on disk before anybody hears of it"
    whole = path.read_bytes()
    for _ in range(1000):
        step = rng.randint(1, 5)
        path.write_bytes(power_cut(whole[: sizes[step]], sizes[step - 1], rng))
        (lineage,) = read(tmp_path).values()
        assert lineage.damage == []
        assert len(lineage.steps) in (step - 1, step)
        assert all(ids == [f"{n}-{i}" for i in range(800)] for n, ids in lineage.steps.items())
