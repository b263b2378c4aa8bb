"""A power cut behind any fsync of a real run's writes costs what was not forced to disk, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from in_memory import MemoryTrainer
from power_cut import power_cut

from distill.config import RunConfig
from distill.controller import Controller
from distill.run_log.entries import HEAD
from distill.run_log.journal import Journal, read_all, segment_path
from distill.run_log.records import Dropped, Location, Record
from sync.base.errors import DataError

TRIALS = 1000


@dataclass
class Moment:
    """The journal's files at one moment of the run."""

    sizes: dict[str, int]
    forced: dict[str, int]
    """How much of each was forced to disk."""
    promised: int
    """Records that a durable commit has answered for."""


@dataclass
class Watched:
    """Follows what a journal asks of the disk."""

    folder: Path
    sizes: dict[str, int] = field(default_factory=dict)
    forced: dict[str, int] = field(default_factory=dict)
    promised: int = 0
    moments: list[Moment] = field(default_factory=list)
    records: list[tuple[Record, Location]] = field(default_factory=list)
    """Every record and its place, which is known once it is committed."""

    def write(self, file: int, data: memoryview) -> int:
        half = os.write(file, data[: -(-len(data) // 2)])
        self.note(file)
        return half

    def fsync(self, file: int) -> None:
        name = self.note(file)
        if name in self.sizes:
            self.forced[name] = self.sizes[name]

    def note(self, file: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.suffix == ".log":
            self.sizes[path.name] = os.fstat(file).st_size
            self.moments.append(Moment(dict(self.sizes), dict(self.forced), self.promised))
        return path.name

    def end_of(self, record: int) -> tuple[str, int]:
        """File of a record, and the byte behind its block."""
        _, at = self.records[record]
        path = segment_path(self.folder, at.segment)
        _, length, _ = HEAD.unpack_from(path.read_bytes(), at.offset)
        return path.name, at.offset + HEAD.size + length

    def journal(self) -> Journal:
        """A journal whose every write and fsync is followed."""
        journal = Journal(self.folder, "batch", segment_bytes=16_000, write=self.write)
        append, commit = journal.append, journal.commit

        def appending(record: Record) -> Any:
            self.records.append((record, append(record)))
            return self.records[-1][1]

        async def committing(*, durable: bool = False) -> None:
            before = len(self.records)
            await commit(durable=durable)
            if durable:
                self.promised = max(self.promised, before)

        journal.append = appending  # type: ignore[method-assign]
        journal.commit = committing  # type: ignore[method-assign]
        return journal


@pytest.fixture
async def lived(
    controller: Callable[..., Controller],
    config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Watched:
    """A whole run in memory, whose trainer has two ranks and is killed once."""
    watched = Watched(tmp_path / "journal")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched.fsync)
        settings = config(
            run={"steps": 7},
            rollout={"batch": 16, "max_tokens": 300},
            trainer={"micro_batch_tokens": 500, "keep_checkpoints": 100},
            buffer={"fsync": "batch"},
        )
        running = controller(settings, journal=watched.journal())
        trainer = MemoryTrainer(running.session, ranks=2, checkpoint_every=3, step_seconds=0.002)
        run, training = asyncio.create_task(running.run()), asyncio.create_task(trainer.run())
        while len(trainer.batches) < 3:
            await trainer.stepped.wait(1)
            assert not run.done(), run.exception()
            assert not training.done(), training.exception()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        async with asyncio.timeout(600):
            await trainer.run()
            assert (await run)["completed"]
    assert len(watched.sizes) > 2
    assert watched.promised > 50
    return watched


def cut_at(moment: Moment, whole: dict[str, bytes], folder: Path, rng: random.Random) -> None:
    """What a power cut at that moment leaves, in `folder`."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, size in moment.sizes.items():
        (folder / name).write_bytes(power_cut(whole[name][:size], moment.forced.get(name, 0), rng))


def test_a_power_cut_costs_the_unsynced_tail_alone(
    lived: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng, folder = random.Random(1), tmp_path / "cut"
    whole = {name: (lived.folder / name).read_bytes() for name in lived.sizes}
    records = [record for _, record in read_all(lived.folder)]
    holes = 0
    for trial in range(TRIALS):
        moment = rng.choice(lived.moments)
        cut_at(moment, whole, folder, rng)
        before = sum(path.stat().st_size for path in folder.iterdir())
        journal = Journal(folder)
        found = [record for _, record in journal.replay()]
        assert found == records[: len(found)]
        assert len(found) >= moment.promised
        holes += sum(path.stat().st_size for path in folder.iterdir()) < before
        if trial % 20 == 0:  # what was cut off is off: the run goes on behind it
            journal.append(Dropped(["x"], "empty", 0))
            asyncio.run(journal.commit(durable=True))
            journal.close()
            assert [record for _, record in Journal(folder).replay()] == [*found, Dropped(["x"], "empty", 0)]
    assert holes > TRIALS / 10


def test_a_flip_before_the_last_fsync_is_refused_by_name_whatever_the_tail_looks_like(
    lived: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    rng, folder = random.Random(2), tmp_path / "cut"
    whole = {name: (lived.folder / name).read_bytes() for name in lived.sizes}
    proven = [moment for moment in lived.moments if moment.promised]
    for _ in range(TRIALS):
        moment = rng.choice(proven)
        cut_at(moment, whole, folder, rng)
        newest, end = lived.end_of(moment.promised - 1)
        name = rng.choice([name for name in moment.sizes if name <= newest])
        damaged = bytearray((folder / name).read_bytes())
        place = rng.randrange(end if name == newest else len(damaged))
        damaged[place] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(damaged)
        with pytest.raises(
            DataError, match=rf"{name} (is damaged at byte \d+, which was on disk|does not begin)"
        ):
            list(Journal(folder).replay())
        assert (folder / name).read_bytes() == damaged, "a file that is refused is left as it is"
