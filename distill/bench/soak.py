"""What a long run costs its controller: memory, disk, the loop's longest blocks and the restart at the end.

Prompts, replicas, teacher, trainer and evaluator are in memory; the controller, its journal, the ledger,
metrics and timeline are the real ones. `long` trains on many small rollouts. `wide` trains on few whose
teacher sends hidden states, as objective "full" needs them: it shows what blocks the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from distill.bench.in_memory import (
    MemoryEvaluator,
    MemoryPrompts,
    MemoryReplica,
    MemoryTeacher,
    MemoryTrainer,
)
from distill.bench.runner import Figures, markdown
from distill.buffer import rules
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Components, Hooks
from distill.metrics.trackers import MetricsFile
from distill.prompts.stream import PromptStream
from distill.run_log.audit import audit
from distill.run_log.journal import Journal
from distill.run_log.run_log import RunLog
from student_trainer.ledger import Ledger
from student_trainer.objectives.config import needs
from sync.jsonl import JsonLines
from sync.wire import TrainBatch, Version

MIB: Final = 1 << 20
SAMPLES: Final = 10
"""Of a part, at equal distances."""


@dataclass(frozen=True)
class Size:
    """How much of what one part trains on."""

    rollouts: int
    batch: int
    tokens: int
    """Longest completion."""
    width: int
    """Of the teacher's hidden states; 0: objective "sampled", which needs none."""
    checkpoint_every: int
    """Steps."""


@dataclass(frozen=True)
class Usage:
    """Memory and disk after so many rollouts."""

    rollouts: int
    seconds: float
    rss_mib: float
    """After a garbage collection."""
    objects: int
    """That the garbage collector tracks."""
    journal_mib: float
    """Segments that a restart replays or reads from."""
    archive_mib: float
    others_mib: float
    """ledger/, metrics.jsonl and timeline.jsonl."""


@dataclass
class Blocks:
    """How long one step of a task blocked the event loop, by the task's function."""

    longest: dict[str, float] = field(default_factory=dict)
    """Seconds, by the clock: what other threads and processes took is in it."""
    busiest: dict[str, float] = field(default_factory=dict)
    """Seconds of the processor."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time every callback of this process's loops."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began, worked = time.perf_counter(), time.thread_time()
            run(handle)
            seconds = time.perf_counter() - began
            if seconds > 0.001:
                name, worked = _name(handle), time.thread_time() - worked
                self.longest[name] = max(self.longest.get(name, 0.0), seconds)
                self.busiest[name] = max(self.busiest.get(name, 0.0), worked)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


def _name(handle: asyncio.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return str(getattr(task.get_coro(), "__qualname__", task))
    return str(getattr(callback, "__qualname__", callback))


@dataclass
class _Trainer(MemoryTrainer):
    """Keeps a ledger, and nothing in memory."""

    folder: Path = Path()
    _ledger: Ledger | None = None

    async def _step(self, version: Version, shares: list[TrainBatch]) -> Version:
        self._ledger = self._ledger or Ledger(self.folder / "ledger", version, None, 0)
        ids = [rollout for share in shares for rows in share.micro_batches for rollout in rows.ids]
        self._ledger.record(version.step + 1, ids, "")
        after = await super()._step(version, shares)
        self.batches.clear()
        return after


def configuration(folder: Path, size: Size) -> RunConfig:
    """A run of this size with default settings otherwise."""
    return RunConfig.model_validate(
        {
            "run": {"name": folder.name, "folder": folder.parent, "steps": size.rollouts // size.batch},
            "student": {"path": "student"},
            "teachers": {"t": {"path": "teacher"}},
            "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
            "rollout": {"batch": size.batch, "max_tokens": size.tokens},
            "objective": {"type": "full" if size.width else "sampled"},
            "trainer": {"deepspeed": "ds.json"},
            "evaluation": {"every": 100},
        }
    )


async def soak(folder: Path, size: Size, blocks: Blocks, segment_bytes: int = 64 * MIB) -> list[Usage]:
    """Train on that many rollouts in `folder`; what is used at each of SAMPLES equal distances."""
    config, began = configuration(folder, size), time.monotonic()
    metrics, spans = MetricsFile(folder / "metrics.jsonl"), JsonLines(folder / "timeline.jsonl")
    usages: list[Usage] = []

    def step(version: Version, figures: dict[str, float]) -> None:
        metrics.log(version.step, figures)
        teacher.requests.clear()
        for replica in replicas.values():
            replica.updates.clear()

    replicas = {f"student-{i}": MemoryReplica(seed=i, longest=size.tokens) for i in range(2)}
    teacher = MemoryTeacher()
    teacher.width = size.width
    parts = Components(
        replicas=dict(replicas),
        teachers={"t": teacher},
        route=lambda source: "t",
        prompts=PromptStream(MemoryPrompts(), config.run.seed),
        journal=Journal(folder / "journal", config.buffer.fsync, segment_bytes),
        want=needs(config.objective),
        evaluator=MemoryEvaluator(),
    )
    controller = Controller(config, parts, Hooks(step=step, span=spans.write))
    trainer = _Trainer(controller.session, checkpoint_every=size.checkpoint_every, folder=folder)
    with blocks.watched():
        running = [asyncio.create_task(controller.run()), asyncio.create_task(trainer.run())]
        for at in range(1, SAMPLES + 1):
            due = at * config.run.steps // SAMPLES
            while not any(task.done() for task in running) and _reached(controller) < due:
                await trainer.stepped.wait(1.0)
            usages.append(usage(folder, _reached(controller) * size.batch, began))
        await asyncio.gather(*running)
    metrics.close()
    spans.close()
    return usages


def _reached(controller: Controller) -> int:
    reached = controller.run_log.state.reached
    return reached.step if reached else 0


def usage(folder: Path, rollouts: int, began: float) -> Usage:
    """Memory and disk now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    journal = folder / "journal"
    others = [*folder.glob("ledger/*"), folder / "metrics.jsonl", folder / "timeline.jsonl"]
    return Usage(
        rollouts,
        time.monotonic() - began,
        pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        len(gc.get_objects()),
        *(_mib(paths) for paths in (journal.glob("journal-*"), journal.glob("archive-*"), others)),
    )


def _mib(paths: Iterable[Path]) -> float:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):  # archived meanwhile
            total += path.stat().st_size
    return total / MIB


def part(folder: Path, size: Size) -> Figures:
    """One soak in a new `folder`, the restart behind it, and the audit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks = Blocks()
    usages = asyncio.run(soak(folder, size, blocks))
    replay = replay_seconds(folder, size)
    began = time.monotonic()
    report = audit(folder)
    return {
        **asdict(size),
        "usage": [asdict(one) for one in usages],
        "replay_seconds": replay,
        "audit_seconds": time.monotonic() - began,
        "audit_ok": report.ok,
        "trained": report.trained,
        "longest_blocks_ms": _most(blocks.longest),
        "busiest_blocks_ms": _most(blocks.busiest),
    }


def _most(seconds: dict[str, float]) -> dict[str, float]:
    """The greatest five in ms; `soak` itself, which collects garbage, is left out."""
    found = sorted((-value, name) for name, value in seconds.items() if name != soak.__qualname__)
    return {name: -1e3 * value for value, name in found[:5]}


def replay_seconds(folder: Path, size: Size) -> float:
    """What a restart of the controller takes to rebuild its state."""
    config, began = configuration(folder, size), time.monotonic()
    prompts = PromptStream(MemoryPrompts(), config.run.seed)
    journal = Journal(folder / "journal")
    RunLog(journal, prompts, run=config.run.name, seed=config.run.seed, rules=rules(config))
    journal.close()
    return time.monotonic() - began


def run(folder: Path = Path("runs/bench-soak"), rollouts: int = 500_000, wide: int = 2_000) -> Figures:
    """Both parts; 0 leaves one out. `folder` is emptied."""
    sizes = {
        "long": Size(rollouts, 128, 16, 0, max(1, rollouts // 128 // 50)),
        "wide": Size(wide, 32, 512, 4096, max(1, wide // 32 // 10)),
    }
    parts = {name: part(folder / name, size) for name, size in sizes.items() if size.rollouts}
    return {"benchmark": "soak", **parts}


COLUMNS: Final = {
    "rollouts": ("rollouts", ",.0f"),
    "seconds": ("seconds", ".0f"),
    "rss_mib": ("RSS, MiB", ".1f"),
    "objects": ("objects", ",.0f"),
    "journal_mib": ("journal, MiB", ".1f"),
    "archive_mib": ("archive, MiB", ".2f"),
    "others_mib": ("ledger, lines, MiB", ".1f"),
}


def table(figures: Figures) -> str:
    """The figures as text."""
    lines = []
    for name in (name for name in ("long", "wide") if name in figures):
        one = figures[name]
        rows = [[format(used[key], form) for key, (_, form) in COLUMNS.items()] for used in one["usage"]]
        lines += [
            f"{name}: {one['rollouts']:,} rollouts of up to {one['tokens']} tokens, width {one['width']}",
            *markdown([title for title, _ in COLUMNS.values()], rows),
            f"  restart {one['replay_seconds']:.2f} s; audit {one['audit_seconds']:.1f} s: {one['audit_ok']}",
        ]
        for which, what in (("longest", "by the clock"), ("busiest", "of the processor")):
            blocks = ", ".join(f"{who} {ms:.0f}" for who, ms in one[f"{which}_blocks_ms"].items())
            lines.append(f"  longest blocks of the loop, ms {what}: {blocks}")
    return "\n".join(lines)
