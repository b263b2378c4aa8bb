"""How fast a teacher scores tokens: our service on either engine, a stock vLLM server, a plain forward pass.

All see the same sequences of one model, in turns, with one thread each and all on the same core, so that
none gains by more processes. A figure is the median of `repeats` turns, in scored positions per second,
from token ids to arrays: of wall time, and of processor time over the processes that take part, which other
work on the machine disturbs less. Then malformed requests and a flood, which come from the tests of a source
checkout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import fuzz
import httpx
import numpy as np
import psutil
from kill_target import role_processes

from distill.launch.preflight import serving
from distill.launch.roles import Ports
from distill.launch.supervise import ChildSpec
from sync import wire
from sync.vllm.plugin import PLUGIN
from teacher_service.client import TeacherClient
from teacher_service.engines.base import Item
from tests.benchmarks.figures import START_SECONDS, Figures, Work, command, interleaved

QUEUE_TOKENS: Final = 1 << 18
STOCK_SERVER: Final = "sync.vllm.plugin"
"""vLLM's API server, unchanged, on a port that is held for it."""
ENGINE_ARGS: Final = {"kv_cache_memory_bytes": 1 << 30}
VLLM_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": PLUGIN,
}
PROMPT_TOKENS: Final = 8
Turn = Callable[[], int]
"""Score every sequence once; bytes received, 0 where nothing crosses a process."""


class Setting(NamedTuple):
    """What is scored, with one thread each; completions vary from half to all of their length."""

    model: str
    dtype: str = "float32"
    """Of every contender's weights, torch's name for it."""
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
    """Whether engine "vllm" and a stock server take part."""


def run(model: str, dtype: str = "float32", rollouts: int = 64, repeats: int = 7) -> Figures:
    """Figures by contender, their ratios, and what a fuzzer and a flood found.

    Raises DistillError when a server does not come up.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    it = Setting(model, dtype, rollouts, repeats=repeats)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop, Ports() as ports:
        children = [_teacher("transformers", it, Path(folder), ports)]
        if it.vllm:
            children += [_teacher("vllm", it, Path(folder), ports), _stock_server(it, ports)]
        stack = AsyncExitStack()
        try:
            loop.run(stack.enter_async_context(serving(children, Path(folder), START_SECONDS)))
            _pin({min(cores)})
            urls = {child.name: str(child.url) for child in children}
            found = {"setting": it._asdict(), "load": os.getloadavg(), **_speeds(it, loop, stack, urls)}
            return found | loop.run(_attacked(it, urls["transformers"]))
        finally:
            _pin(cores)
            loop.run(stack.aclose())


def _pin(cores: set[int]) -> None:
    """Let every thread of this process and of its descendants run on `cores` alone."""
    own = psutil.Process()
    family = [own, *own.children(recursive=True)]
    for thread in (thread.id for process in family for thread in process.threads()):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def _taking_part(name: str) -> list[psutil.Process]:
    """Processes that a contender needs: this one, and its server with all below it."""
    servers = role_processes(os.getpid()).get(name.split()[0], [])
    return [psutil.Process(), *servers, *(below for one in servers for below in one.children(recursive=True))]


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _speeds(setting: Setting, loop: asyncio.Runner, stack: AsyncExitStack, urls: dict[str, str]) -> Figures:
    turns: dict[str, Turn] = {}
    for engine in (name for name in ("transformers", "vllm") if name in urls):
        client = TeacherClient(engine, [urls[engine]], request_tokens=QUEUE_TOKENS // 2)
        loop.run(stack.enter_async_context(client))
        vocab_size = loop.run(client.info()).vocab_size
        k, items = min(setting.topk, vocab_size), _items(setting, vocab_size)
        turns |= _service(engine, loop, client, items, k, vocab_size)
    turns["plain forward"] = _plain(setting, items, vocab_size)
    if "stock" in urls:
        turns |= _stock(urls["stock"], items, k)
    received = {name: turn() for name, turn in turns.items()}  # warms up, too
    used: dict[str, list[float]] = {name: [] for name in turns}
    part = {name: _taking_part(name) for name in turns}

    def timed(name: str) -> None:
        before = _cpu_seconds(part[name])
        turns[name]()
        used[name].append(_cpu_seconds(part[name]) - before)

    taken = interleaved({name: Work(partial(timed, name)) for name in turns}, setting.repeats)
    positions = sum(item.positions for item in items)
    figures = {
        name: {
            "positions_per_second": positions / median(taken[name]),
            "positions_per_cpu_second": positions / max(median(used[name]), 1e-9),
            "bytes_per_position": received[name] / positions,
        }
        for name in turns
    }
    return {"figures": figures, "ratios": {} if "vllm" not in urls else _ratios(taken, used, k)}


def _ratios(taken: dict[str, list[float]], used: dict[str, list[float]], k: int) -> Figures:
    """Speed of engine "vllm" over another's, the median over rounds, by wall and by processor time."""
    pairs = [("vllm sampled", "plain forward"), ("vllm sampled", "stock sampled")]
    pairs += [(f"vllm topk {k}", "plain forward"), (f"vllm topk {k}", f"stock topk {k}")]
    return {
        f"{ours} / {other}": {
            clock: median(b / max(a, 1e-9) for a, b in zip(of[ours], of[other], strict=True))
            for clock, of in (("wall", taken), ("cpu", used))
        }
        for ours, other in pairs
    }


async def _attacked(setting: Setting, url: str) -> Figures:
    async with TeacherClient("transformers", [url]) as client:
        info = await client.info()
    found = {}
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
        (process,) = role_processes(os.getpid())["transformers"]
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
    engine: str, loop: asyncio.Runner, client: TeacherClient, items: list[Item], k: int, vocab_size: int
) -> dict[str, Turn]:
    def turn(want: wire.Want, gather: int = 0) -> Turn:
        sequences = _sequences(items, gather, vocab_size)

        def score() -> int:
            before = client.counters.received_bytes
            loop.run(client.score(sequences, want))
            return client.counters.received_bytes - before

        return score

    return {
        f"{engine} sampled": turn(wire.Want()),
        f"{engine} topk {k}": turn(wire.Want(topk=k)),
        f"{engine} gather {k}": turn(wire.Want(), k),
        f"{engine} entropy": turn(wire.Want(entropy=True)),
        f"{engine} hidden": turn(wire.Want(hidden=True)),
    }


def _plain(setting: Setting, items: list[Item], vocab_size: int) -> Turn:
    """The whole model in batches with little padding, full logits, log-softmax, the sampled token's value."""
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_service.engines.transformers import PASS_TOKENS, padded_ids, rectangles

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=setting.dtype).eval()
    groups = rectangles([len(item.token_ids_L) for item in items], QUEUE_TOKENS, PASS_TOKENS["cpu"])
    batches = [torch.from_numpy(padded_ids([items[i] for i in rows])) for rows in groups]

    def turn() -> int:
        with torch.inference_mode():
            for ids in batches:
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab_size]
                logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return turn


def _stock(url: str, items: list[Item], k: int) -> dict[str, Turn]:
    """vLLM's own route: one request with every prompt, its JSON turned into arrays of what was asked for."""
    http = httpx.Client(base_url=url, timeout=600, trust_env=False)

    def turn(k: int) -> Turn:
        body = {
            "model": http.get("/v1/models").json()["data"][0]["id"],
            "prompt": [item.token_ids_L.tolist() for item in items],
            "max_tokens": 1,
            "prompt_logprobs": k,
        }

        def score() -> int:
            answer = http.post("/v1/completions", json=body).raise_for_status()
            choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
            _read_tables(items, [choice["prompt_logprobs"] for choice in choices], k)
            return len(answer.content)

        return score

    return {"stock sampled": turn(0), f"stock topk {k}": turn(k)}


def _read_tables(items: list[Item], tables: list[Any], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [C] and the k most likely ids and theirs [C, K, 2], from a dict for each position."""
    logprobs, top = [], []
    for item, table in zip(items, tables, strict=True):
        for token, entry in zip(item.token_ids_L[item.first :].tolist(), table[item.first :], strict=True):
            logprobs.append(entry[str(token)]["logprob"])
            rows = sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items() if e["rank"] <= k)
            top.append([row[1:] for row in rows[:k]])
    return np.array(logprobs, np.float32), np.array(top, np.float32)


# --- servers ----------------------------------------------------------------------------------------------


def _teacher(engine: str, setting: Setting, folder: Path, ports: Ports) -> ChildSpec:
    config = folder / f"{engine}.json"
    fields = {"path": setting.model, "threads": 1, "dtype": setting.dtype, "queue_tokens": QUEUE_TOKENS}
    fields |= {"engine": engine, "engine_args": ENGINE_ARGS if engine == "vllm" else {}}
    config.write_text(json.dumps(fields))
    return _server(engine, ports, "teacher_service", "--config", str(config), "--name", engine)


def _stock_server(setting: Setting, ports: Ports) -> ChildSpec:
    length = PROMPT_TOKENS + setting.completion + 1
    flags = ["--enforce-eager", f"--kv-cache-memory-bytes={ENGINE_ARGS['kv_cache_memory_bytes']}"]
    flags += [f"--dtype={setting.dtype}", f"--model={setting.model}"]
    flags += ["--max-logprobs=64", f"--max-model-len={length}"]
    return _server("stock", ports, STOCK_SERVER, *flags)


def _server(name: str, ports: Ports, *words: str) -> ChildSpec:
    port = ports.take("127.0.0.1", 0, f"{name}.port")
    command = [sys.executable, "-P", "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    env = {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    return ChildSpec(name, command, env, url=f"http://127.0.0.1:{port}")


if __name__ == "__main__":
    command("teacher", run, lambda figures: json.dumps(figures, indent=2))
