"""Malformed requests and floods against a running teacher: what it answers, and whether it keeps serving."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter

import httpx
import numpy as np
import psutil
from corrupted_messages import Spoiler

from sync import wire
from sync.wire import ScoreReply, ScoreRequest, ScoreSequence, TeacherGenerateReply, encode, pack

Request = ScoreRequest | wire.TeacherGenerateRequest
Reply = type[ScoreReply | TeacherGenerateReply]


def malformed(rng: random.Random, good: Request) -> bytes:
    """A request with a changed field or byte, mostly; noise, arrays beyond everything, endless nesting."""
    kind = rng.randrange(20)
    if kind == 0:
        return rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))
    if kind == 1:
        return b"\x91" * rng.choice([10, 1000, 100_000]) + b"\xc0"
    if kind == 2 and isinstance(good, ScoreRequest):
        ids = pack(np.zeros(rng.choice([10_000, 200_000]), np.int32))
        return encode(ScoreRequest([ScoreSequence("long", ids, 1)], good.want))
    return Spoiler(rng, 1.0).spoilt(good)


async def fuzz(url: str, count: int, good: Request) -> tuple[Counter[int], list[str]]:
    """Send `count` malformed requests to the route of `good`, always the same ones; `good` before and after.

    How many answers had each status, and those that are neither the route's reply nor a 4xx with a reason.
    Raises TransportError when a connection breaks.
    """
    generates = isinstance(good, wire.TeacherGenerateRequest)
    route, kind = ("/v1/generate", TeacherGenerateReply) if generates else ("/v1/score", ScoreReply)
    rng, statuses, unexplained = random.Random(0), Counter[int](), list[str]()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        before, gate = await http.post(route, content=encode(good)), asyncio.Semaphore(8)

        async def send(body: bytes) -> None:
            async with gate:
                answer = await http.post(route, content=body)
            statuses[answer.status_code] += 1
            if not _explained(answer, kind):
                unexplained.append(f"status {answer.status_code}: {answer.text[:200]}")

        await asyncio.gather(*(send(malformed(rng, good)) for _ in range(count)))
        after = await http.post(route, content=encode(good))
    assert before.status_code == after.status_code == 200
    assert before.content == after.content, "it still serves as before"
    return statuses, unexplained


def _explained(answer: httpx.Response, kind: Reply) -> bool:
    try:
        if answer.status_code == 200:
            results = wire.decode(answer.content, kind).results
            return all(result.error for result in results if isinstance(result, wire.ScoreRefused))
        return 400 <= answer.status_code < 500 and bool(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return False


async def flood(
    url: str, pid: int, queue_tokens: int, length: int, token: str, factor: int = 20
) -> tuple[Counter[int], int]:
    """Offer `factor` times the queue's bound at once, in requests of an eighth of the bound each.

    How many answers had each status, and by how many bytes the teacher's memory grew. The teacher is stopped
    until all are sent: else a client that gets less of the processor than the teacher would offer no more
    than is answered meanwhile.
    """
    sent, process = asyncio.Semaphore(0), psutil.Process(pid)
    ids, per_request = pack(np.zeros(length, np.int32)), max(1, queue_tokens // 8 // length)
    body = encode(ScoreRequest(sequences=[ScoreSequence(str(i), ids, 1) for i in range(per_request)]))

    async def note(event: str, _: object) -> None:
        if event == "http11.send_request_body.complete":
            sent.release()

    async with httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {token}"},
        timeout=300,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as http:
        await http.post("/v1/score", content=body)
        before = peak = process.memory_info().rss
        os.kill(pid, signal.SIGSTOP)
        try:
            requests = [
                asyncio.create_task(http.post("/v1/score", content=body, extensions={"trace": note}))
                for _ in range(8 * factor)
            ]
            async with asyncio.timeout(60):
                for _ in requests:
                    await sent.acquire()
        finally:
            os.kill(pid, signal.SIGCONT)
        answers = asyncio.gather(*requests)
        while not answers.done():
            peak = max(peak, process.memory_info().rss)
            await asyncio.wait([answers], timeout=0.02)
    return Counter(answer.status_code for answer in await answers), peak - before
