"""Swaps of a real vLLM replica while it generates: pause, apply, and what the engine loses besides the pause.

Completions of TOKENS tokens are in flight all the time, as in the quickstart. Windows with and without swaps
take turns; what is generated less in those with swaps, over their number, is the engine time that one swap
costs: pause, prefilling again what was in flight, and staging on the side. Without vLLM there is an error
instead of figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import httpx
import numpy as np

from distill.bench.runner import Figures, serving
from distill.bench.sync_stores import CONTEXT, LARGE, RUN, TOY, Kind, Shape, Versions, make
from distill.config import StudentConfig
from distill.launch import student
from distill.launch.roles import Ports, url_of
from distill.launch.supervise import ChildSpec
from sync.client import TOKEN_VARIABLE, Peer, token_from_environment
from sync.errors import DistillError
from sync.settings import DirectoryStoreConfig, ReplicaConfig
from sync.stores import open_store
from sync.wire import (
    Generated,
    GenerateFailed,
    GeneratePrompt,
    GenerateRequest,
    Sampling,
    UpdateReply,
    UpdateRequest,
    Version,
    unpack,
)

log = logging.getLogger(__name__)
TOKENS: Final = 12
_PROMPT: Final = 8
_REQUESTS: Final = 8
"""That are open at any time; each holds its share of what is in flight."""
TURNS: Final = 4
ALONE: Final = {"toy": 7, "large": 3}
"""Swaps of full versions, and reloads."""
_LOCAL: Final = "127.0.0.1"


def run(full: bool, folder: Path) -> Figures:
    """Swaps by kind, vLLM's own reload, and the engine's pace; `full`: 101 M parameters instead of the toy.

    Raises DistillError when no engine comes up.
    """
    shape = LARGE if full else TOY
    model, adapter = make(shape, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="replica-") as work:
        found = asyncio.run(_weights(shape, model, Path(work) / "weights"))
        found["swaps"]["lora"] = asyncio.run(_adapters(shape, model, adapter, Path(work) / "adapters"))
    return found


async def _weights(shape: Shape, model: Path, work: Path) -> Figures:
    """Full versions, then windows of deltas, then vLLM's own reload."""
    alone, swaps = ALONE[shape.name], TURNS * shape.swaps
    plan: list[Kind] = ["full" if number < alone else "delta" for number in range(alone + swaps)]
    versions = await asyncio.to_thread(_publish, model, work, plan)
    async with _replica(model, work) as url, Peer(url, token_from_environment()) as peer:
        async with _load(peer, shape) as load:
            full = [await _update(peer, version) for version in versions[:alone]]
            delta: list[UpdateReply] = []
            windows = await _windows(peer, shape, load, versions[alone:], delta)
        reload_seconds = await _own_reloads(url, alone)
    return {
        "in_flight": shape.in_flight,
        "swaps": {"full": _medians(full), "delta": _medians(delta)},
        "vllm_reload_seconds": reload_seconds,
        **windows,
    }


async def _adapters(shape: Shape, model: Path, adapter: Path, work: Path) -> Figures:
    plan: list[Kind] = ["lora"] * (2 * ALONE[shape.name])
    versions = await asyncio.to_thread(_publish, adapter, work, plan)
    async with (
        _replica(model, work, shape.rank) as url,
        Peer(url, token_from_environment()) as peer,
        _load(peer, shape),
    ):
        return _medians([await _update(peer, version) for version in versions])


def _publish(folder: Path, work: Path, plan: list[Kind]) -> list[Version]:
    """Publish a copy of the folder, as planned, into a directory store in `work`."""
    shutil.copytree(folder, work / "folder")
    versions = Versions(work / "folder", open_store(DirectoryStoreConfig(), work / "store"))
    return [versions.publish(kind).version for kind in plan]


@contextlib.asynccontextmanager
async def _replica(model: Path, work: Path, rank: int | None = None) -> AsyncIterator[str]:
    """URL of a replica on loopback, with vLLM's development routes."""
    config = StudentConfig(
        path=str(model),
        engine_args={"max-model-len": CONTEXT, "max-num-seqs": 256, "enforce-eager": True},
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    replica = ReplicaConfig(run=RUN, store_path=work / "store", mirror=work / "mirror", lora_rank=rank)
    token = token_from_environment()
    with Ports() as ports:
        port = ports.take(_LOCAL, 0, "student.port")
        line, environment = student.command(config, replica, 0, _LOCAL, port)
        environment |= {} if token is None else {TOKEN_VARIABLE: token}
        url = url_of(_LOCAL, port)
        async with serving([ChildSpec("student-0", line, environment, url=url)], work / "logs"):
            yield url


@dataclass
class _Load:
    """Completions in flight."""

    tokens: int = 0
    """Generated so far."""


@contextlib.asynccontextmanager
async def _load(peer: Peer, shape: Shape) -> AsyncIterator[_Load]:
    """Keep `shape.in_flight` completions in flight, warmed up; they are aborted at the end."""
    load, random = _Load(), np.random.default_rng(0)

    async def generate() -> None:
        share = shape.in_flight // _REQUESTS
        ids = random.integers(2, shape.vocabulary, (share, _PROMPT)).tolist()
        prompts = [GeneratePrompt(str(number), row) for number, row in enumerate(ids)]
        request = GenerateRequest(sampling=Sampling(max_tokens=TOKENS), prompts=prompts)
        kind: Any = Generated | GenerateFailed
        async for answer in peer.stream("/distill/v1/generate", request, kind):
            if isinstance(answer, GenerateFailed):
                raise DistillError(f"the replica could not generate: {answer.error}")
            load.tokens += len(unpack(answer.token_ids))

    async def generate_on() -> None:
        while True:
            await generate()

    for _ in range(3):
        await asyncio.gather(*(generate() for _ in range(_REQUESTS)))
    tasks = [asyncio.create_task(generate_on()) for _ in range(_REQUESTS)]
    try:
        yield load
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _windows(
    peer: Peer, shape: Shape, load: _Load, versions: list[Version], replies: list[UpdateReply]
) -> Figures:
    """Windows in turns: quiet, swaps, quiet, …; medians over the turns. Every reply is added to `replies`."""
    quiet = [await _pace(load, asyncio.sleep(shape.window_seconds))]
    lost = []
    for turn in range(TURNS):
        own = versions[turn * shape.swaps : (turn + 1) * shape.swaps]
        began = time.monotonic()
        pace = await _pace(load, _swaps(peer, own, shape.window_seconds, replies))
        seconds = time.monotonic() - began
        quiet.append(await _pace(load, asyncio.sleep(shape.window_seconds)))
        lost.append(cost_of_a_swap(pace, mean(quiet[-2:]), seconds, len(own)))
        log.info("turn %d: a swap costs %.1f ms of engine time", turn, 1e3 * lost[-1])
    return {
        "tokens_per_second": median(quiet),
        "decode_step_seconds": shape.in_flight / median(quiet),
        "engine_seconds_per_swap": median(lost),
        "engine_seconds_by_turn": lost,
    }


def cost_of_a_swap(pace: float, quiet: float, seconds: float, swaps: int) -> float:
    """Engine seconds that each swap took from a window of `seconds`, from its pace and that without swaps."""
    return seconds * (1 - pace / quiet) / swaps


async def _pace(load: _Load, meanwhile: Awaitable[None]) -> float:
    """Tokens a second."""
    before, began = load.tokens, time.monotonic()
    await meanwhile
    return (load.tokens - before) / (time.monotonic() - began)


async def _swaps(peer: Peer, versions: list[Version], seconds: float, replies: list[UpdateReply]) -> None:
    """One update after the other, spread evenly over `seconds` as far as they are fast enough."""
    began = time.monotonic()
    for number, version in enumerate(versions, 1):
        replies.append(await _update(peer, version))
        due = began + seconds * number / len(versions)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _update(peer: Peer, version: Version) -> UpdateReply:
    return await peer.call("/distill/v1/update", UpdateRequest(version=version), UpdateReply, 300.0)


async def _own_reloads(url: str, count: int) -> float | None:
    """Median seconds of vLLM's own in-place reload of the folder it was started with; None: it failed."""
    token = token_from_environment()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=300.0) as client:
        seconds = []
        for _ in range(count):
            began = time.monotonic()
            answer = await client.post("/collective_rpc", json={"method": "reload_weights"})
            if answer.status_code != 200:
                log.warning("vLLM's own reload has no figure: %d %s", answer.status_code, answer.text[:500])
                return None
            seconds.append(time.monotonic() - began)
    return median(seconds)


def _medians(replies: list[UpdateReply]) -> Figures:
    names = ("bytes_read", "stage_seconds", "pause_seconds", "apply_seconds")
    return {"count": len(replies)} | {
        name: median(getattr(reply, name) for reply in replies) for name in names
    }
