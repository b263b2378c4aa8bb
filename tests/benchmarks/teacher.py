"""How fast a teacher scores tokens: our service on either engine, a stock vLLM server, a plain forward pass.

All see the same sequences of one model, in turns, with one thread each and all on the same core, so that
none gains by more processes. A figure is the median of `--repeats` turns, in scored positions per second of
processor time over the processes that take part, from token ids to arrays.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal

import httpx
import numpy as np
import psutil
import torch
import typer
from kill_target import role_processes
from transformers import AutoModelForCausalLM

from distill.launch.preflight import serving
from distill.launch.roles import Ports
from distill.launch.supervise import ChildSpec
from distill.scoring import ask
from sync import wire
from sync.vllm.plugin import PLUGIN
from teacher_service.client import TeacherClient
from teacher_service.engines.base import Item
from teacher_service.engines.transformers import PASS_TOKENS, padded_ids, rectangles
from tests.benchmarks.figures import START_SECONDS, Figures, command, listing

QUEUE_TOKENS: Final = 1 << 18
KV_BYTES: Final = 1 << 30
PROMPT_TOKENS, COMPLETION_TOKENS, TOPK = 8, 64, 64
"""Completions vary from half to all of their length."""
VLLM_ENVIRONMENT: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": PLUGIN}
Turn = Callable[[], int]
"""Score every sequence once; bytes received, 0 where nothing crosses a process."""


def run(
    model: Annotated[str, typer.Argument(help="Folder of the teacher, or its id on the Hub.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of every contender.")] = "float32",
    rollouts: Annotated[int, typer.Option(min=1, help="Sequences of a turn.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 7,
) -> Figures:
    """Measure how fast a teacher scores tokens, against a stock vLLM server and a plain forward pass."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop, Ports() as ports:
        children = [teacher(engine, model, dtype, Path(folder), ports) for engine in ("transformers", "vllm")]
        children.append(stock_server(model, dtype, ports))
        stack = AsyncExitStack()
        try:
            loop.run(stack.enter_async_context(serving(children, Path(folder), START_SECONDS)))
            pin({min(cores)})
            turns, positions = contenders(model, dtype, rollouts, loop, stack, children)
            figures = timed(turns, positions, repeats)
            return {"model": model, "dtype": dtype, "load": os.getloadavg(), "figures": figures}
        finally:
            pin(cores)
            loop.run(stack.aclose())


def pin(cores: set[int]) -> None:
    """Let every thread of this process and of its descendants run on `cores` alone."""
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    for thread in (thread.id for member in family for thread in member.threads()):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def timed(turns: dict[str, Turn], positions: int, repeats: int) -> Figures:
    """Speed of every contender, which takes part with this process and its server's family."""
    received = {name: turn() for name, turn in turns.items()}  # warms up, too
    servers, used = role_processes(os.getpid()), {name: list[float]() for name in turns}

    for name, turn in (pair for _ in range(repeats) for pair in turns.items()):
        own = servers.get(name.split()[0], [])
        family = [psutil.Process(), *own, *(child for server in own for child in server.children(True))]
        before = cpu_seconds(family)
        turn()
        used[name].append(cpu_seconds(family) - before)
    return {
        name: {
            "positions per CPU second": positions / max(median(used[name]), 1e-9),
            "bytes per position": received[name] / positions,
        }
        for name in turns
    }


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """That these have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def table(report: Figures) -> str:
    """Speeds as Markdown."""
    title = f"{report['model']} in {report['dtype']}, all on one core"
    return "\n".join([title, "", *listing([{"": name} | row for name, row in report["figures"].items()])])


# --- contenders -------------------------------------------------------------------------------------------


def contenders(
    model: str,
    dtype: str,
    rollouts: int,
    loop: asyncio.Runner,
    stack: AsyncExitStack,
    children: list[ChildSpec],
) -> tuple[dict[str, Turn], int]:
    """What takes turns, and how many positions each scores."""
    urls, rng = {child.name: str(child.url) for child in children}, np.random.default_rng(0)
    turns, items = dict[str, Turn](), list[Item]()
    for engine in ("transformers", "vllm"):
        client = TeacherClient(engine, [urls[engine]])
        loop.run(stack.enter_async_context(client))
        vocab = loop.run(client.info()).vocab_size
        k = min(TOPK, vocab)
        if not items:
            lengths = PROMPT_TOKENS + rng.integers(COMPLETION_TOKENS // 2, COMPLETION_TOKENS + 1, rollouts)
            ids = [rng.integers(0, vocab, length).astype(np.int32) for length in lengths]
            items = [Item(ids_L, PROMPT_TOKENS) for ids_L in ids]
        turns |= {
            f"{engine} sampled": service(loop, client, items, wire.Want()),
            f"{engine} topk": service(loop, client, items, wire.Want(topk=k)),
            f"{engine} gather": service(loop, client, items, wire.Want(), rng.integers(0, vocab, k)),
            f"{engine} entropy": service(loop, client, items, wire.Want(entropy=True)),
            f"{engine} hidden": service(loop, client, items, wire.Want(hidden=True)),
        }
    turns["plain forward"] = plain(model, dtype, items, vocab)
    turns |= {"stock sampled": stock(urls["stock"], items, 0), "stock topk": stock(urls["stock"], items, k)}
    return turns, sum(item.positions for item in items)


def service(
    loop: asyncio.Runner,
    client: TeacherClient,
    items: list[Item],
    want: wire.Want,
    ids: np.ndarray | None = None,
) -> Turn:
    """Our own; `ids` [K] to gather at each position."""
    gather = [None if ids is None else wire.pack(np.tile(ids, (item.positions, 1)), "i4") for item in items]
    sequences = [
        wire.ScoreSequence(str(i), wire.pack(item.token_ids_L), item.first, gather[i])
        for i, item in enumerate(items)
    ]

    def score() -> int:
        before = client.counters.received_bytes
        loop.run(ask(client, sequences, partial(client.score, want=want)))
        return client.counters.received_bytes - before

    return score


def plain(path: str, dtype: str, items: list[Item], vocab: int) -> Turn:
    """The whole model in batches with little padding, full logits, log-softmax, the sampled token's value."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    groups = rectangles([len(item.token_ids_L) for item in items], QUEUE_TOKENS, PASS_TOKENS["cpu"])
    batches = [torch.from_numpy(padded_ids([items[i] for i in rows])) for rows in groups]

    def score() -> int:
        with torch.inference_mode():
            for ids in batches:
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocab]
                logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).numpy()
        return 0

    return score


def stock(url: str, items: list[Item], k: int) -> Turn:
    """vLLM's own route: one request with every prompt, its JSON turned into arrays of what was asked for."""
    http = httpx.Client(base_url=url, timeout=600, trust_env=False)
    body = {
        "model": http.get("/v1/models").json()["data"][0]["id"],
        "prompt": [item.token_ids_L.tolist() for item in items],
        "max_tokens": 1,
        "prompt_logprobs": k,
    }

    def score() -> int:
        answer = http.post("/v1/completions", json=body).raise_for_status()
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        logprobs, top = list[float](), list[Any]()
        for item, choice in zip(items, choices, strict=True):
            entries = choice["prompt_logprobs"][item.first :]
            for token, entry in zip(item.token_ids_L[item.first :].tolist(), entries, strict=True):
                logprobs.append(entry[str(token)]["logprob"])
                rows = sorted((e["rank"], int(i), e["logprob"]) for i, e in entry.items() if e["rank"] <= k)
                top.append([row[1:] for row in rows[:k]])
        np.array(logprobs, np.float32), np.array(top, np.float32)
        return len(answer.content)

    return score


# --- servers ----------------------------------------------------------------------------------------------


def teacher(engine: str, model: str, dtype: str, folder: Path, ports: Ports) -> ChildSpec:
    """Our service, on either engine."""
    config = folder / f"{engine}.json"
    fields = {"path": model, "threads": 1, "dtype": dtype, "queue_tokens": QUEUE_TOKENS, "engine": engine}
    fields["engine_args"] = {"kv_cache_memory_bytes": KV_BYTES} if engine == "vllm" else {}
    config.write_text(json.dumps(fields))
    return server(engine, ports, "teacher_service", "--config", str(config), "--name", engine)


def stock_server(model: str, dtype: str, ports: Ports) -> ChildSpec:
    """vLLM's API server, unchanged, on a port that is held for it."""
    flags = ["--enforce-eager", f"--kv-cache-memory-bytes={KV_BYTES}", f"--dtype={dtype}", f"--model={model}"]
    flags += [f"--max-logprobs={TOPK}", f"--max-model-len={PROMPT_TOKENS + COMPLETION_TOKENS + 1}"]
    return server("stock", ports, "sync.vllm.plugin", *flags)


def server(name: str, ports: Ports, *words: str) -> ChildSpec:
    """A module with a port of its own."""
    port = ports.take("127.0.0.1", 0, f"{name}.port")
    line = [sys.executable, "-P", "-m", *words, "--host", "127.0.0.1", "--port", str(port)]
    return ChildSpec(name, line, VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, url=f"http://127.0.0.1:{port}")


if __name__ == "__main__":
    command(run, table)
