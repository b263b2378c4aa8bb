"""What a controller spends on a token: processor time, and bytes of its record; and what a long run costs it.

    quickstart, wide   every kind of objective, inline and by reference
    load               512 replicas, 8 teachers, 64 ranks, by default an hour's tokens at a million a second
    rollouts           a long run of small ones

Controller and record are the real ones. Prompts, replicas, teachers and trainer are in memory, and what they
spend themselves is taken off; what a teacher sends is decoded from its bytes, as it is behind HTTP. Their
numbers are noise: what repeats itself would cost nothing in a compressed record.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import in_memory
import numpy as np
import psutil
import typer
from msgspec.structs import replace
from started import controlled

from distill import garbage
from distill.config import RunConfig
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
from sync.base.jsonl import JsonLines
from sync.wire import Generated, ScoreReply, Version, pack
from teacher_service.client import Reply
from tests.benchmarks.figures import Figures, Folder, command, listing

BULKY: Final = ("topk", "student_topk", "full")
"""Others ask the teachers for the same: forward_topk as topk, jsd and skew as full, sft as sampled."""
WAYS: Final = (("sampled", "inline"), *itertools.product(BULKY, ("inline", "reference")))
K: Final = 50
BLOCK: Final = "longest block, s of processor time"


class Part(NamedTuple):
    """A run of the controller."""

    rollouts: int
    batch: int
    tokens: int  # of every completion
    width: int  # of the teacher's hidden states; 0: the objective needs none
    checkpoint_every: int = 0
    replicas: int = 1
    teachers: int = 1
    ranks: int = 1
    depth: str = "adaptive"  # of the buffer; "full": as many rollouts in flight as the bound allows

    def config(self, folder: Path, objective: str, scores: str) -> RunConfig:
        """With default settings otherwise."""
        steps = max(1, self.rollouts // self.batch)
        sections = {
            "run": {"name": folder.name, "folder": folder.parent, "steps": steps},
            "student": {"path": "student"},
            "teachers": {f"teacher-{i}": {"path": "teacher"} for i in range(self.teachers)},
            "prompts": {"type": "jsonl", "path": "prompts.jsonl"},
            "rollout": {"batch": self.batch, "max_tokens": self.tokens},
            "buffer": {"scores": scores, "depth": self.depth},
            "objective": {"type": objective} | ({"k": K} if objective.endswith("topk") else {}),
            "trainer": {"deepspeed": "ds.json"},
            "evaluation": {"every": 100},
        }
        return RunConfig.model_validate(sections)


SHAPES: Final = {"quickstart": Part(40 * 128, 128, 12, width=128), "wide": Part(4 * 32, 32, 2048, width=4096)}
LOAD: Final = Part(439_296, 1024, 8192, 0, 8, replicas=512, teachers=8, ranks=64, depth="full")
"""3.6 G tokens."""


class Aside:
    """Processor time of the roles that are not the controller."""

    seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what this thread spends; nothing inside may wait."""
        began = time.thread_time()
        yield
        self.seconds += time.thread_time() - began


ASIDE: Final = Aside()
noise = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)


class NoisyReplica(in_memory.MemoryReplica):
    """Completions of `longest` tokens."""

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[Generated, None]:
        for prompt in request.prompts:
            with ASIDE.timed():
                count, k = min(self.longest, request.sampling.max_tokens), request.sampling.student_topk
                values = noise(count)
                answer = Generated(
                    id=prompt.id,
                    token_ids=pack(values.view("u4") % 50, "i4"),
                    logprob=pack(-abs(values)),
                    spans=[wire.VersionSpan(self.version or Version(0, 0), 0, count)],
                    finish_reason="length",
                    topk_ids=pack(noise((count, k)).argsort(axis=1), "i4") if k else None,
                )
            await asyncio.sleep(0)
            yield answer


class NoisyTeacher(in_memory.MemoryTeacher):
    """Scores that do not repeat, and that go through their bytes."""

    async def score(self, sequences: Any, want: Any, limit: float) -> Any:
        with ASIDE.timed():
            scores = [self._scores(sequence, want) for sequence in sequences]
            results = [*map(self._keep, scores, sequences)] if want.keep else scores
            self.kept.clear()
            body = wire.encode(ScoreReply(results=results))
            del scores, results  # freeing them is the teacher's work, too
        await asyncio.sleep(0)
        return Reply(wire.decode(body, ScoreReply).results, "memory")

    def _scores(self, sequence: Any, want: Any) -> Any:
        scored: Any = super()._scores(sequence, want)
        (count,), changed = scored.logprob.shape, {"logprob": pack(-abs(noise(scored.logprob.shape)))}
        if scored.topk_logprob:
            changed["topk_ids"] = pack(noise((count, K)).argsort(axis=1), "i4")
            changed["topk_logprob"] = pack(-7 - abs(noise((count, K))), "f2")
        if scored.gathered:
            changed["gathered"] = pack(-7 - abs(noise(scored.gathered.shape)), "f2")
        if scored.hidden:
            changed["hidden"] = pack(noise(scored.hidden.shape).view("u4") >> 16, "bf16")
        return replace(scored, **changed)


async def train(folder: Path, part: Part, config: RunConfig) -> Figures:
    """Train on all rollouts of a part; what it cost."""
    written, in_flight, early, names = 0, 0, 0.0, [*config.teachers]
    replicas = {f"student-{i}": NoisyReplica(longest=part.tokens) for i in range(part.replicas)}
    teachers = {name: NoisyTeacher() for name in names}
    NoisyTeacher.width = part.width

    def write(file: int, data: memoryview) -> int:
        nonlocal written
        written += (count := os.write(file, data))
        return count

    parts = Components(
        replicas=dict(replicas),
        teachers=dict(teachers),
        route=lambda source: source if source in teachers else names[0],  # of held-out prompts
        prompts=PromptStream(in_memory.MemoryPrompts(names), config.run.seed),
        store=Store(folder, config.buffer.fsync, write=write),
        want=needs(config.objective),
        student_topk=student_topk(config.objective),
        evaluator=in_memory.MemoryEvaluator(),
        sets={HELD_OUT: in_memory.HELD_OUT_SET},
    )
    metrics, spans = MetricsFile(folder / "metrics.jsonl"), JsonLines(folder / "timeline.jsonl")
    ledgers = [Ledger(folder / "ledger", Version(0, 0), None, rank) for rank in range(part.ranks)]

    def record(version: Version, shares: list[wire.TrainBatch]) -> None:
        with ASIDE.timed():
            for ledger, share in zip(ledgers, shares, strict=True):
                ids = [rollout for rows in share.micro_batches for rollout in rows.ids]
                ledger.record(version.step + 1, ids, "")

    def write_span(span: Span) -> None:  # one for every request, and more
        nonlocal in_flight
        in_flight = max(in_flight, len(controller.record.state.pending))
        spans.write(span)

    def step(version: Version, values: Any) -> None:
        nonlocal early
        metrics.log(version.step, values)
        if version.step == max(1, config.run.steps // 10):
            with ASIDE.timed():
                early = memory()

    hooks = Hooks(step, batch=lambda batch: garbage.batch_made(batch.version.step), span=write_span)
    controller = controlled(config, parts, hooks)
    trainer = in_memory.MemoryTrainer(controller.session, part.ranks, part.checkpoint_every, record=record)
    began, aside = time.process_time(), ASIDE.seconds
    with blocks() as longest:
        await asyncio.gather(controller.run(), trainer.run())
    tokens = controller.record.state.counters.generated_tokens
    spent = time.process_time() - began - (ASIDE.seconds - aside)
    metrics.close()
    spans.close()
    return {
        "controller, µs a token": 1e6 * spent / tokens,
        "tokens per second of CPU time": tokens / spent,
        "tokens": tokens,
        "bytes of arrays": written,
        "rollouts in flight": in_flight,
        "MiB of memory after a tenth": early,
        "at the end": memory(),
        **longest,
    }


@contextmanager
def blocks() -> Iterator[Figures]:
    """Seconds of the longest step of a task, which blocks this process's loops."""
    run, longest = asyncio.Handle._run, {BLOCK: 0.0}

    def timed(handle: asyncio.Handle) -> None:
        began, worked, aside = time.perf_counter(), time.thread_time(), ASIDE.seconds
        run(handle)
        aside -= ASIDE.seconds
        by_clock, by_processor = time.perf_counter() - began + aside, time.thread_time() - worked + aside
        if by_processor > longest[BLOCK]:
            task = getattr(handle._callback, "__self__", None)
            name = getattr(task.get_coro() if isinstance(task, asyncio.Task) else task, "__qualname__", None)
            longest.update({BLOCK: by_processor, "by the clock": by_clock, "of": name or str(handle)})

    asyncio.Handle._run = timed
    try:
        yield longest
    finally:
        asyncio.Handle._run = run


def memory() -> float:
    """MiB of this process, after a garbage collection."""
    gc.collect()
    return psutil.Process().memory_info().rss / (1 << 20)


def measured(folder: Path, name: str, part: Part, objective: str, scores: str) -> Figures:
    """What one run in a new folder cost, the restart behind it, and the audit."""
    run_dir = folder.absolute() / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    config = part.config(run_dir, objective, scores)
    figures = {"run": name, "objective": config.objective.type, "scores": scores}
    figures |= asyncio.run(train(run_dir, part, config))
    rows = sum(path.stat().st_size for path in run_dir.glob("run.db*"))
    figures["record, bytes a token"] = (figures["bytes of arrays"] + rows) / figures["tokens"]
    began = time.monotonic()
    store, prompts = Store(run_dir), PromptStream(in_memory.MemoryPrompts(), config.run.seed)
    Record(store, prompts, resume(run_dir, Start.of(config, prompts)))
    store.close()
    restarted = time.monotonic()
    figures |= {"restart, s": restarted - began, "nothing lost": audit(run_dir).ok}
    return figures | {"audit, s": time.monotonic() - restarted}


def run(
    folder: Folder = Path("runs/bench-controller"),
    objectives: Annotated[bool, typer.Option(help="Whether every objective is measured.")] = True,
    load: Annotated[int, typer.Option(min=0, help="Rollouts of the load; 0: none.")] = LOAD.rollouts,
    batch: Annotated[int, typer.Option(min=64, help="Of the load, a step.")] = LOAD.batch,
    tokens: Annotated[int, typer.Option(min=1, help="Of a rollout of the load.")] = LOAD.tokens,
    rollouts: Annotated[int, typer.Option(min=0, help="Small rollouts, such as 500000; 0: none.")] = 0,
) -> Figures:
    """Measure what a controller spends on a token: objectives inline and by reference, a load, a long run."""
    logging.getLogger("distill.rollout").setLevel(logging.WARNING)  # a line for each of 512 replicas
    pairs = itertools.product(SHAPES if objectives else (), WAYS)
    rows = [measured(folder, name, SHAPES[name], *way) for name, way in pairs]
    garbage.begin()
    if load:
        part = LOAD._replace(rollouts=load, batch=batch, tokens=tokens)
        rows.append(measured(folder, "load", part, *WAYS[0]))
    if rollouts:
        part = Part(rollouts, 128, 16, 0, max(1, rollouts // 128 // 50), replicas=2)
        rows.append(measured(folder, "rollouts", part, *WAYS[0]))
    return {"k": K, "rows": rows}


def table(figures: Figures) -> str:
    return "\n".join(listing(figures["rows"]))


if __name__ == "__main__":
    command(run, table)
