"""A weight sync in parts, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of the delta of one optimizer step
    transports  publish and stage through every store
    swaps       pause, apply and lost engine time of a real replica

Of the quickstart's student, and with `--full` of a model of 101 M parameters. What a run loses to them
are `sync` in its summary.json and `perf/publish_seconds` in its metrics.

Servers of stores run on loopback, each in a process of its own.

In the replica, completions of TOKENS tokens are in flight all the time, as in the quickstart. Windows with
and without swaps take turns; what is generated less in those with swaps, over their number, is the engine
time that one swap costs: pause, prefilling again what was in flight, and staging on the side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Final, NamedTuple

import httpx
import numpy as np
import torch
import typer
from published import Moving
from tiny_models import language_model, save_adapter, save_words

from distill.config import StudentConfig
from distill.launch import replica_command
from distill.launch.preflight import serving
from distill.launch.roles import Ports
from distill.launch.supervise import ChildSpec
from distill.rollout.replica_client import HttpReplica
from sync import wire
from sync.base.address import token_from_environment
from sync.base.errors import ConfigError, DistillError
from sync.base.settings import ReplicaConfig
from sync.weights.delta import codec
from sync.weights.delta.codec import Effort
from sync.weights.stores import Store
from sync.weights.stores.bucket import BucketStore
from sync.weights.stores.object_store import ObjectStore
from sync.weights.stores.store import DirectoryStore
from sync.weights.stores.xet import XetStore
from sync.weights.subscribe import Mirror
from tests.benchmarks import SUPPORT
from tests.benchmarks.figures import (
    START_SECONDS,
    Figures,
    Folder,
    TrialCache,
    chosen,
    command,
    interleaved,
    listing,
)

CHANGED: Final = 0.01
"""Share of elements that move by one unit in the last place from version to version, as in post-training at a
learning rate of about 1e-6."""
CONTEXT: Final = 256
STORES: Final = ("directory", "xet", "bucket", "s3")
TOKENS, PROMPT_TOKENS = 12, 8
REQUESTS: Final = 8
"""Open at any time; each holds its share of what is in flight."""
TURNS: Final = 4
RATES: Final = (1e-6, 3e-6, 1e-5, 5e-5)
ROUNDS: Final = 5
EFFORTS: Final[tuple[Effort, ...]] = ("fast", "small")


class Size(NamedTuple):
    """A Qwen3 in bf16 with random weights, and the load on its engine."""

    hidden: int
    layers: int
    feed_forward: int
    vocabulary: int
    rank: int
    """Of its adapters."""
    repeats: int
    """Versions of each kind; medians are taken."""
    in_flight: int
    """Completions that the engine works on at any time."""
    window_seconds: float
    swaps: int
    """In a window that has some."""
    elements: int
    """Of the tensor that the codec is tried on."""


SIZES: Final = {
    "toy": Size(96, 2, 256, 29, 8, 7, 256, 4, 8, 16 << 20),
    "large": Size(768, 12, 2304, 20480, 32, 3, 16, 12, 3, 64 << 20),
}
"""The quickstart's student and its load; 101 M parameters."""


# --- codec --------------------------------------------------------------------------------------------------


def run_codec(size: Size, _: Path) -> Figures:
    """Bytes and speeds on one tensor before and after a step, at several learning rates.

    A step of Adam moves every weight by about the learning rate; of fp32 masters rounded to bf16 those change
    that lie so near to a boundary.
    """
    random = np.random.default_rng(0)
    masters = random.standard_normal(size.elements, np.float32) * 0.02
    signs = random.choice(np.array([-1, 1], np.float32), masters.shape)
    return {"rows": [codec_row(rate, bits(masters), bits(masters + rate * signs)) for rate in RATES]}


def bits(masters: np.ndarray) -> np.ndarray:
    """uint16: rounded to bf16."""
    return torch.from_numpy(masters).bfloat16().view(torch.uint16).numpy()


def codec_row(rate: float, old: np.ndarray, new: np.ndarray) -> Figures:
    """Bytes per parameter; GB/s of dense weights by processor time."""
    sizes: Figures = {}
    works: dict[str, Any] = {"compare": partial(np.not_equal, old, new, out=np.ones(old.shape, bool))}
    for effort in EFFORTS:
        encode = partial(codec.encode, old, new, "bf16", effort)
        blob, target = encode(), old.copy()
        codec.apply(target, blob, "bf16")
        assert np.array_equal(target, new)
        sizes[f"{effort}: bytes per parameter"] = len(blob) / old.size
        works[f"{effort}: encode"] = encode
        copies = iter([old.copy() for _ in range(ROUNDS)])
        works[f"{effort}: decode"] = lambda copies=copies, blob=blob: codec.apply(next(copies), blob, "bf16")
    seconds = interleaved(works, ROUNDS, time.process_time)
    speeds = {f"{name}, GB/s": old.nbytes / median(taken) / 1e9 for name, taken in seconds.items()}
    return {"lr": rate, "changed": float((old != new).mean())} | sizes | speeds


# --- transports: versions through every store ---------------------------------------------------------------


def make(size: Size, folder: Path) -> tuple[Path, Path]:
    """Write a model and an adapter over all its linear layers; their folders."""
    model, adapter = folder / "model", folder / "adapter"
    width = {"hidden_size": size.hidden, "intermediate_size": size.feed_forward}
    width["num_hidden_layers"] = size.layers
    heads = {"num_attention_heads": size.hidden // 32, "num_key_value_heads": size.hidden // 64}
    more = {"vocab_size": size.vocabulary, "max_position_embeddings": CONTEXT, "initializer_range": 0.02}
    random = language_model("Qwen3", **width, **heads, **more, tie_word_embeddings=True, eos_token_id=None)
    random.to(torch.bfloat16).save_pretrained(model)  # completions have the requested length
    save_words(model, (f"w{i}" for i in range(size.vocabulary)), eos_token="w1", pad_token="w0")
    save_adapter(model, adapter, 0, size.rank)
    (adapter / "README.md").unlink(missing_ok=True)
    return model, adapter


def publish_moved(versions: Moving, kind: str, random: np.random.Generator) -> wire.Published:
    """The next version, of whose elements CHANGED have moved by one unit in the last place."""
    for array in versions.arrays.values():
        array[random.integers(0, array.size, max(1, int(CHANGED * array.size)))] ^= 1
    return versions.publish(kind)


@contextlib.contextmanager
def opened(name: str, work: Path) -> Iterator[Store]:
    """An empty store; `work` is its own. Raises ConfigError when its server does not start."""
    if name == "directory":
        yield DirectoryStore(work / "store")
    elif name == "xet":
        yield XetStore(work / "store")
    elif name == "bucket":
        with _server("bucket_server") as address:
            yield BucketStore("bench/weights", work.name, endpoint=address, token="none")
    else:
        with _server("s3_server") as address:
            options = {"endpoint": address, "region": "us-east-1"}
            options |= {"access_key_id": "key", "secret_access_key": "secret"}
            yield ObjectStore(f"s3://bucket/{work.name}", options)


@contextlib.contextmanager
def _server(name: str) -> Iterator[str]:
    """Address of a server among the tests, which prints it and ends with its standard input."""
    line = [sys.executable, str(SUPPORT / f"{name}.py")]  # it imports its neighbours
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().strip()
        if not address:
            raise ConfigError(f"{name} did not start")
        yield address


def run_stores(size: Size, folder: Path) -> Figures:
    """Medians of publishing and staging a version, by store and kind; staging decodes and verifies."""
    rows: list[Figures] = []
    model, adapter = make(size, folder)
    plans: tuple[tuple[Path, tuple[str, ...]], ...] = ((model, ("full", "delta")), (adapter, ("lora",)))
    for name, (source, kinds) in itertools.product(STORES, plans):
        work = Path(tempfile.mkdtemp(dir=folder, prefix=f"{name}-"))
        with opened(name, work) as store, Mirror(work / "mirror", store, "tests") as mirror:
            versions, random = Moving(source, work, store), np.random.default_rng(0)
            for kind in kinds:
                published, stage_seconds = [], []
                for _ in range(size.repeats):
                    published.append(publish_moved(versions, kind, random))
                    began = time.monotonic()
                    mirror.stage(published[-1].version)
                    stage_seconds.append(time.monotonic() - began)
                    mirror.promote(published[-1].version)
                row = {"store": name, "kind": kind, "bytes": median(version.bytes for version in published)}
                row["publish, ms"] = 1e3 * median(version.seconds for version in published)
                rows.append(row | {"stage, ms": 1e3 * median(stage_seconds)})
    return {"rows": rows}


# --- swaps: a replica under load ----------------------------------------------------------------------------


def run_swaps(size: Size, folder: Path) -> Figures:
    """Swaps by kind, vLLM's own reload, and a decode step. Raises DistillError when no engine comes up."""
    model, _ = make(size, folder)
    return asyncio.run(swapped(size, model, Path(tempfile.mkdtemp(dir=folder, prefix="swaps-"))))


async def swapped(size: Size, model: Path, work: Path) -> Figures:
    """Swap full versions, then deltas in windows between quiet ones; then vLLM's own reload."""
    publisher, random = Moving(model, work, DirectoryStore(work / "store")), np.random.default_rng(0)
    plan = ["full"] * size.repeats + ["delta"] * TURNS * size.swaps
    versions = [publish_moved(publisher, kind, random).version for kind in plan]
    lost: list[float] = []
    replies: list[wire.UpdateReply] = []
    async with started(model, work) as replica:
        async with in_flight(replica, size) as load:
            full = [await _update(replica, versions.pop(0)) for _ in range(size.repeats)]
            quiet = [await load.pace(asyncio.sleep(size.window_seconds))]
            for turn in range(TURNS):
                began = time.monotonic()
                due = versions[turn * size.swaps : (turn + 1) * size.swaps]
                pace = await load.pace(_swaps(replica, due, size.window_seconds, replies))
                seconds = time.monotonic() - began
                quiet.append(await load.pace(asyncio.sleep(size.window_seconds)))
                lost.append(seconds * (1 - pace / mean(quiet[-2:])) / len(due))
        reload_seconds = await _own_reloads(replica.url, size.repeats)
    row = {"in flight": size.in_flight, "decode step, ms": 1e3 * size.in_flight / median(quiet)}
    for kind, answers in (("full", full), ("delta", replies)):
        row[f"{kind}: pause, ms"] = 1e3 * median(answer.pause_seconds for answer in answers)
        row[f"{kind}: loading, ms"] = 1e3 * median(answer.apply_seconds for answer in answers)
    row |= {"engine's time for a delta, ms": 1e3 * median(lost), "vLLM's reload, ms": 1e3 * reload_seconds}
    return {"rows": [row]}


@contextlib.asynccontextmanager
async def started(model: Path, work: Path) -> AsyncIterator[HttpReplica]:
    """A replica on loopback, with vLLM's development routes."""
    config = StudentConfig(
        path=str(model),
        engine_args={"max-model-len": CONTEXT, "max-num-seqs": 256, "enforce-eager": True},
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    settings = ReplicaConfig(run="tests", store_path=work / "store", mirror=work / "mirror")
    with Ports() as ports:
        port = ports.take("127.0.0.1", 0, "student.port")
        line, environment = replica_command.command(config, settings, 0, "127.0.0.1", port)
        child = ChildSpec("student-0", line, environment, url=f"http://127.0.0.1:{port}")
        client = HttpReplica(str(child.url), token_from_environment())
        async with serving([child], work / "logs", START_SECONDS), contextlib.aclosing(client) as replica:
            yield replica


class Load:
    """Completions that are generated all the time."""

    def __init__(self, replica: HttpReplica, size: Size) -> None:
        self._replica, self._size, self._random = replica, size, np.random.default_rng(0)
        self._tokens = 0

    async def pace(self, meanwhile: Awaitable[None]) -> float:
        """Tokens generated per second."""
        before, began = self._tokens, time.monotonic()
        await meanwhile
        return (self._tokens - before) / (time.monotonic() - began)

    async def run(self, requests: int | None = None) -> None:
        """One request after the other; None: without end."""
        shape = (self._size.in_flight // REQUESTS, PROMPT_TOKENS)
        for _ in range(requests) if requests else itertools.count():
            ids = self._random.integers(2, self._size.vocabulary, shape).tolist()
            prompts = [wire.GeneratePrompt(str(number), row) for number, row in enumerate(ids)]
            request = wire.GenerateRequest(sampling=wire.Sampling(max_tokens=TOKENS), prompts=prompts)
            async for answer in self._replica.generate(request):
                if isinstance(answer, wire.GenerateFailed):
                    raise DistillError(f"the replica could not generate: {answer.error}")
                self._tokens += len(wire.unpack(answer.token_ids))


@contextlib.asynccontextmanager
async def in_flight(replica: HttpReplica, size: Size) -> AsyncIterator[Load]:
    """Keep `size.in_flight` completions in flight, warmed up; they are aborted at the end."""
    load = Load(replica, size)
    await asyncio.gather(*(load.run(3) for _ in range(REQUESTS)))
    tasks = [asyncio.create_task(load.run()) for _ in range(REQUESTS)]
    yield load
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, DistillError):
            raise error


async def _swaps(
    replica: HttpReplica, versions: Sequence[wire.Version], seconds: float, replies: list[wire.UpdateReply]
) -> None:
    """One update after the other, spread evenly over `seconds` as far as they are fast enough."""
    began = time.monotonic()
    for number, version in enumerate(versions, 1):
        replies.append(await _update(replica, version))
        due = began + seconds * number / len(versions)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _update(replica: HttpReplica, version: wire.Version) -> wire.UpdateReply:
    return await replica.update(wire.UpdateRequest(version=version), 300.0)


async def _own_reloads(url: str, count: int) -> float:
    """Median seconds of vLLM's own in-place reload of the folder it was started with."""
    token = token_from_environment()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=300.0) as client:
        seconds = []
        for _ in range(count):
            began = time.monotonic()
            (await client.post("/collective_rpc", json={"method": "reload_weights"})).raise_for_status()
            seconds.append(time.monotonic() - began)
    return median(seconds)


# --- the command ------------------------------------------------------------------------------------------


PARTS: Final[dict[str, Callable[[Size, Path], Figures]]] = {
    "codec": run_codec,
    "transports": run_stores,
    "swaps": run_swaps,
}


def run(
    folder: Folder = Path("runs/bench-sync"),
    full: Annotated[bool, typer.Option("--full", help="At 101 M parameters too.")] = False,
    parts: Annotated[str, typer.Option(help="Parts, with commas.")] = ",".join(PARTS),
) -> dict[str, Figures]:
    """Measure a weight sync in parts: codec, transports, swaps."""
    cache, names, figures = TrialCache(folder), chosen("--parts", parts, PARTS), {}
    for size in SIZES if full else ("toy",):
        figures[size] = {
            name: cache.get({"size": size, "part": name}, partial(PARTS[name], SIZES[size], cache.folder))
            for name in names
        }
    return figures


def table(figures: Mapping[str, Figures]) -> str:
    """Everything that was measured, one section per part and size."""
    lines: list[str] = []
    for size, parts in figures.items():
        for name, part in parts.items():
            lines += [f"### {name}, {size}", "", *listing(part["rows"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    command(run, table)
