"""How fast a teacher scores tokens: our service on either engine, a stock vLLM server, a plain forward pass.

All see the same sequences of one model, in turns, with one thread each and all on the same core, so that
none gains by more processes. A figure is the median of REPEATS turns, in scored positions per second of
processor time over the processes that take part, from token ids to arrays.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

import httpx
import numpy as np
import torch
import typer
from kill_target import CONTROLLER, processor_seconds
from small_config import LEAST
from transformers import AutoModelForCausalLM

from distill.config import RunConfig
from distill.launch.preflight import serving
from distill.launch.roles import Ports, plan_servers
from distill.launch.supervise import ChildSpec
from distill.scoring import ask
from sync import wire
from sync.vllm.plugin import PLUGIN
from sync.wire.peers import Role
from teacher_service.client import TeacherClient
from teacher_service.engines.base import Item
from teacher_service.engines.transformers import PASS_TOKENS, padded_ids, rectangles
from tests.benchmarks.figures import START_SECONDS, Figures, command, listing

ENGINES: Final = ("transformers", "vllm")
QUEUE_TOKENS: Final = 1 << 18
KV_BYTES: Final = 1 << 30
PROMPT_TOKENS, COMPLETION_TOKENS, TOPK = 8, 64, 64
"""Completions vary from half to all of their length."""
ENVIRONMENT: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": PLUGIN}
SEQUENCES, REPEATS = 64, 7
Turn = Callable[[], Awaitable[int]]
"""Score every sequence once; bytes received, 0 where nothing crosses a process."""


def run(
    model: Annotated[str, typer.Argument(help="Folder of the teacher, or its id on the Hub.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of every contender.")] = "float32",
) -> Figures:
    """Measure how fast a teacher scores tokens, against a stock vLLM server and a plain forward pass."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # and what is started from now on
    figures = asyncio.run(timed(model, dtype))
    return {"model": model, "dtype": dtype, "load": os.getloadavg(), "figures": figures}


async def timed(model: str, dtype: str) -> list[Figures]:
    """Speed of every contender."""
    with tempfile.TemporaryDirectory() as folder, Ports() as ports:
        children = [*teachers(model, dtype, folder, ports), stock_server(model, dtype, ports)]
        urls = {child.name: str(child.url) for child in children}
        async with serving(children, Path(folder), START_SECONDS), AsyncExitStack() as stack:
            turns, positions = await contenders(model, dtype, urls, stack)
            received = {name: await turn() for name, turn in turns.items()}  # warms up, too
            used = {name: list[float]() for name in turns}
            for name, turn in [*turns.items()] * REPEATS:
                before = spent(name)
                await turn()
                used[name].append(spent(name) - before)
    rows = list[Figures]()
    for name, seconds in used.items():
        speed = positions / max(median(seconds), 1e-9)
        size = received[name] / positions
        rows.append({"": name, "positions per CPU second": speed, "bytes per position": size})
    return rows


def spent(contender: str) -> float:
    """Seconds of the processor that this process and a contender's server have used so far."""
    taken = processor_seconds(os.getpid())
    return float(sum(taken[who].sum() for who in (CONTROLLER, contender.split()[0]) if who in taken))


def table(report: Figures) -> str:
    title = f"{report['model']} in {report['dtype']}, all on one core"
    return "\n".join([title, "", *listing(report["figures"])])


async def contenders(
    model: str, dtype: str, urls: Mapping[str, str], stack: AsyncExitStack
) -> tuple[dict[str, Turn], int]:
    """What takes turns, and how many positions each scores."""
    turns, rng, items = dict[str, Turn](), np.random.default_rng(0), list[Item]()
    lengths = PROMPT_TOKENS + rng.integers(COMPLETION_TOKENS // 2, COMPLETION_TOKENS + 1, SEQUENCES)
    for engine in ENGINES:
        client = await stack.enter_async_context(TeacherClient(engine, [urls[engine]]))
        vocab = (await client.info()).vocab_size
        k = min(TOPK, vocab)
        items = items or [Item(rng.integers(0, vocab, length, np.int32), PROMPT_TOKENS) for length in lengths]
        wants = {"sampled": wire.Want(), "topk": wire.Want(topk=k), "gather": wire.Want()}
        wants |= {"entropy": wire.Want(entropy=True), "hidden": wire.Want(hidden=True)}
        for name, want in wants.items():
            ids_K = rng.integers(0, vocab, k) if name == "gather" else None
            turns[f"{engine} {name}"] = partial(service, client, items, want, ids_K)
    turns["plain forward"] = plain(model, dtype, items, vocab)
    http = httpx.AsyncClient(base_url=urls["stock"], timeout=600, trust_env=False)
    name = (await (await stack.enter_async_context(http)).get("/v1/models")).json()["data"][0]["id"]
    turns["stock sampled"] = partial(stock, http, name, items, 0)
    turns["stock topk"] = partial(stock, http, name, items, k)
    return turns, sum(item.positions for item in items)


async def service(
    client: TeacherClient, items: Sequence[Item], want: wire.Want, ids_K: np.ndarray | None
) -> int:
    """Our own; `ids_K` to gather at each position."""
    before, sequences = client.counters.received_bytes, list[wire.ScoreSequence]()
    for number, item in enumerate(items):
        gather = None if ids_K is None else wire.pack(np.tile(ids_K, (item.positions, 1)), "i4")
        sequences.append(wire.ScoreSequence(str(number), wire.pack(item.token_ids_L), item.first, gather))
    await ask(client, sequences, partial(client.score, want=want))
    return client.counters.received_bytes - before


def plain(path: str, dtype: str, items: list[Item], vocab: int) -> Turn:
    """The whole model in batches with little padding, full logits, log-softmax, the sampled token's value."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    groups = rectangles([len(item.token_ids_L) for item in items], QUEUE_TOKENS, PASS_TOKENS["cpu"])
    batches = [torch.from_numpy(padded_ids([items[i] for i in rows])) for rows in groups]

    async def score() -> int:
        with torch.inference_mode():
            for ids in batches:
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab]
                logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return score


async def stock(http: httpx.AsyncClient, model: str, items: Sequence[Item], k: int) -> int:
    """vLLM's own route: one request with every prompt, its JSON turned into arrays of what was asked for."""
    body = {"model": model, "max_tokens": 1, "prompt_logprobs": k}
    body["prompt"] = [item.token_ids_L.tolist() for item in items]
    answer = (await http.post("/v1/completions", json=body)).raise_for_status()
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    logprobs, top = list[float](), list[Any]()
    for item, choice in zip(items, choices, strict=True):
        entries = choice["prompt_logprobs"][item.first :]
        for token, entry in zip(item.token_ids_L[item.first :].tolist(), entries, strict=True):
            logprobs.append(entry[str(token)]["logprob"])
            rows = sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items() if e["rank"] <= k)
            top.append([row[1:] for row in rows[:k]])
    np.array(logprobs, np.float32), np.array(top, np.float32)
    return len(answer.content)


def teachers(model: str, dtype: str, folder: str, ports: Ports) -> list[ChildSpec]:
    """Our service, on either engine."""
    shared = {"path": model, "dtype": dtype, "queue_tokens": QUEUE_TOKENS}
    both = {engine: {**shared, "engine": engine} for engine in ENGINES}
    both["vllm"]["engine_args"] = {"kv_cache_memory_bytes": KV_BYTES}
    run = {"name": "bench", "folder": folder, "steps": 1}
    config = RunConfig.model_validate(LEAST | {"run": run, "teachers": both})
    children = plan_servers(config, None, ports, Role.TEACHER).children
    return [replace(child, name=child.name.removeprefix("teacher-"), env=ENVIRONMENT) for child in children]


def stock_server(model: str, dtype: str, ports: Ports) -> ChildSpec:
    """vLLM's API server, unchanged, on a port that is held for it."""
    port = ports.take("127.0.0.1", 0, "stock.port")
    line = [sys.executable, "-P", "-m", "sync.vllm.plugin", "--host", "127.0.0.1", "--port", str(port)]
    line += ["--enforce-eager", f"--kv-cache-memory-bytes={KV_BYTES}", f"--dtype={dtype}", f"--model={model}"]
    line += [f"--max-logprobs={TOPK}", f"--max-model-len={PROMPT_TOKENS + COMPLETION_TOKENS + 1}"]
    return ChildSpec("stock", line, ENVIRONMENT, url=f"http://127.0.0.1:{port}")


if __name__ == "__main__":
    command(run, table)
