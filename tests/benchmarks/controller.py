"""What a controller spends on a token: processor time, and bytes of its record.

    objectives   every kind of objective, inline and by reference
    load         512 replicas, 8 teachers and 64 ranks, by default an hour's tokens at one million a second
    rollouts     memory, disk, the longest blocks of the event loop and the restart of a long run

Controller and record are the real ones. Prompts, replicas, teachers and trainer are in memory, and what they
spend themselves is taken off; what a teacher sends is decoded from its bytes, as it is behind HTTP. Their
numbers are noise: what repeats itself would cost nothing in a compressed record.
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
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import psutil
import typer
from in_memory import (
    HELD_OUT_SET,
    MemoryEvaluator,
    MemoryPrompts,
    MemoryReplica,
    MemoryTeacher,
    MemoryTrainer,
)
from msgspec.structs import replace

from distill import garbage
from distill.config import RunConfig
from distill.controller import Controller
from distill.evaluation.sets import HELD_OUT
from distill.interfaces import Components, Hooks
from distill.metrics.timeline import Span
from distill.metrics.trackers import MetricsFile
from distill.prompts.stream import PromptStream
from distill.record.audit import audit
from distill.record.record import Record
from distill.record.resume import Start, resume
from distill.record.store import Store
from student_trainer.ledger import Ledger
from student_trainer.objectives.config import needs, student_topk
from sync import wire
from sync.base.errors import ConfigError
from sync.base.jsonl import JsonLines
from sync.wire import Generated, ScoreReply, Version, pack
from teacher_service.client import Reply
from tests.benchmarks.figures import Figures, Folder, command, listing

MIB: Final = 1 << 20
SAMPLES: Final = 10
"""Of memory and disk, at equal distances."""
OBJECTIVES: Final = ("sampled", "topk", "student_topk", "full")
"""The others ask the teachers for the same: forward_topk as topk, jsd and skew as full, sft as sampled."""
K: Final = 50
COSTS: Final = ("controller, µs a token", "record, bytes a token")


class Part(NamedTuple):
    """A run of the controller."""

    rollouts: int
    batch: int
    tokens: int
    """Of every completion."""
    width: int
    """Of the teacher's hidden states; 0: the objective needs none."""
    checkpoint_every: int = 0
    replicas: int = 1
    teachers: int = 1
    ranks: int = 1
    depth: str = "adaptive"
    """Of the buffer; "full": as many rollouts in flight as the bound allows."""

    def config(self, folder: Path, objective: str = "", scores: str = "inline") -> RunConfig:
        """With default settings otherwise; `objective` left out: as the width says."""
        objective = objective or ("full" if self.width else "sampled")
        return RunConfig.model_validate(
            {
                "run": {"name": folder.name, "folder": folder.parent, "steps": self.rollouts // self.batch},
                "student": {"path": "student"},
                "teachers": {f"teacher-{i}": {"path": "teacher"} for i in range(self.teachers)},
                "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
                "rollout": {"batch": self.batch, "max_tokens": self.tokens},
                "buffer": {"scores": scores, "depth": self.depth},
                "objective": {"type": objective} | ({"k": K} if objective.endswith("topk") else {}),
                "trainer": {"deepspeed": "ds.json"},
                "evaluation": {"every": 100},
            }
        )


SHAPES: Final = {
    "quickstart": Part(40 * 128, batch=128, tokens=12, width=128),
    "wide": Part(4 * 32, batch=32, tokens=2048, width=4096),
}
LOAD: Final = Part(439_296, 1024, 8192, 0, 8, replicas=512, teachers=8, ranks=64, depth="full")
"""3.6 G tokens."""


# --- roles in memory, which are not measured ----------------------------------------------------------------


class Apart:
    """Processor time of the roles that are not the controller."""

    seconds = 0.0

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
    """Some of `drawn`, f4 [*shape]."""
    size = math.prod(shape)
    start = random.randrange(drawn().size - size)
    return drawn()[start : start + size].reshape(shape)


class NoisyReplica(MemoryReplica):
    """Completions of `longest` tokens; `apart` times it."""

    apart: Apart

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[Generated, None]:
        for prompt in request.prompts:
            with self.apart.timed():
                k, values = request.sampling.student_topk, noise(self.longest)
                answer = Generated(
                    id=prompt.id,
                    token_ids=pack(values.view("u4") % 50, "i4"),
                    logprob=pack(-abs(values)),
                    spans=[wire.VersionSpan(self.version or Version(0, 0), 0, self.longest)],
                    finish_reason="length",
                    topk_ids=pack(noise(self.longest, k).argsort(axis=1), "i4") if k else None,
                )
            await asyncio.sleep(0)
            yield answer


class NoisyTeacher(MemoryTeacher):
    """Scores that go through their bytes; `apart` times it."""

    apart: Apart

    async def score(self, sequences: Any, want: Any, limit: float) -> Any:
        with self.apart.timed():
            scores = [noisy(self._scores(sequence, want)) for sequence in sequences]
            results: list[Any] = [*map(self._keep, scores, sequences)] if want.keep else scores
            self.kept.clear()
            body = wire.encode(ScoreReply(results=results))
            del scores, results  # freeing them is the teacher's work, too
        await asyncio.sleep(0)
        return Reply(wire.decode(body, ScoreReply).results, "memory")


def noisy(scored: Any) -> wire.Scored:
    """With log-probabilities and hidden states that do not repeat."""
    (count,), changed = scored.logprob.shape, {"logprob": pack(-abs(noise(*scored.logprob.shape)))}
    if scored.topk_logprob:
        changed["topk_ids"] = pack(noise(count, K).argsort(axis=1), "i4")
        changed["topk_logprob"] = pack(-7 - abs(noise(count, K)), "f2")
    if scored.gathered:
        changed["gathered"] = pack(-7 - abs(noise(*scored.gathered.shape)), "f2")
    if scored.hidden:
        changed["hidden"] = pack(noise(*scored.hidden.shape).view("u4") >> 16, "bf16")
    return replace(scored, **changed)


# --- a run --------------------------------------------------------------------------------------------------


async def train(folder: Path, part: Part, config: RunConfig, figures: Figures) -> None:
    """Train on all rollouts of a part; what it cost is written to `figures`."""
    apart, written, in_flight, names = Apart(), 0, 0, [*config.teachers]
    replicas = {f"student-{i}": NoisyReplica(seed=i, longest=part.tokens) for i in range(part.replicas)}
    teachers = {name: NoisyTeacher() for name in names}
    for role in (*replicas.values(), *teachers.values()):
        role.apart, role.width = apart, part.width

    def write(file: int, data: memoryview) -> int:
        nonlocal written
        written += (count := os.write(file, data))
        return count

    held_out = [replace(prompt, source=names[0]) for prompt in HELD_OUT_SET.prompts]
    sampling = wire.Sampling(max_tokens=part.tokens)
    parts = Components(
        replicas=dict(replicas),
        teachers=dict(teachers),
        route=lambda source: source,
        prompts=PromptStream(MemoryPrompts(names), config.run.seed),
        store=Store(folder, config.buffer.fsync, write=write),
        want=needs(config.objective),
        student_topk=student_topk(config.objective),
        evaluator=MemoryEvaluator(),
        sets={HELD_OUT: HELD_OUT_SET._replace(prompts=held_out, sampling=sampling)},
    )
    metrics, spans = MetricsFile(folder / "metrics.jsonl"), JsonLines(folder / "timeline.jsonl")
    ledgers = [Ledger(folder / "ledger", Version(0, 0), None, rank) for rank in range(part.ranks)]

    def record(version: Version, shares: list[wire.TrainBatch]) -> None:
        with apart.timed():
            for ledger, share in zip(ledgers, shares, strict=True):
                ids = [rollout for rows in share.micro_batches for rollout in rows.ids]
                ledger.record(version.step + 1, ids, "")
            for role in (*replicas.values(), *teachers.values()):
                getattr(role, "updates", getattr(role, "requests", [])).clear()

    def write_span(span: Span) -> None:  # one for every request, and more
        nonlocal in_flight
        in_flight = max(in_flight, len(controller.record.state.pending))
        spans.write(span)

    hooks = Hooks(
        step=lambda version, values: metrics.log(version.step, values),
        batch=lambda batch: garbage.batch_made(batch.version.step),
        span=write_span,
    )
    start = resume(folder, Start.of(config, parts.prompts), parts.store.connection)
    controller = Controller(config, parts, start, hooks)
    trainer = MemoryTrainer(
        controller.session, part.ranks, checkpoint_every=part.checkpoint_every, record=record
    )
    began, usage = time.process_time(), list[Figures]()
    with blocks() as longest_blocks:
        running = [asyncio.create_task(controller.run()), asyncio.create_task(trainer.run())]
        for sample in range(1, SAMPLES + 1):
            due = sample * config.run.steps // SAMPLES
            while not any(task.done() for task in running) and _reached(controller) < due:
                await trainer.stepped.wait(1.0)
            with apart.timed():
                usage.append({"rollouts": _reached(controller) * part.batch, **used(folder)})
        await asyncio.gather(*running)
    tokens = controller.record.state.counters.generated_tokens
    spent = time.process_time() - began - apart.seconds
    metrics.close()
    spans.close()
    figures |= {
        COSTS[0]: 1e6 * spent / tokens,
        COSTS[1]: (written + MIB * usage[-1]["rows, MiB"]) / tokens,
        "tokens per second of CPU time": tokens / spent,
        "rollouts in flight": in_flight,
        "usage": usage,
        "blocks": longest_blocks,
    }


def _reached(controller: Controller) -> int:
    reached = controller.record.state.reached
    return reached.step if reached else 0


@contextmanager
def blocks() -> Iterator[list[Figures]]:
    """How long steps of tasks block this process's loops, by function; in the end the five longest, without
    those of `train`, which collects garbage."""
    run, longest, found = asyncio.Handle._run, dict[str, tuple[float, ...]](), list[Figures]()

    def timed(handle: asyncio.Handle) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        run(handle)
        if (seconds := time.perf_counter() - began) > 0.001:
            task = getattr(handle._callback, "__self__", None)
            of: Any = task.get_coro() if isinstance(task, asyncio.Task) else handle._callback
            name = getattr(of, "__qualname__", str(of))
            both = zip(longest.get(name, (0.0, 0.0)), (time.thread_time() - worked, seconds), strict=True)
            longest[name] = tuple(map(max, both))

    asyncio.Handle._run = timed
    try:
        yield found
    finally:
        asyncio.Handle._run = run
        longest.pop(train.__qualname__, None)
        for name, (worked, clock) in sorted(longest.items(), key=lambda block: block[1], reverse=True)[:5]:
            found.append({"task": name, "ms by the clock": 1e3 * clock, "ms of CPU time": 1e3 * worked})


def used(folder: Path) -> Figures:
    """MiB of memory and of the record's files now, after a garbage collection."""
    gc.collect()
    sizes = {"RSS, MiB": psutil.Process().memory_info().rss / MIB, "rows, MiB": 0.0, "arrays, MiB": 0.0}
    for path in [*folder.glob("run.db*"), *folder.glob("arrays/*")]:
        with suppress(FileNotFoundError):  # freed meanwhile
            sizes["rows, MiB" if path.parent == folder else "arrays, MiB"] += path.stat().st_size / MIB
    return sizes


def measured(folder: Path, part: Part, objective: str = "", scores: str = "inline") -> Figures:
    """What one run in a new `folder` cost, the restart behind it, and the audit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config, figures = part.config(folder, objective, scores), part._asdict()
    drawn()
    asyncio.run(train(folder, part, config, figures))
    began = time.monotonic()
    store, prompts = Store(folder), PromptStream(MemoryPrompts(), config.run.seed)
    Record(store, prompts, resume(folder, Start.of(config, prompts)))
    store.close()
    figures["restart_seconds"], began = time.monotonic() - began, time.monotonic()
    figures |= {"audit_ok": audit(folder).ok, "audit_seconds": time.monotonic() - began}
    return figures


def run(
    folder: Folder = Path("runs/bench-controller"),
    objectives: Annotated[bool, typer.Option(help="Whether every objective is measured.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each objective; medians are taken.")] = 3,
    load: Annotated[int, typer.Option(min=0, help="Rollouts of the load; 0: none.")] = LOAD.rollouts,
    batch: Annotated[int, typer.Option(min=64, help="Of the load, a step.")] = LOAD.batch,
    tokens: Annotated[int, typer.Option(min=1, help="Of a rollout of the load.")] = LOAD.tokens,
    rollouts: Annotated[int, typer.Option(min=0, help="Small rollouts, such as 500000; 0: none.")] = 0,
) -> Figures:
    """Measure what a controller spends on a token: objectives inline and by reference, a load, a long run."""
    parts = {
        "load": LOAD._replace(rollouts=load, batch=batch, tokens=tokens),
        "rollouts": Part(rollouts, 128, 16, 0, max(1, rollouts // 128 // 50), replicas=2),
    }
    for name, part in parts.items():
        if 0 < part.rollouts < SAMPLES * part.batch:
            at_least = f"{SAMPLES} batches are {SAMPLES * part.batch}"
            raise ConfigError(f"--{name} {part.rollouts} is too few: {at_least}; 0 leaves it out")
    logging.getLogger("distill.rollout").setLevel(logging.WARNING)  # a line for each of 512 replicas
    rows: list[Figures] = []
    for name, shape in SHAPES.items() if objectives else ():
        for objective in OBJECTIVES:
            ways = ("inline",) if objective == "sampled" else ("inline", "reference")
            runs = {way: partial(measured, folder / "run", shape, objective, way) for way in ways}
            trials = [{way: run() for way, run in runs.items()} for _ in range(rounds)]
            for way in ways:
                row = {"shape": name, "objective": objective, "scores": way}
                rows.append(row | {key: median(trial[way][key] for trial in trials) for key in COSTS})
    garbage.begin()
    soaks = {name: measured(folder / name, part) for name, part in parts.items() if part.rollouts}
    return {"k": K, "rounds": rounds, "rows": rows, "soaks": soaks}


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    lines = listing(figures["rows"]) if figures["rows"] else []
    for name, soak in figures["soaks"].items():
        lists = ("usage", "blocks")
        whole = {key: value for key, value in soak.items() if key not in lists}
        lines += ["", f"### {name}", "", *listing([whole])]
        lines += [line for key in lists for line in ("", *listing(soak[key]))]
    return "\n".join(lines)


if __name__ == "__main__":
    command(run, table)
