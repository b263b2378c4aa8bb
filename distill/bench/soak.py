"""What a long run costs its controller: memory, disk, the loop's longest blocks and the restart at the end.

Prompts, replicas, teacher, trainer and evaluator are in memory, from the tests of a source checkout; the
controller, its journal, the ledger, metrics and timeline are the real ones. `long` trains on many small
rollouts. `wide` trains on few whose teacher sends hidden states, as objective "full" needs them: it shows
what blocks the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from distill.bench.runner import Figures, markdown, of_tests
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
from sync.base.jsonl import JsonLines
from sync.wire import TrainBatch, Version

MIB: Final = 1 << 20
SAMPLES: Final = 10
"""Of a part, at equal distances."""


class Size(NamedTuple):
    """How much of what one part trains on."""

    rollouts: int
    batch: int
    tokens: int
    """Longest completion."""
    width: int
    """Of the teacher's hidden states; 0: there are none."""
    checkpoint_every: int
    """Steps."""

    @property
    def objective(self) -> dict[str, str]:
        """One that needs the hidden states, or none."""
        return {"type": "full" if self.width else "sampled"}


class Roles(NamedTuple):
    """What is around the controller, in memory."""

    replicas: dict[str, Any]
    teachers: dict[str, Any]
    """By the source of the prompts that are routed to them."""
    prompts: Any
    ranks: int


class Usage(NamedTuple):
    """Memory and disk after so many rollouts."""

    rollouts: int
    rss_mib: float
    """After a garbage collection."""
    journal_mib: float
    """Segments that a restart replays or reads from."""
    archive_mib: float
    others_mib: float
    """ledger/, metrics.jsonl and timeline.jsonl."""
    objects: int
    """That the garbage collector tracks."""
    cpu_seconds: float
    """Of this process since its start."""


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


def two_replicas(size: Size) -> Roles:
    """Two replicas whose completions have any length, and one teacher."""
    roles = of_tests("in_memory")
    replicas = {f"student-{i}": roles.MemoryReplica(seed=i, longest=size.tokens) for i in range(2)}
    teacher = roles.MemoryTeacher()
    teacher.width = size.width
    return Roles(replicas, {"default": teacher}, roles.MemoryPrompts(), 1)


def configuration(
    folder: Path, size: Size, teachers: Iterable[str], objective: Mapping[str, Any], scores: str = "inline"
) -> RunConfig:
    """A run of this size with default settings otherwise."""
    return RunConfig.model_validate(
        {
            "run": {"name": folder.name, "folder": folder.parent, "steps": size.rollouts // size.batch},
            "student": {"path": "student"},
            "teachers": {name: {"path": "teacher"} for name in teachers},
            "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
            "rollout": {"batch": size.batch, "max_tokens": size.tokens},
            "buffer": {"scores": scores},
            "objective": objective,
            "trainer": {"deepspeed": "ds.json"},
            "evaluation": {"every": 100},
        }
    )


async def soak(
    folder: Path, size: Size, blocks: Blocks, segment_bytes: int = 64 * MIB, roles: Roles | None = None
) -> list[Usage]:
    """Train on that many rollouts in `folder`; what is used at each of SAMPLES equal distances."""
    roles, memory = roles or two_replicas(size), of_tests("in_memory")
    config = configuration(folder, size, roles.teachers, size.objective)
    metrics, spans = MetricsFile(folder / "metrics.jsonl"), JsonLines(folder / "timeline.jsonl")
    ledgers: list[Ledger] = []
    usages: list[Usage] = []

    def step(version: Version, figures: dict[str, float]) -> None:
        metrics.log(version.step, figures)
        for teacher in roles.teachers.values():
            teacher.requests.clear()
        for replica in roles.replicas.values():
            replica.updates.clear()

    def record(version: Version, shares: list[TrainBatch]) -> None:
        if not ledgers:
            ledgers.extend(Ledger(folder / "ledger", version, None, rank) for rank in range(roles.ranks))
        for ledger, share in zip(ledgers, shares, strict=True):
            ids = [rollout for rows in share.micro_batches for rollout in rows.ids]
            ledger.record(version.step + 1, ids, "")

    parts = Components(
        replicas=dict(roles.replicas),
        teachers=dict(roles.teachers),
        route=lambda source: source,
        prompts=PromptStream(roles.prompts, config.run.seed),
        journal=Journal(folder / "journal", config.buffer.fsync, segment_bytes),
        want=needs(config.objective),
        evaluator=memory.MemoryEvaluator(),
    )
    controller = Controller(config, parts, Hooks(step=step, span=spans.write))
    trainer = memory.MemoryTrainer(
        controller.session, roles.ranks, checkpoint_every=size.checkpoint_every, record=record
    )
    with blocks.watched():
        running = [asyncio.create_task(controller.run()), asyncio.create_task(trainer.run())]
        for at in range(1, SAMPLES + 1):
            due = at * config.run.steps // SAMPLES
            while not any(task.done() for task in running) and _reached(controller) < due:
                await trainer.stepped.wait(1.0)
            usages.append(usage(folder, _reached(controller) * size.batch))
        await asyncio.gather(*running)
    metrics.close()
    spans.close()
    return usages


def _reached(controller: Controller) -> int:
    reached = controller.run_log.state.reached
    return reached.step if reached else 0


def usage(folder: Path, rollouts: int) -> Usage:
    """Memory and disk now."""
    gc.collect()
    journal = folder / "journal"
    others = [*folder.glob("ledger/*"), folder / "metrics.jsonl", folder / "timeline.jsonl"]
    return Usage(
        rollouts=rollouts,
        rss_mib=psutil.Process().memory_info().rss / MIB,
        journal_mib=_mib(journal.glob("journal-*")),
        archive_mib=_mib(journal.glob("archive-*")),
        others_mib=_mib(others),
        objects=len(gc.get_objects()),
        cpu_seconds=time.process_time(),
    )


def _mib(paths: Iterable[Path]) -> float:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):  # archived meanwhile
            total += path.stat().st_size
    return total / MIB


def part(folder: Path, size: Size, roles: Roles | None = None) -> Figures:
    """One soak in a new `folder`, the restart behind it, and the audit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    blocks, roles = Blocks(), roles or two_replicas(size)
    usages = asyncio.run(soak(folder, size, blocks, roles=roles))
    moments = [time.monotonic()]
    config = configuration(folder, size, roles.teachers, size.objective)
    journal = Journal(folder / "journal")
    prompts = PromptStream(roles.prompts, config.run.seed)
    RunLog(journal, prompts, run=config.run.name, seed=config.run.seed, rules=rules(config))
    journal.close()
    moments.append(time.monotonic())
    report = audit(folder)
    moments.append(time.monotonic())
    return {
        **size._asdict(),
        "usage": [one._asdict() for one in usages],
        "restart_seconds": moments[1] - moments[0],
        "audit_seconds": moments[2] - moments[1],
        "audit_ok": report.ok,
        "blocks_ms": {"by the clock": _most(blocks.longest), "of CPU time": _most(blocks.busiest)},
    }


def _most(seconds: dict[str, float]) -> dict[str, float]:
    """The greatest five in ms; `soak` itself, which collects garbage, is left out."""
    found = sorted((-value, name) for name, value in seconds.items() if name != soak.__qualname__)
    return {name: -1e3 * value for value, name in found[:5]}


def run(folder: Path, rollouts: int, wide: int) -> Figures:
    """Both parts; 0 leaves one out. `folder` is emptied."""
    sizes = {
        "long": Size(rollouts, 128, 16, 0, max(1, rollouts // 128 // 50)),
        "wide": Size(wide, 32, 512, 4096, max(1, wide // 32 // 10)),
    }
    return {name: part(folder / name, size) for name, size in sizes.items() if size.rollouts}


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    head = ["rollouts", "RSS, MiB", "journal, MiB", "archive, MiB", "ledger, metrics, timeline, MiB"]
    lines = []
    for name, one in figures.items():
        rows = [[f"{used[key]:,.1f}" for key in Usage._fields[:5]] for used in one["usage"]]
        lines += [
            f"{name}: {one['rollouts']:,} rollouts of up to {one['tokens']} tokens, width {one['width']}",
            *markdown(head, rows),
            f"restart {one['restart_seconds']:.2f} s; audit {one['audit_seconds']:.1f} s: {one['audit_ok']}",
        ]
        for how, blocks in one["blocks_ms"].items():
            longest = ", ".join(f"{who} {ms:.0f}" for who, ms in blocks.items())
            lines.append(f"longest blocks of the loop, ms {how}: {longest}")
    return "\n".join(lines)
