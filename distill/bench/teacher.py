"""How fast a teacher scores tokens: our service, a stock vLLM server and a plain forward pass in one run.

All see the same sequences of the same model with the same number of threads, in turns; every figure is the
median of `repeats` turns, in scored positions per second of wall time, from token ids to arrays. Then
malformed requests and a flood, which come from the tests of a source checkout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from distill.bench.kill_target import role_processes
from distill.bench.runner import Figures, Work, interleaved, of_tests, serving
from distill.launch.roles import Ports
from distill.launch.supervise import ChildSpec
from sync import wire
from sync.replica.plugin import PLUGIN
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import Item, ScoreOptions

QUEUE_TOKENS: Final = 1 << 18
VLLM_FLAGS: Final = (
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--gpu-memory-utilization=0.2",
    "--max-logprobs=64",
    "--dtype=float32",
)
VLLM_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": PLUGIN,
}
PROMPT_TOKENS: Final = 8
Turn = Callable[[], int]
"""Score every sequence once; bytes received, 0 where nothing crosses a process."""


class Setting(NamedTuple):
    """What is scored, in fp32 with one thread each; completions vary from half to all of their length."""

    model: str
    rollouts: int = 64
    completion: int = 64
    """Tokens."""
    topk: int = 64
    repeats: int = 7
    malformed: int = 10_000
    """Requests to each route."""
    flood_factor: int = 20
    """Times the bound of the queue; 0: no flood."""
    vllm: bool = True
    """Whether there is a stock server to compare with."""


def run(model: str, **setting: Any) -> Figures:
    """Figures by contender, and what a fuzzer and a flood found.

    `setting`: fields of `Setting`. Raises DistillError when a server does not come up.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    it = Setting(model, **setting)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop, Ports() as ports:
        children = [_teacher(it, Path(folder), ports), *([_vllm(it, ports)] if it.vllm else [])]
        stack = AsyncExitStack()
        try:
            loop.run(stack.enter_async_context(serving(children, Path(folder))))
            urls = [child.url or "" for child in children]
            client = TeacherClient("bench", urls[:1], request_tokens=QUEUE_TOKENS // 2)
            loop.run(stack.enter_async_context(client))
            found = {"setting": it._asdict(), "figures": _speeds(it, loop, client, urls)}
            return found | loop.run(_attacked(it, client, urls[0]))
        finally:
            loop.run(stack.aclose())


def _speeds(setting: Setting, loop: asyncio.Runner, client: TeacherClient, urls: list[str]) -> Figures:
    vocab_size = loop.run(client.info()).vocab_size
    k, items = min(setting.topk, vocab_size), _items(setting, vocab_size)
    turns = {"plain forward": _plain(setting, items, vocab_size)}
    turns |= _service(loop, client, items, k, vocab_size)
    if urls[1:]:
        turns |= _stock(urls[1], setting, items, k, vocab_size)
    positions = sum(item.positions for item in items)
    received = {name: turn() for name, turn in turns.items()}  # warms up, too
    taken = interleaved({name: Work(turn) for name, turn in turns.items()}, setting.repeats)
    return {
        name: {
            "positions_per_second": positions / median(seconds),
            "bytes_per_position": received[name] / positions,
        }
        for name, seconds in taken.items()
    }


async def _attacked(setting: Setting, client: TeacherClient, url: str) -> Figures:
    fuzz, info, found = of_tests("fuzz"), await client.info(), {}
    item = _items(setting, info.vocab_size)[0]
    prompt = wire.TeacherPrompt("0", wire.pack(item.token_ids_L[:PROMPT_TOKENS]), 0)
    good = {
        "malformed": wire.ScoreRequest(
            sequences=_sequences([item, item], 2, info.vocab_size), want=wire.Want(topk=2)
        ),
        "malformed_to_write": wire.TeacherGenerateRequest(prompts=[prompt], max_tokens=4),
    }
    for name, request in good.items():
        report = await fuzz.fuzz(url, setting.malformed, request)
        found[name] = asdict(report) | {"clean": report.clean}
    if setting.flood_factor:
        length = min(info.max_length, PROMPT_TOKENS + setting.completion)
        (process,) = role_processes(os.getpid())["teacher"]
        report = await fuzz.flood(url, process.pid, QUEUE_TOKENS, length, setting.flood_factor)
        found["flood"] = asdict(report)
    return found


# --- contenders -------------------------------------------------------------------------------------------


def _items(setting: Setting, vocab_size: int) -> list[Item]:
    rng = np.random.default_rng(0)
    lengths = PROMPT_TOKENS + rng.integers(setting.completion // 2, setting.completion + 1, setting.rollouts)
    return [Item(rng.integers(0, vocab_size, length).astype(np.int32), PROMPT_TOKENS) for length in lengths]


def _sequences(items: list[Item], k: int, vocab_size: int) -> list[wire.ScoreSequence]:
    """With k random ids to gather at each position; 0: none."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, vocab_size, (item.positions, k)).astype(np.int32) for item in items]
    return [
        wire.ScoreSequence(str(i), wire.pack(item.token_ids_L), item.first, wire.pack(ids[i]) if k else None)
        for i, item in enumerate(items)
    ]


def _service(
    loop: asyncio.Runner, client: TeacherClient, items: list[Item], k: int, vocab_size: int
) -> dict[str, Turn]:
    def turn(want: wire.Want, gather: int = 0) -> Turn:
        sequences = _sequences(items, gather, vocab_size)

        def score() -> int:
            before = client.counters.received_bytes
            loop.run(client.score(sequences, want))
            return client.counters.received_bytes - before

        return score

    return {
        "service sampled": turn(wire.Want()),
        f"service topk {k}": turn(wire.Want(topk=k)),
        f"service gather {k}": turn(wire.Want(), k),
        "service entropy": turn(wire.Want(entropy=True)),
        "service hidden": turn(wire.Want(hidden=True)),
    }


def _plain(setting: Setting, items: list[Item], vocab_size: int) -> Turn:
    """One padded batch through the whole model, full logits, log-softmax, the sampled token's value."""
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_service.engines.transformers import padded_ids

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32).eval()
    ids = torch.from_numpy(padded_ids(items))

    def turn() -> int:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab_size]
            logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return turn


def _stock(url: str, setting: Setting, items: list[Item], k: int, vocab_size: int) -> dict[str, Turn]:
    """vLLM's own route, one request with every prompt, its JSON turned into arrays as our engine does it."""
    from teacher_service.engines.vllm import VllmServer

    engine = VllmServer(TeacherConfig(path=setting.model, engine="vllm", engine_url=url), vocab_size)

    def turn(options: ScoreOptions) -> Turn:
        def score() -> int:
            before = engine.received_bytes
            engine.score(items, options)
            return engine.received_bytes - before

        return score

    return {"vLLM sampled": turn(ScoreOptions()), f"vLLM topk {k}": turn(ScoreOptions(topk=k))}


# --- servers ----------------------------------------------------------------------------------------------


def _teacher(setting: Setting, folder: Path, ports: Ports) -> ChildSpec:
    config = folder / "teacher.json"
    fields = {"path": setting.model, "threads": 1, "dtype": "float32", "queue_tokens": QUEUE_TOKENS}
    config.write_text(json.dumps(fields))
    return _server("teacher", ports, {}, "teacher_service", "--config", str(config), "--name", "bench")


def _vllm(setting: Setting, ports: Ports) -> ChildSpec:
    length = PROMPT_TOKENS + setting.completion + 1
    words = [*VLLM_FLAGS, f"--model={setting.model}", f"--max-model-len={length}"]
    return _server("vllm", ports, VLLM_ENVIRONMENT, "vllm.entrypoints.openai.api_server", *words)


def _server(name: str, ports: Ports, environment: dict[str, str], *words: str) -> ChildSpec:
    port = ports.take("127.0.0.1", 0, f"{name}.port")
    command = [sys.executable, "-P", "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    env = {**environment, "OMP_NUM_THREADS": "1"}
    return ChildSpec(name, command, env, url=f"http://127.0.0.1:{port}")
