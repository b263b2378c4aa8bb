"""What a controller spends on a token: processor time, and bytes of its journal.

`objectives`: for each kind of objective. `load`: with 512 replicas, 8 teachers and 64 ranks, over as many
tokens as one million a second are in an hour. Controller and journal are the real ones. Prompts, replicas,
teachers and trainer are in memory, from the tests of a source checkout, and what they spend themselves is
taken off; what a teacher sends is decoded from its bytes, as it is behind HTTP.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

from distill.bench.runner import Figures, markdown, of_tests
from distill.bench.soak import Roles, Size, configuration
from distill.bench.soak import part as soak_part
from distill.bench.soak import table as soak_table
from distill.controller import Controller
from distill.interfaces import Components
from distill.prompts.stream import PromptStream
from distill.run_log.journal import Journal
from distill.trainer_api.http_api import serving
from student_trainer.objectives.config import needs, student_topk
from sync import wire
from sync.base.memory import available_memory
from sync.wire import DIGEST_BYTES, Want, decode, pack
from sync.wire.client import BlockingPeer
from sync.wire.server import bind_alone
from teacher_service.app import TeacherService
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.limits import limits

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
    roles = of_tests("in_memory")
    drawn()

    class Replica(roles.MemoryReplica):  # type: ignore[name-defined]
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

    class Teacher(roles.MemoryTeacher):  # type: ignore[name-defined]
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
    roles = of_tests("in_memory")
    replica_type, teacher_type = servers(shape, apart)

    def write(file: int, data: memoryview) -> int:
        nonlocal written
        written += (count := os.write(file, data))
        return count

    parts = Components(
        replicas={"student-0": replica_type()},
        teachers={"t": teacher_type()},
        route=lambda source: "t",
        prompts=PromptStream(roles.MemoryPrompts(), 0),
        journal=Journal(folder / "journal", config.buffer.fsync, write=write),
        want=needs(config.objective),
        student_topk=student_topk(config.objective),
    )
    controller = Controller(config, parts)
    trainer = roles.MemoryTrainer(controller.session, record=lambda version, shares: None)
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
        of_tests("in_memory").MemoryPrompts(names),
        ranks,
    )
    began, by_clock = time.process_time(), time.monotonic()
    gc.freeze()  # as in a run
    found = soak_part(folder, size, roles)
    elapsed = time.monotonic() - by_clock - found["restart_seconds"] - found["audit_seconds"]
    spent = found["usage"][-1]["cpu_seconds"] - began - apart.seconds
    tokens = size.rollouts * size.tokens
    rates = {"tokens_per_cpu_second": tokens / spent, "tokens_per_second": tokens / elapsed}
    return {"replicas": replicas, "teachers": teachers, "ranks": ranks, **rates, **found}


async def fetch_cost(tokens: int, width: int, rows: int = 200) -> float:
    """Milliseconds of processor time that a kept row costs its teacher and its rank together, over HTTP."""
    engine = of_tests("table_engine").TableEngine(np.full((width, width), -np.log(width), "f4"))
    info = await of_tests("in_memory").MemoryTeacher().first_info()
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


def run(folder: Path, objectives: bool = True, loaded: bool = True) -> Figures:
    """Every objective, inline and by reference in turns, the medians of ROUNDS; and `load`."""
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
    under_load = {"load": load(folder / "load")} if loaded else {}
    return {"k": K, "rounds": ROUNDS, "rows": rows, "fetch_ms": fetches, **under_load}


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
            soak_table({"load": load}),
        ]
    return "\n".join(lines)
