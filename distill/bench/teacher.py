"""How fast a teacher scores tokens: our service, a stock vLLM server and a plain forward pass in one run.

All see the same sequences of the same model with the same number of threads, in turns; every figure is the
median of `repeats` turns, in scored positions per second of wall time, from token ids to arrays.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from distill.bench.fuzz import Request, flood, fuzz
from distill.bench.process_tree import role_processes
from distill.bench.runner import Figures, Work, interleaved, serving
from distill.launch.roles import Ports
from distill.launch.supervise import ChildSpec
from sync.replica.plugin import PLUGIN
from sync.wire import ScoreRequest, ScoreSequence, TeacherGenerateRequest, TeacherPrompt, Want, pack
from teacher_service.client import TeacherClient
from teacher_service.engines.base import Item, ScoreOptions

QUEUE_TOKENS: Final = 1 << 18
VLLM_FLAGS: Final = (
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--gpu-memory-utilization=0.2",
    "--max-logprobs=64",
)
VLLM_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": PLUGIN,
}
Turn = Callable[[], int]
"""Score every sequence once; bytes received, 0 where nothing crosses a process."""


@dataclass(frozen=True)
class Setting:
    """What is scored; lengths in tokens, completions vary from half to all of theirs."""

    model: str
    rollouts: int = 64
    prompt: int = 8
    completion: int = 64
    topk: int = 64
    threads: int = 1
    dtype: str = "float32"
    repeats: int = 7


def run(
    model: str, *, vllm: bool = True, malformed: int = 10_000, flood_factor: int = 20, **setting: Any
) -> Figures:
    """Figures by contender, and what a fuzzer and a flood found; counts of 0 leave those out.

    `setting`: fields of `Setting`. Raises DistillError when a server does not come up.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    it = Setting(model, **setting)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop, Ports() as ports:
        children = [_teacher(it, Path(folder), ports), *([_vllm(it, ports)] if vllm else [])]
        stack = AsyncExitStack()
        try:
            loop.run(stack.enter_async_context(serving(children, Path(folder))))
            urls = [child.url or "" for child in children]
            client = TeacherClient("bench", urls[:1], request_tokens=QUEUE_TOKENS // 2)
            loop.run(stack.enter_async_context(client))
            return _measure(it, loop, client, urls, malformed, flood_factor)
        finally:
            loop.run(stack.aclose())


def _measure(
    setting: Setting,
    loop: asyncio.Runner,
    client: TeacherClient,
    urls: list[str],
    malformed: int,
    flood_factor: int,
) -> Figures:
    info = loop.run(client.info())
    k, items = min(setting.topk, info.vocab_size), _items(setting, info.vocab_size)
    turns = {"plain forward": _plain(setting, items, info.vocab_size)}
    turns |= _service(loop, client, items, k, info.vocab_size)
    if urls[1:]:
        turns |= _stock(urls[1], setting, items, k, info.vocab_size)
    found: Figures = {"setting": asdict(setting)}
    found["figures"] = _in_turns(turns, sum(item.positions for item in items), setting.repeats)
    if malformed:
        prompt = TeacherPrompt("0", pack(items[0].token_ids_L[: setting.prompt]), 0)
        requests: dict[str, Request] = {
            "malformed": ScoreRequest(sequences=_sequences(items[:2], 2, info.vocab_size), want=Want(topk=2)),
            "malformed_to_write": TeacherGenerateRequest(prompts=[prompt], max_tokens=4),
        }
        for name, good in requests.items():
            report = loop.run(fuzz(urls[0], malformed, good))
            found[name] = asdict(report) | {"clean": report.clean}
    if flood_factor:
        length = min(info.max_length, setting.prompt + setting.completion)
        (process,) = role_processes(os.getpid())["teacher"]
        found["flood"] = asdict(loop.run(flood(urls[0], process.pid, QUEUE_TOKENS, length, flood_factor)))
    return found


def _in_turns(turns: Mapping[str, Turn], positions: int, repeats: int) -> dict[str, Figures]:
    received = {name: turn() for name, turn in turns.items()}  # warms up, too
    found = {}
    for name, taken in interleaved({name: Work(turn) for name, turn in turns.items()}, repeats).items():
        walls = [one.wall for one in taken]
        found[name] = {
            "positions_per_second": positions / median(walls),
            "fastest": positions / min(walls),
            "slowest": positions / max(walls),
            "bytes_per_position": received[name] / positions,
        }
    return found


# --- contenders -------------------------------------------------------------------------------------------


def _items(setting: Setting, vocab_size: int) -> list[Item]:
    rng = np.random.default_rng(0)
    lengths = setting.prompt + rng.integers(setting.completion // 2, setting.completion + 1, setting.rollouts)
    return [Item(rng.integers(0, vocab_size, length).astype(np.int32), setting.prompt) for length in lengths]


def _sequences(items: list[Item], k: int, vocab_size: int) -> list[ScoreSequence]:
    """With k random ids to gather at each position; 0: none."""
    rng = np.random.default_rng(1)
    return [
        ScoreSequence(
            str(i),
            pack(item.token_ids_L),
            item.first,
            pack(rng.integers(0, vocab_size, (item.positions, k)).astype(np.int32)) if k else None,
        )
        for i, item in enumerate(items)
    ]


def _service(
    loop: asyncio.Runner, client: TeacherClient, items: list[Item], k: int, vocab_size: int
) -> dict[str, Turn]:
    def turn(want: Want, gather: int = 0) -> Turn:
        sequences = _sequences(items, gather, vocab_size)

        def score() -> int:
            before = client.counters.received_bytes
            loop.run(client.score(sequences, want))
            return client.counters.received_bytes - before

        return score

    return {
        "service sampled": turn(Want()),
        f"service topk {k}": turn(Want(topk=k)),
        f"service gather {k}": turn(Want(), k),
        "service entropy": turn(Want(entropy=True)),
        "service hidden": turn(Want(hidden=True)),
    }


def _plain(setting: Setting, items: list[Item], vocab_size: int) -> Turn:
    """One padded batch through the whole model, full logits, log-softmax, the sampled token's value."""
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_service.engines.transformers import padded_ids

    torch.set_num_threads(setting.threads)
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.dtype)).eval()
    ids = torch.from_numpy(padded_ids(items))

    def turn() -> int:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab_size]
            logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return turn


def _stock(url: str, setting: Setting, items: list[Item], k: int, vocab_size: int) -> dict[str, Turn]:
    """vLLM's own route, one request with every prompt, its JSON turned into arrays as our engine does it."""
    from teacher_service.config import TeacherConfig
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
    fields = {"path": setting.model, "threads": setting.threads, "dtype": setting.dtype}
    config.write_text(json.dumps(fields | {"queue_tokens": QUEUE_TOKENS}))
    words = ["teacher_service", "--config", str(config), "--name", "bench"]
    return _server("teacher", words, setting, ports, {})


def _vllm(setting: Setting, ports: Ports) -> ChildSpec:
    flags = {"--model": setting.model, "--dtype": setting.dtype}
    flags["--max-model-len"] = str(setting.prompt + setting.completion + 1)
    words = ["vllm.entrypoints.openai.api_server", *VLLM_FLAGS]
    words += [f"{flag}={value}" for flag, value in flags.items()]
    return _server("vllm", words, setting, ports, VLLM_ENVIRONMENT)


def _server(
    name: str, words: list[str], setting: Setting, ports: Ports, environment: Mapping[str, str]
) -> ChildSpec:
    port = ports.take("127.0.0.1", 0, f"{name}.port")
    command = [sys.executable, "-P", "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    env = {**environment, "OMP_NUM_THREADS": str(setting.threads)}
    return ChildSpec(name, command, env, url=f"http://127.0.0.1:{port}")
