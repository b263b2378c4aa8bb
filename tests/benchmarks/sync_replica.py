"""Publish, stage and swap full, delta and adapter versions: through every store, and in vLLM under load.

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
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from distill.cli.verify_engines import RUN, Versions, on_loopback
from distill.config import StudentConfig
from distill.launch.preflight import serving
from distill.launch.roles import Ports
from distill.rollout.replica_client import HttpReplica
from distill.tasks.teaching import make_tokenizer
from student_trainer.config import LoRAConfig
from student_trainer.engine import with_adapters
from sync import wire
from sync.base.address import token_from_environment
from sync.base.errors import ConfigError, DistillError
from sync.base.settings import ReplicaConfig
from sync.weights.snapshots import checkpoint
from sync.weights.stores import Store
from sync.weights.stores.bucket import BucketStore
from sync.weights.stores.object_store import ObjectStore
from sync.weights.stores.store import DirectoryStore
from sync.weights.stores.xet import XetStore
from sync.weights.subscribe import Mirror
from tests.benchmarks import SUPPORT
from tests.benchmarks.figures import START_SECONDS, Figures

CHANGED: Final = 0.01
"""Share of elements that move by one unit in the last place from version to version, as in post-training at a
learning rate of about 1e-6."""
CONTEXT: Final = 256
STORES: Final = ("directory", "xet", "bucket", "s3")
TOKENS, PROMPT_TOKENS = 12, 8
REQUESTS: Final = 8
"""Open at any time; each holds its share of what is in flight."""
TURNS: Final = 4


# --- models and versions ----------------------------------------------------------------------------------


class Shape(NamedTuple):
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


SHAPES: Final = {
    "toy": Shape(96, 2, 256, 29, rank=8, repeats=7, in_flight=256, window_seconds=4, swaps=8),
    "large": Shape(768, 12, 2304, 20480, rank=32, repeats=3, in_flight=16, window_seconds=12, swaps=3),
}
"""The quickstart's student and its load; 101 M parameters."""


def qwen3(vocabulary: int, hidden: int, layers: int, feed_forward: int) -> Any:
    """A Qwen3 in fp32 with random weights, without end token: completions have the requested length."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        intermediate_size=feed_forward,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """Write a model and an adapter over all its linear layers; their folders."""
    torch.manual_seed(0)
    model, adapter = folder / "model", folder / "adapter"
    random = qwen3(shape.vocabulary, shape.hidden, shape.layers, shape.feed_forward)
    random.to(torch.bfloat16).save_pretrained(model)
    make_tokenizer([f"w{i}" for i in range(shape.vocabulary)], "w[0-9]+", "w1", "w0").save_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with_adapters(base, LoRAConfig(rank=shape.rank), 0).save_pretrained(adapter)
    (adapter / "README.md").unlink(missing_ok=True)
    return model, adapter


class MovedVersions(Versions):
    """Of weights of which CHANGED of all elements move from one to the next."""

    def __init__(self, folder: Path, work: Path, store: Store) -> None:
        super().__init__(folder, work, store)
        self._random, self._any = np.random.default_rng(0), False

    def publish_moved(self, kind: str) -> wire.Published:
        """The next version; the first one is the folder's weights."""
        for array in self.arrays.values() if self._any else ():
            moved = self._random.integers(0, array.size, max(1, int(CHANGED * array.size)))
            array[moved] ^= 1
        self._any = True
        return self.publish(kind)


# --- stores -----------------------------------------------------------------------------------------------


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
    command = [sys.executable, "-P", str(SUPPORT / f"{name}.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise ConfigError(f"{name} did not start")
        yield address


def run_stores(shape: Shape, folder: Path) -> list[Figures]:
    """Medians of publishing and staging a version, by store and kind."""
    found: list[Figures] = []
    model, adapter = make(shape, folder)
    plans: tuple[tuple[Path, tuple[str, ...]], ...] = ((model, ("full", "delta")), (adapter, ("lora",)))
    for name in STORES:
        for source, kinds in plans:
            with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-") as scratch:
                work = Path(scratch)
                with opened(name, work) as store, Mirror(work / "mirror", store, RUN) as mirror:
                    versions = MovedVersions(source, work, store)
                    found += [
                        {"store": name, "kind": kind} | _through(kind, versions, mirror, shape.repeats)
                        for kind in kinds
                    ]
    return found


def _through(kind: str, versions: MovedVersions, mirror: Mirror, count: int) -> Figures:
    """Staging reads, decodes and verifies a version, until it can be swapped in."""
    published, stage_seconds = [], []
    for _ in range(count):
        published.append(versions.publish_moved(kind))
        begun = time.monotonic()
        mirror.stage(published[-1].version)
        stage_seconds.append(time.monotonic() - begun)
        mirror.promote(published[-1].version)
    return {
        "bytes": median(one.bytes for one in published),
        "publish_seconds": median(one.seconds for one in published),
        "stage_seconds": median(stage_seconds),
    }


# --- a replica under load ---------------------------------------------------------------------------------


def run_swaps(shape: Shape, folder: Path) -> Figures:
    """Swaps by kind, vLLM's own reload, and a decode step. Raises DistillError when no engine comes up."""
    model, adapter = make(shape, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="replica-") as work:
        found = asyncio.run(weights(shape, model, Path(work) / "weights"))
        found["swaps"]["lora"] = asyncio.run(adapters(shape, model, adapter, Path(work) / "adapters"))
    return found


async def weights(shape: Shape, model: Path, work: Path) -> Figures:
    """Swap full versions, then deltas in windows between quiet ones; then vLLM's own reload, and a copy."""
    versions = _publish(model, work, ["full"] * shape.repeats + ["delta"] * TURNS * shape.swaps)
    lost: list[float] = []
    replies: list[wire.UpdateReply] = []
    async with started(model, work) as replica:
        async with in_flight(replica, shape) as load:
            full = [await _update(replica, versions.pop(0)) for _ in range(shape.repeats)]
            quiet = [await load.pace(asyncio.sleep(shape.window_seconds))]
            for turn in range(TURNS):
                began = time.monotonic()
                swapped = versions[turn * shape.swaps : (turn + 1) * shape.swaps]
                pace = await load.pace(_swaps(replica, swapped, shape.window_seconds, replies))
                seconds = time.monotonic() - began
                quiet.append(await load.pace(asyncio.sleep(shape.window_seconds)))
                lost.append(cost_of_a_swap(pace, mean(quiet[-2:]), seconds, len(swapped)))
        reload_seconds = await _own_reloads(replica.url, shape.repeats)
    return {
        "in_flight": shape.in_flight,
        "swaps": {"full": _medians(full), "delta": _medians(replies)},
        "vllm_reload_seconds": reload_seconds,
        "plain_copy_seconds": plain_copy(model),
        "decode_step_seconds": shape.in_flight / median(quiet),
        "engine_seconds_per_swap": median(lost),
    }


async def adapters(shape: Shape, model: Path, adapter: Path, work: Path) -> Figures:
    """Swap adapters under the same load."""
    versions = _publish(adapter, work, ["lora"] * 2 * shape.repeats)
    async with started(model, work, shape.rank) as replica, in_flight(replica, shape):
        return _medians([await _update(replica, version) for version in versions])


def _publish(folder: Path, work: Path, plan: Sequence[str]) -> list[wire.Version]:
    versions = MovedVersions(folder, work, DirectoryStore(work / "store"))
    return [versions.publish_moved(kind).version for kind in plan]


@contextlib.asynccontextmanager
async def started(model: Path, work: Path, rank: int | None = None) -> AsyncIterator[HttpReplica]:
    """A replica on loopback, with vLLM's development routes."""
    config = StudentConfig(
        path=str(model),
        engine_args={"max-model-len": CONTEXT, "max-num-seqs": 256, "enforce-eager": True},
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    settings = ReplicaConfig(run=RUN, store_path=work / "store", mirror=work / "mirror", lora_rank=rank)
    with Ports() as ports:
        child = on_loopback(config, settings, 0, ports)
        client = HttpReplica(str(child.url), token_from_environment())
        async with serving([child], work / "logs", START_SECONDS), contextlib.aclosing(client) as replica:
            yield replica


class Load:
    """Completions that are generated all the time."""

    def __init__(self, replica: HttpReplica, shape: Shape) -> None:
        self._replica, self._shape, self._random = replica, shape, np.random.default_rng(0)
        self._tokens = 0

    async def pace(self, meanwhile: Awaitable[None]) -> float:
        """Tokens generated per second."""
        before, began = self._tokens, time.monotonic()
        await meanwhile
        return (self._tokens - before) / (time.monotonic() - began)

    async def run(self, requests: int | None = None) -> None:
        """One request after the other; None: without end."""
        size = (self._shape.in_flight // REQUESTS, PROMPT_TOKENS)
        for _ in range(requests) if requests else itertools.count():
            ids = self._random.integers(2, self._shape.vocabulary, size).tolist()
            prompts = [wire.GeneratePrompt(str(number), row) for number, row in enumerate(ids)]
            request = wire.GenerateRequest(sampling=wire.Sampling(max_tokens=TOKENS), prompts=prompts)
            async for answer in self._replica.generate(request):
                if isinstance(answer, wire.GenerateFailed):
                    raise DistillError(f"the replica could not generate: {answer.error}")
                self._tokens += len(wire.unpack(answer.token_ids))


@contextlib.asynccontextmanager
async def in_flight(replica: HttpReplica, shape: Shape) -> AsyncIterator[Load]:
    """Keep `shape.in_flight` completions in flight, warmed up; they are aborted at the end."""
    load = Load(replica, shape)
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


def cost_of_a_swap(pace: float, quiet: float, seconds: float, swaps: int) -> float:
    """Engine seconds that each swap took from a window of `seconds`, from its pace and that without swaps."""
    return seconds * (1 - pace / quiet) / swaps


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


def plain_copy(model: Path) -> float:
    """Median seconds of copying a model's weights within memory, in one thread."""
    weights = [np.array(bits) for bits in checkpoint.bits(checkpoint.tensors(model)).values()]
    copies, seconds = [array.copy() for array in weights], []
    for _ in range(7):
        began = time.monotonic()
        for copy, array in zip(copies, weights, strict=True):
            np.copyto(copy, array)
        seconds.append(time.monotonic() - began)
    return median(seconds)


def _medians(replies: Sequence[wire.UpdateReply]) -> Figures:
    names = ("pause_seconds", "apply_seconds")
    return {name: median(getattr(reply, name) for reply in replies) for name in names}
