"""What a controller spends on a token: processor time, and bytes of its journal.

`objectives`: for each kind of objective. `load`: with 512 replicas, 8 teachers and 64 ranks, over as many
tokens as one million a second are in an hour. `long`: memory, disk, the longest blocks of the event loop and
the restart of a long run. Controller and journal are the real ones. Prompts, replicas, teachers and trainer
are in memory, and what they spend themselves is taken off; what a teacher sends is decoded
from its bytes, as it is behind HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import psutil
from blake3 import blake3
from in_memory import MemoryEvaluator, MemoryPrompts, MemoryReplica, MemoryTeacher, MemoryTrainer
from table_engine import TableEngine

from distill.buffer import rules
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Components, Hooks
from distill.metrics.trackers import MetricsFile
from distill.prompts.stream import PromptStream
from distill.run_log.audit import audit
from distill.run_log.journal import Journal
from distill.run_log.run_log import RunLog
from distill.trainer_api.http_api import serving
from student_trainer.ledger import Ledger
from student_trainer.objectives.config import needs, student_topk
from sync import wire
from sync.base.jsonl import JsonLines
from sync.base.memory import available_memory
from sync.wire import DIGEST_BYTES, TrainBatch, Version, Want, decode, pack
from sync.wire.client import BlockingPeer
from sync.wire.server import bind_alone
from teacher_service.app import TeacherService
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.limits import limits
from tests.benchmarks.figures import Figures, command, markdown

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


OBJECTIVES: Final = ("sampled", "topk", "student_topk", "full")
"""The others ask the teachers for the same: forward_topk as topk, jsd and skew as full, sft as sampled."""
K: Final = 50
ROUNDS: Final = 3
FETCHED: Final = ((12, 64), (1000, 80))
"""Tokens, and floats of a token, of rows whose fetch is timed."""


SHAPES: Final = {
    "quickstart": Size(40 * 128, batch=128, tokens=12, width=128, checkpoint_every=0),
    "wide": Size(4 * 32, batch=32, tokens=2048, width=4096, checkpoint_every=0),
}
LOAD: Final = Size(rollouts=439_296, batch=1024, tokens=8192, width=0, checkpoint_every=8)
"""3.6 G tokens."""


# --- a long run ---------------------------------------------------------------------------------------------


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
    replicas = {f"student-{i}": MemoryReplica(seed=i, longest=size.tokens) for i in range(2)}
    teacher = MemoryTeacher()
    teacher.width = size.width
    return Roles(replicas, {"default": teacher}, MemoryPrompts(), 1)


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
    roles = roles or two_replicas(size)
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
        evaluator=MemoryEvaluator(),
    )
    controller = Controller(config, parts, Hooks(step=step, span=spans.write))
    trainer = MemoryTrainer(
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


def long_table(figures: Figures) -> str:
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


# --- processor time by objective, and under load ------------------------------------------------------------


class Apart:
    """Processor time of the roles that are not the controller."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what this thread spends; nothing inside may wait."""
        began = time.thread_time()
        yield
        self.seconds += time.thread_time() - began


@cache
def drawn() -> np.ndarray:
    """Normally distributed f4, more than any answer has."""
    return np.random.default_rng(0).standard_normal(1 << 24, "f4")


def noise(*shape: int) -> np.ndarray:
    """Some of `drawn`, f4 [*shape]: what repeats itself would cost nothing in a compressed journal."""
    size = math.prod(shape)
    start = random.randrange(drawn().size - size)
    return drawn()[start : start + size].reshape(shape)


def noisy(scored: wire.Scored) -> wire.Scored:
    """With log-probabilities and hidden states that do not repeat."""
    (count,), changed = scored.logprob.shape, {"logprob": pack(-abs(noise(*scored.logprob.shape)))}
    if scored.topk_logprob:
        changed["topk_ids"] = pack(noise(count, K).argsort(axis=1), "i4")
        changed["topk_logprob"] = pack(-7 - abs(noise(count, K)), "f2")
    if scored.gathered:
        changed["gathered"] = pack(-7 - abs(noise(*scored.gathered.shape)), "f2")
    if scored.hidden:
        changed["hidden"] = pack(noise(*scored.hidden.shape).view("u4") >> 16, "bf16")
    return msgspec.structs.replace(scored, **changed)


def servers(shape: Size, apart: Apart) -> tuple[type[Any], type[Any]]:
    """Replicas and teachers that answer with noise; the teachers in bytes."""
    drawn()

    class Replica(MemoryReplica):
        async def generate(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Generated]:
            for prompt in request.prompts:
                with apart.timed():
                    k, version = request.sampling.student_topk, self.version or wire.Version(0, 0)
                    values = noise(shape.tokens)
                    answer = wire.Generated(
                        id=prompt.id,
                        token_ids=pack(values.view("u4") % 50, "i4"),
                        logprob=pack(-abs(values)),
                        spans=[wire.VersionSpan(version, 0, shape.tokens)],
                        finish_reason="length",
                        topk_ids=pack(noise(shape.tokens, k).argsort(axis=1), "i4") if k else None,
                    )
                await asyncio.sleep(0)
                yield answer

    class Teacher(MemoryTeacher):
        width = shape.width

        async def score(self, sequences: Sequence[Any], want: Any, deadline: float | None = None) -> Any:
            with apart.timed():
                found = [noisy(self._scores(sequence, want)) for sequence in sequences]
                results: list[Any] = [*map(self._keep, found, sequences)] if want.keep else found
                self.kept.clear()
                body = wire.encode(wire.ScoreReply(results=results))
                del found, results  # freeing them is the teacher's work, too
            await asyncio.sleep(0)
            return decode(body, wire.ScoreReply).results

    return Replica, Teacher


async def one_run(folder: Path, shape: Size, objective: str, scores: str) -> Figures:
    """Nanoseconds of the controller, and bytes written to its journal, for each generated token."""
    shutil.rmtree(folder, ignore_errors=True)
    k = {"k": K} if objective.endswith("topk") else {}
    config = configuration(folder, shape, ["t"], {"type": objective, **k}, scores)
    apart, written = Apart(), 0
    replica_type, teacher_type = servers(shape, apart)

    def write(file: int, data: memoryview) -> int:
        nonlocal written
        written += (count := os.write(file, data))
        return count

    parts = Components(
        replicas={"student-0": replica_type()},
        teachers={"t": teacher_type()},
        route=lambda source: "t",
        prompts=PromptStream(MemoryPrompts(), 0),
        journal=Journal(folder / "journal", config.buffer.fsync, write=write),
        want=needs(config.objective),
        student_topk=student_topk(config.objective),
    )
    controller = Controller(config, parts)
    trainer = MemoryTrainer(controller.session, record=lambda version, shares: None)
    began = time.process_time()
    await asyncio.gather(controller.run(), trainer.run())
    seconds = time.process_time() - began - apart.seconds
    tokens = controller.run_log.state.counters.generated_tokens
    shutil.rmtree(folder)
    return {"ns": 1e9 * seconds / tokens, "journal_bytes": written / tokens, "tokens": tokens}


def load(folder: Path, size: Size = LOAD, replicas: int = 512, teachers: int = 8, ranks: int = 64) -> Figures:
    """What the controller of so many roles sustains, as `soak` measures it, without what the roles spend."""
    apart, names = Apart(), [f"teacher-{i}" for i in range(teachers)]
    replica, teacher = servers(size, apart)
    roles = Roles(
        {f"student-{i}": replica() for i in range(replicas)},
        {name: teacher() for name in names},
        MemoryPrompts(names),
        ranks,
    )
    began, by_clock = time.process_time(), time.monotonic()
    gc.freeze()  # as in a run
    found = part(folder, size, roles)
    elapsed = time.monotonic() - by_clock - found["restart_seconds"] - found["audit_seconds"]
    spent = found["usage"][-1]["cpu_seconds"] - began - apart.seconds
    tokens = size.rollouts * size.tokens
    rates = {"tokens_per_cpu_second": tokens / spent, "tokens_per_second": tokens / elapsed}
    return {"replicas": replicas, "teachers": teachers, "ranks": ranks, **rates, **found}


async def fetch_cost(tokens: int, width: int, rows: int = 200) -> float:
    """Milliseconds of processor time that a kept row costs its teacher and its rank together, over HTTP."""
    engine = TableEngine(np.full((width, width), -np.log(width), "f4"))
    info = await MemoryTeacher().first_info()
    config, bound = TeacherConfig(path="t"), bind_alone("127.0.0.1", 0)
    app = TeacherService(engine, info, config, limits(config, engine.engine_info, available_memory())).app
    url = "http://127.0.0.1:{1}".format(*bound.getsockname())
    asked = [wire.ScoreSequence(f"{row}", pack(np.zeros(1 + tokens, "i4")), 1) for row in range(rows)]
    async with app.router.lifespan_context(app), serving(app, bound), TeacherClient("t", [url]) as teacher:
        found: list[Any] = await teacher.score(asked, Want(hidden=True, keep=True))
        peer, began = BlockingPeer(url), time.process_time()
        for one in found:
            body = await asyncio.to_thread(peer.once, f"/v1/scores/{one.kept.key}", None, 60.0)
            assert blake3(body).digest(DIGEST_BYTES) == one.kept.digest, "as it was kept"
            assert [*wire.frames(body, wire.ScoreReply)]
        peer.close()
        return 1e3 * (time.process_time() - began) / rows


def run(
    folder: Path = Path("runs/bench-controller"),
    objectives: bool = True,
    loaded: bool = True,
    rollouts: int = 0,
    wide: int = 0,
) -> Figures:
    """Every objective, inline and by reference in turns, the medians of ROUNDS; `load`; and long runs.

    `rollouts`, `wide`: of a long run of small rollouts, such as 500,000, and of one whose teacher sends
    hidden states 4,096 wide, such as 2,000; 0 leaves one out.
    """
    logging.getLogger("distill.rollout").setLevel(logging.WARNING)  # a line for each of 512 replicas
    rows: list[Figures] = []
    for name, shape in SHAPES.items() if objectives else ():
        for objective in OBJECTIVES:
            ways = ("inline",) if objective == "sampled" else ("inline", "reference")
            found: dict[str, list[Figures]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way in ways:
                    found[way].append(asyncio.run(one_run(folder / "run", shape, objective, way)))
            for way, runs in found.items():
                figures = {key: median(one[key] for one in runs) for key in runs[0]}
                row = {"shape": name, "batch": shape.batch, "width": shape.width}
                row["steps"] = shape.rollouts // shape.batch
                rows.append({**row, "objective": objective, "scores": way, **figures})
    fetches = {f"{tokens} × {4 * width}": asyncio.run(fetch_cost(tokens, width)) for tokens, width in FETCHED}
    sizes = {
        "long": Size(rollouts, 128, 16, 0, max(1, rollouts // 128 // 50)),
        "wide": Size(wide, 32, 512, 4096, max(1, wide // 32 // 10)),
    }
    under_load = {"load": load(folder / "load")} if loaded else {}
    long = {name: part(folder / name, size) for name, size in sizes.items() if size.rollouts}
    return {"k": K, "rounds": ROUNDS, "rows": rows, "fetch_ms": fetches, **under_load, "long": long}


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    head = ["shape", "objective", "scores", "controller, µs a token", "journal, bytes a token"]
    rows = [
        [one["shape"], f"`{one['objective']}`", one["scores"], f"{one['ns'] / 1000:.2f}"]
        + [f"{one['journal_bytes']:,.1f}"]
        for one in figures["rows"]
    ]
    fetches = [f"a row of {size} bytes: {ms:.2f} ms to fetch" for size, ms in figures["fetch_ms"].items()]
    lines = [*markdown(head, rows), *fetches]
    if (load := figures.get("load")) is not None:
        fast, real = load["tokens_per_cpu_second"], load["tokens_per_second"]
        who = f"{load['replicas']} replicas, {load['teachers']} teachers, {load['ranks']} ranks"
        lines += [
            f"{who}: {fast:,.0f} tokens a second of CPU time, {1e8 / fast:.0f} % of a core at 1 M tokens/s;",
            f"{real:,.0f} tokens/s by the clock, the roles in the same process",
            long_table({"load": load}),
        ]
    lines.append(long_table(figures["long"]))
    return "\n".join(lines)


if __name__ == "__main__":
    command("controller", run, table)
