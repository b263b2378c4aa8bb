"""Malformed requests and floods against a running teacher: what it answers, and whether it keeps serving."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import psutil

from sync.wire import (
    Array,
    EvalRequest,
    Ok,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    ScoreSequence,
    TeacherGenerateReply,
    TeacherGenerateRequest,
    TeacherPrompt,
    Version,
    Want,
    decode,
    encode,
    pack,
)

Request = ScoreRequest | TeacherGenerateRequest
Reply = type[ScoreReply | TeacherGenerateReply]
Maker = Callable[[random.Random, Any], bytes]
"""A malformed body, made from a good request of the kind that the maker knows."""
ROUTES: Final[dict[type[Request], tuple[str, Reply]]] = {
    ScoreRequest: ("/v1/score", ScoreReply),
    TeacherGenerateRequest: ("/v1/generate", TeacherGenerateReply),
}


@dataclass
class FuzzReport:
    """What came back."""

    requests: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status → answers; 0: the connection broke."""
    unexplained: list[str] = field(default_factory=list)
    """Answers that are neither the route's reply nor a 4xx with a text."""
    good_after: bool = False
    """Whether a good request got the same answer at the end as at the beginning."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """No broken connection, no 5xx, nothing unexplained, and the teacher still answers."""
        broken = any(status == 0 or status >= 500 for status in self.statuses)
        return self.good_after and not self.unexplained and not broken


# --- malformed bodies -------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
EXTREMES: Final[tuple[Any, ...]] = (
    None,
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    1e308,
    NAN,
    INF,
    "",
    "é" * 99,
    b"",
    [],
    {},
    True,
)
SHAPES: Final = ((), (0,), (-1,), (3,), (2**31,), (2**33, 2**33), (2**63,), (1, 3), (3, 1, 1), (0, 2**64 - 1))
DTYPES: Final[tuple[Any, ...]] = ("u1", "i4", "i8", "f2", "f4", "bf16")
LENGTHS: Final = (1, 10_000, 200_000)
ODD_FIELDS: Final[dict[type, dict[str, tuple[Any, ...]]]] = {
    ScoreRequest: {
        "sequences": ([],),
        "want": tuple(Want(topk=k, hidden=hidden) for k in (-1, 1025, 2**40) for hidden in (False, True)),
        "deadline": (-1.0, 0.0, NAN, 1e-9),
        "schema": (-1, 0, 2, 2**60),
    },
    ScoreSequence: {"start": (-(2**60), -1, 0, 10**6, 2**62)},
    TeacherGenerateRequest: {
        "prompts": ([],),
        "max_tokens": (-(2**63), -1, 0, 2**31, 2**62),
        "temperature": (NAN, INF, -INF, -1.0, 0.0, -0.0, 5e-324, 1e308),
        "stop_token_ids": ([-1], [2**31], [-(2**63)], [2**62]),
        "deadline": (-1.0, 0.0, NAN, INF, 1e-9),
        "schema": (-1, 0, 2, 2**60),
    },
    TeacherPrompt: {"seed": (-1, 2**32, -(2**63), 2**63)},
}
"""Well-formed requests that cannot be served."""
ITEMS: Final = {ScoreRequest: "sequences", TeacherGenerateRequest: "prompts"}


def _noise(rng: random.Random, good: Request) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))


def _cut(rng: random.Random, good: Request) -> bytes:
    body = encode(good)
    return body[: rng.randrange(len(body))]


def _flipped(rng: random.Random, good: Request) -> bytes:
    body = bytearray(encode(good))
    for _ in range(rng.randrange(1, 6)):
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return bytes(body)


def _other_message(rng: random.Random, good: Request) -> bytes:
    return encode(rng.choice([Ok(), EvalRequest(version=Version(0, 0)), ScoreReply(results=[])]))


def _odd_value(rng: random.Random, good: Request) -> bytes:
    """A good request with one field of another type or an extreme value, at any depth."""
    tree = msgspec.msgpack.decode(encode(good))
    node = tree
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    node[key] = rng.choice([*EXTREMES, rng.randbytes(9)])
    return msgspec.msgpack.encode(tree)


def _odd_field(rng: random.Random, good: Request) -> bytes:
    """One field of the request, or of its first item, with a value that cannot be served."""
    first = getattr(good, ITEMS[type(good)])[0]
    name, values = rng.choice([*ODD_FIELDS[type(good)].items(), *ODD_FIELDS[type(first)].items()])
    if name in ODD_FIELDS[type(good)]:
        return encode(msgspec.structs.replace(good, **{name: rng.choice(values)}))
    return _with_first(good, {name: rng.choice(values)})


def _odd_array(rng: random.Random, good: Request) -> bytes:
    """Too many ids, ids outside of everything, or dtype, shape and bytes that do not belong together."""
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    ids = np.array([rng.choice([-1, 0, 2**31 - 1, -(2**31), 10**6]) for _ in range(3)], np.int32)
    long = pack(np.zeros(rng.choice(LENGTHS), np.int32))
    arrays = [Array(dtype, shape, ids.tobytes()), Array(dtype, shape, b""), pack(ids), long]
    names = ["token_ids", "gather_ids"] if isinstance(good, ScoreRequest) else ["token_ids"]
    return _with_first(good, {rng.choice(names): rng.choice(arrays)})


def _with_first(good: Request, change: dict[str, Any]) -> bytes:
    name = ITEMS[type(good)]
    first, *rest = getattr(good, name)
    return encode(msgspec.structs.replace(good, **{name: [msgspec.structs.replace(first, **change), *rest]}))


def _deep(rng: random.Random, good: Request) -> bytes:
    return b"\x91" * rng.choice([10, 1000, 100_000]) + b"\xc0"


MAKERS: Final[tuple[Maker, ...]] = (
    *(_noise, _cut, _flipped, _other_message, _odd_value, _deep, _odd_array, _odd_field),
    *(_flipped, _odd_value),  # twice as often: they come closest to a good request
)


# --- fuzzing ----------------------------------------------------------------------------------------------


async def fuzz(
    url: str, count: int, good: Request, seed: int = 0, token: str | None = None, concurrency: int = 8
) -> FuzzReport:
    """Send `count` malformed requests to the route of `good`, and `good` before and after.

    The same seed gives the same requests.
    """
    route, kind = ROUTES[type(good)]
    rng, report, started = random.Random(seed), FuzzReport(), time.monotonic()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        before = await http.post(route, content=encode(good))
        gate = asyncio.Semaphore(concurrency)

        async def one(body: bytes) -> None:
            async with gate:
                await _send(http, route, body, kind, report)

        for first in range(0, count, 500):
            bodies = [rng.choice(MAKERS)(rng, good) for _ in range(min(500, count - first))]
            await asyncio.gather(*(one(body) for body in bodies))
        after = await http.post(route, content=encode(good))
    report.good_after = before.status_code == after.status_code == 200 and before.content == after.content
    report.seconds = time.monotonic() - started
    return report


async def _send(http: httpx.AsyncClient, route: str, body: bytes, kind: Reply, report: FuzzReport) -> None:
    report.requests += 1
    try:
        answer = await http.post(route, content=body)
    except httpx.TransportError as error:
        _count(report.statuses, 0)
        report.unexplained.append(f"{type(error).__name__}: {error}")
        return
    _count(report.statuses, answer.status_code)
    if (problem := _unexplained(answer, kind)) is not None:
        report.unexplained.append(problem)


def _count(statuses: dict[int, int], status: int) -> None:
    statuses[status] = statuses.get(status, 0) + 1


def _unexplained(answer: httpx.Response, kind: Reply) -> str | None:
    """What is wrong with an answer; None: it is a reply, or a refusal with a reason."""
    try:
        if answer.status_code == 200:
            results = decode(answer.content, kind).results
            ok = all(result.error for result in results if isinstance(result, ScoreRefused))
        else:
            ok = 400 <= answer.status_code < 500 and bool(answer.json()["error"])
    except (ValueError, KeyError, TypeError) as error:
        return f"status {answer.status_code}: {error}"
    return None if ok else f"status {answer.status_code}: {answer.text[:200]}"


# --- floods -----------------------------------------------------------------------------------------------


@dataclass
class FloodReport:
    """What a flood did."""

    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status → answers."""
    memory_before: int = 0
    """Resident bytes of the teacher, after one request of the flood's kind."""
    memory_peak: int = 0
    seconds: float = 0.0
    slowest_refusal: float = 0.0
    """Seconds until the last 429 of a request came."""


async def flood(
    url: str, pid: int, queue_tokens: int, length: int, factor: int = 20, token: str | None = None
) -> FloodReport:
    """Offer `factor` times the queue's bound at once, in requests of an eighth of the bound each.

    The teacher is stopped until all are sent: else a client that gets less of the processor than the teacher
    would offer no more than is answered meanwhile.
    """
    report, sent = FloodReport(), asyncio.Semaphore(0)
    per_request = max(1, queue_tokens // 8 // length)
    ids = pack(np.zeros(length, np.int32))
    body = encode(ScoreRequest(sequences=[ScoreSequence(str(i), ids, 1) for i in range(per_request)]))
    headers = {"authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=300, limits=limits, trust_env=False
    ) as http:

        async def note(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                sent.release()

        async def one() -> None:
            answer = await http.post("/v1/score", content=body, extensions={"trace": note})
            _count(report.statuses, answer.status_code)
            if answer.status_code == 429:
                report.slowest_refusal = max(report.slowest_refusal, time.monotonic() - started)

        await http.post("/v1/score", content=body)
        report.memory_before = psutil.Process(pid).memory_info().rss
        watch = asyncio.create_task(_watch_memory(pid, report))
        os.kill(pid, signal.SIGSTOP)
        try:
            asking = [asyncio.create_task(one()) for _ in range(8 * factor)]
            async with asyncio.timeout(60):
                for _ in asking:
                    await sent.acquire()
        finally:
            os.kill(pid, signal.SIGCONT)
        started = time.monotonic()
        await asyncio.gather(*asking)
        watch.cancel()
    report.seconds = time.monotonic() - started
    return report


async def _watch_memory(pid: int, report: FloodReport) -> None:
    process = psutil.Process(pid)
    while True:
        report.memory_peak = max(report.memory_peak, process.memory_info().rss)
        await asyncio.sleep(0.02)
