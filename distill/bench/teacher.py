"""How fast a teacher marks tokens: our service, a stock vLLM server and a plain forward pass in one run.

All three see the same sequences of the same model with the same number of threads, in turns; every figure is
the median of `repeats` turns, in scored positions per second of wall time, from token ids to arrays.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill.bench.fuzz import Question, flood, fuzz
from sync.replica.plugin import PLUGIN
from sync.transport import Peer
from sync.wire import (
    ScoreRequest,
    ScoreSequence,
    TeacherGenerateRequest,
    TeacherInfo,
    TeacherPrompt,
    Want,
    pack,
)
from teacher_service.client import TeacherClient
from teacher_service.engines.base import Item, ScoreOptions

QUEUE_TOKENS = 1 << 18
VLLM_FLAGS = (
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--gpu-memory-utilization=0.2",
    "--max-logprobs=64",
)
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": PLUGIN,
}

Turn = Callable[[], Awaitable[int]]
"""Mark every sequence once; bytes received, 0 where nothing crosses a process."""


@dataclass(frozen=True)
class Figure:
    """One contender."""

    positions_per_second: float
    """Median."""
    fastest: float
    slowest: float
    bytes_per_position: float


def run(
    model: str,
    *,
    rollouts: int = 64,
    prompt: int = 8,
    completion: int = 64,
    topk: int = 64,
    threads: int = 1,
    dtype: str = "float32",
    repeats: int = 7,
    vllm: bool = True,
    malformed: int = 10_000,
    flood_factor: int = 20,
) -> dict[str, Any]:
    """Figures by contender, and what a fuzzer and a flood found; counts of 0 leave those out.

    `prompt` and `completion` are lengths in tokens; completions vary from half to all of it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    setting = _Setting(model, rollouts, prompt, completion, topk, threads, dtype, repeats)
    with (
        tempfile.TemporaryDirectory() as folder,
        _teacher(setting, Path(folder)) as teacher,
        _vllm(setting, Path(folder), vllm) as server,
    ):
        return asyncio.run(_measure(setting, teacher, server, (malformed, flood_factor)))


@dataclass(frozen=True)
class _Setting:
    model: str
    rollouts: int
    prompt: int
    completion: int
    topk: int
    threads: int
    dtype: str
    repeats: int


async def _measure(
    setting: _Setting, teacher: tuple[str, int], server: str | None, hostile: tuple[int, int]
) -> dict[str, Any]:
    url, pid = teacher
    await _up(url)
    if server is not None:
        await _up(server)
    async with TeacherClient("bench", [url], request_tokens=QUEUE_TOKENS // 2) as client:
        info = await client.info()
        setting_k = min(setting.topk, info.vocab_size)
        items = _items(setting, info)
        contenders: dict[str, Turn] = {"plain forward": _plain(setting, items, info.vocab_size)}
        contenders |= _ours(client, items, setting_k, info.vocab_size)
        with _stock(server, setting, items, setting_k, info.vocab_size) as stock:
            positions = sum(item.positions for item in items)
            figures = await _in_turns(contenders | stock, positions, setting.repeats)
    result: dict[str, Any] = {"setting": asdict(setting)}
    result["figures"] = {name: asdict(figure) for name, figure in figures.items()}
    malformed, factor = hostile
    if malformed:
        marked = ScoreRequest(sequences=_sequences(items[:2], 2, info.vocab_size), want=Want(topk=2))
        prompt = pack(items[0].token_ids_L[: setting.prompt])
        written = TeacherGenerateRequest(prompts=[TeacherPrompt("0", prompt, 0)], max_tokens=4)
        questions: dict[str, Question] = {"malformed": marked, "malformed_to_write": written}
        for name, good in questions.items():
            report = await fuzz(url, malformed, good)
            result[name] = asdict(report) | {"clean": report.clean}
    if factor:
        length = min(info.max_length, setting.prompt + setting.completion)
        result["flood"] = asdict(await flood(url, pid, QUEUE_TOKENS, length, factor))
    return result


async def _in_turns(contenders: dict[str, Turn], positions: int, repeats: int) -> dict[str, Figure]:
    """Every contender once to warm up, then `repeats` rounds in which each has one turn."""
    received = {name: await turn() for name, turn in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, turn in contenders.items():
            started = time.perf_counter()
            await turn()
            seconds[name].append(time.perf_counter() - started)
    return {
        name: Figure(
            positions / statistics.median(times),
            positions / min(times),
            positions / max(times),
            received[name] / positions,
        )
        for name, times in seconds.items()
    }


# --- contenders -------------------------------------------------------------------------------------------


def _items(setting: _Setting, info: TeacherInfo) -> list[Item]:
    rng = np.random.default_rng(0)
    lengths = setting.prompt + rng.integers(setting.completion // 2, setting.completion + 1, setting.rollouts)
    return [
        Item(rng.integers(0, info.vocab_size, length).astype(np.int32), setting.prompt) for length in lengths
    ]


def _sequences(items: list[Item], k: int, vocab_size: int) -> list[ScoreSequence]:
    rng = np.random.default_rng(1)
    gathers = [
        pack(rng.integers(0, vocab_size, (item.positions, k)).astype(np.int32)) if k else None
        for item in items
    ]
    return [
        ScoreSequence(str(i), pack(item.token_ids_L), item.first, gather)
        for i, (item, gather) in enumerate(zip(items, gathers, strict=True))
    ]


def _ours(client: TeacherClient, items: list[Item], k: int, vocab_size: int) -> dict[str, Turn]:
    def turn(want: Want, gather: int = 0) -> Turn:
        sequences = _sequences(items, gather, vocab_size)

        async def ask() -> int:
            before = client.counters.received_bytes
            await client.score(sequences, want)
            return client.counters.received_bytes - before

        return ask

    return {
        "service sampled": turn(Want()),
        f"service topk {k}": turn(Want(topk=k)),
        f"service gather {k}": turn(Want(), k),
        "service entropy": turn(Want(entropy=True)),
        "service hidden": turn(Want(hidden=True)),
    }


def _plain(setting: _Setting, items: list[Item], vocab_size: int) -> Turn:
    """One padded batch through the whole model, full logits, log-softmax, the sampled token's value."""
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_service.engines.transformers import padded_ids

    torch.set_num_threads(setting.threads)
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.dtype)).eval()
    ids = torch.from_numpy(padded_ids(items, max(len(item.token_ids_L) for item in items)))

    async def turn() -> int:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab_size]
            logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return turn


@contextmanager
def _stock(
    url: str | None, setting: _Setting, items: list[Item], k: int, vocab_size: int
) -> Iterator[dict[str, Turn]]:
    """vLLM's own route, one request with every prompt, its JSON turned into arrays as our engine does it."""
    if url is None:
        yield {}
        return
    from teacher_service.config import TeacherConfig
    from teacher_service.engines.vllm import VllmServer

    engine = VllmServer(TeacherConfig(path=setting.model, engine="vllm", engine_url=url), vocab_size)

    def turn(options: ScoreOptions) -> Turn:
        async def ask() -> int:
            before = engine.received_bytes
            await asyncio.to_thread(engine.score, items, options)
            return engine.received_bytes - before

        return ask

    try:
        yield {"vLLM sampled": turn(ScoreOptions()), f"vLLM topk {k}": turn(ScoreOptions(topk=k))}
    finally:
        engine.close()


# --- processes --------------------------------------------------------------------------------------------


@contextmanager
def _teacher(setting: _Setting, folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of our service."""
    config, port = folder / "teacher.json", _free_port()
    fields = {"path": setting.model, "threads": setting.threads, "dtype": setting.dtype}
    config.write_text(json.dumps(fields | {"queue_tokens": QUEUE_TOKENS}))
    arguments = ["teacher_service", "--config", str(config), "--name", "bench", "--port", str(port)]
    with _process(folder / "teacher.log", arguments, setting.threads, {}) as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextmanager
def _vllm(setting: _Setting, folder: Path, wanted: bool) -> Iterator[str | None]:
    """URL of a stock vLLM server; None when it is not wanted."""
    if not wanted:
        yield None
        return
    port, length = _free_port(), setting.prompt + setting.completion + 1
    flags = {"--model": setting.model, "--dtype": setting.dtype, "--port": port, "--max-model-len": length}
    arguments = ["vllm.entrypoints.openai.api_server", *VLLM_FLAGS]
    arguments += [f"{flag}={value}" for flag, value in flags.items()]
    with _process(folder / "vllm.log", arguments, setting.threads, VLLM_ENVIRONMENT):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _process(log: Path, arguments: list[str], threads: int, environment: dict[str, str]) -> Iterator[int]:
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=os.environ | environment | {"OMP_NUM_THREADS": str(threads)},
            stdout=file,
            stderr=file,
        )
    try:
        yield child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _up(url: str, seconds: float = 180.0) -> None:
    async with Peer(url) as peer:
        for _ in range(int(seconds * 10)):
            if await peer.alive():
                return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} did not come up in {seconds:.0f} s")
