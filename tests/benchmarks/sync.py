"""A weight sync in parts, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of the delta of one optimizer step
    transports  publish and stage through every store; their servers are processes on loopback
    swaps       pause, loading and lost engine time of a real replica

Of the quickstart's student, and with `--full` of a model of 101 M parameters. In the replica completions are
in flight all the time, as in the quickstart. Windows with and without swaps take turns; what is generated
less in those with swaps, over their number, is the engine time that one swap costs: pause, prefilling again
what was in flight, and staging on the side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from subprocess import PIPE, Popen
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
import typer
from published import Moving
from tiny_models import language_model, save_adapter, save_words

from distill.aio import cancel
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
from sync.weights.stores import Store
from sync.weights.stores.bucket import BucketStore
from sync.weights.stores.object_store import ObjectStore
from sync.weights.stores.store import DirectoryStore
from sync.weights.stores.xet import XetStore
from sync.weights.subscribe import Mirror
from sync.wire.client import BlockingPeer
from tests.benchmarks import SUPPORT
from tests.benchmarks.figures import START_SECONDS, Figures, Folder, TrialCache, command, interleaved, listing

CHANGED: Final = 0.01
"""Share of elements that move by one unit in the last place from version to version, as in post-training at a
learning rate of about 1e-6."""
CONTEXT: Final = 256
LOCAL: Final[dict[str, Callable[[Path], Store]]] = {"directory": DirectoryStore, "xet": XetStore}
STORES: Final = (*LOCAL, "bucket", "s3")
TOKENS, PROMPT_TOKENS = 12, 8
REQUESTS: Final = 8  # open at any time; each holds its share of what is in flight
TURNS, ROUNDS = 4, 5
ELEMENTS: Final = 64 << 20  # of the tensor that the codec is tried on
RATES: Final = (1e-6, 3e-6, 1e-5, 5e-5)
SERVER: Final = """import sys
from {}_server import serve
with serve() as served:
    print(getattr(served, "base", served), flush=True)
    sys.stdin.read()"""


class Size(NamedTuple):
    """A model, and the load on its engine."""

    model: dict[str, int]  # fields of a Qwen3's configuration; random weights in bf16
    rank: int  # of its adapters
    in_flight: int  # completions that the engine works on at any time
    window_seconds: float
    swaps: int  # in a window that has some


def qwen3(width: int, layers: int, feed_forward: int, vocabulary: int) -> dict[str, int]:
    """With heads of 32."""
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    size = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": feed_forward}
    return heads | size | {"vocab_size": vocabulary, "max_position_embeddings": CONTEXT}


SIZES: Final = {
    "toy": Size(qwen3(96, 2, 256, 29), 8, 256, 4, 8),
    "large": Size(qwen3(768, 12, 2304, 20480), 32, 16, 12, 3),
}
"""The quickstart's student and its load; 101 M parameters."""


def run_codec(*_: Any) -> Figures:
    """Bytes and speeds on one tensor before and after a step, at several learning rates.

    A step of Adam moves every weight by about the learning rate; of fp32 masters rounded to bf16 those change
    that lie so near to a boundary.
    """
    random = np.random.default_rng(0)
    masters = random.standard_normal(ELEMENTS, np.float32) * 0.02
    signs = random.choice(np.array([-1, 1], np.float32), masters.shape)
    return {"rows": [codec_row(rate, masters, masters + rate * signs) for rate in RATES]}


def codec_row(rate: float, *masters: np.ndarray) -> Figures:
    """Bytes per parameter; GB/s of dense weights by processor time."""
    old, new = (torch.from_numpy(values).bfloat16().view(torch.uint16).numpy() for values in masters)
    sizes: Figures = {}
    works: dict[str, Any] = {"compare": partial(np.not_equal, old, new, out=np.ones(old.shape, bool))}
    for effort in ("fast", "small"):
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


def make(size: Size, folder: Path) -> tuple[Path, Path]:
    """Write a model and an adapter over all its linear layers; their folders."""
    model, adapter = folder / "model", folder / "adapter"
    more = {"initializer_range": 0.02, "tie_word_embeddings": True}
    random = language_model("Qwen3", **size.model, **more, eos_token_id=None)  # lengths are as requested
    random.to(torch.bfloat16).save_pretrained(model)
    save_words(model, (f"w{i}" for i in range(size.model["vocab_size"])), eos_token="w1", pad_token="w0")
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
    if name in LOCAL:
        yield LOCAL[name](work / "store")
        return
    line = [sys.executable, "-c", SERVER.format(name)]
    with Popen(line, stdin=PIPE, stdout=PIPE, text=True, cwd=SUPPORT) as server:
        if not (url := server.stdout.readline().strip()):
            raise ConfigError(f"{name}_server did not start")
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
        if name == "bucket":
            yield BucketStore("bench/weights", work.name, endpoint=url, token="none")
        else:
            yield ObjectStore(f"s3://bucket/{work.name}", {"endpoint": url, **keys})


def run_stores(size: Size, folder: Path) -> Figures:
    """Medians of publishing and staging a version, by store and kind; staging decodes and verifies."""
    model, adapter = make(size, folder)
    plans, rows = ((model, ("full", "delta")), (adapter, ("lora",))), list[Figures]()
    for name, (source, kinds) in itertools.product(STORES, plans):
        work = Path(tempfile.mkdtemp(dir=folder, prefix=f"{name}-"))
        with opened(name, work) as store, Mirror(work / "mirror", store, "tests") as mirror:
            versions, random = Moving(source, work, store), np.random.default_rng(0)
            for kind in kinds:
                trials = [staged(publish_moved(versions, kind, random), mirror) for _ in range(ROUNDS)]
                middle = {key: median(trial[key] for trial in trials) for key in trials[0]}
                rows.append({"store": name, "kind": kind} | middle)
    return {"rows": rows}


def staged(version: wire.Published, mirror: Mirror) -> dict[str, float]:
    """What publishing and staging took of a version."""
    began = time.monotonic()
    mirror.stage(version.version)
    seconds = time.monotonic() - began
    mirror.promote(version.version)
    return {"bytes": version.bytes, "publish, ms": 1e3 * version.seconds, "stage, ms": 1e3 * seconds}


async def run_swaps(size: Size, folder: Path) -> Figures:
    """Swap full versions, then deltas in windows between quiet ones; then vLLM's own reload of its folder."""
    (model, _), work = make(size, folder), Path(tempfile.mkdtemp(dir=folder, prefix="swaps-"))
    publisher, random = Moving(model, work, DirectoryStore(work / "store")), np.random.default_rng(0)
    plan = ["full"] * ROUNDS + ["delta"] * TURNS * size.swaps
    versions = [publish_moved(publisher, kind, random).version for kind in plan]
    lost, replies = list[float](), list[wire.UpdateReply]()
    async with started(model, work) as replica:
        async with in_flight(replica, size):
            await swap(replica, versions[:ROUNDS], 0.0, replies)
            quiet = [await pace(replica, asyncio.sleep(size.window_seconds))]
            for first in range(ROUNDS, len(versions), size.swaps):
                began, due = time.monotonic(), versions[first : first + size.swaps]
                swapping = await pace(replica, swap(replica, due, size.window_seconds, replies))
                seconds = time.monotonic() - began
                quiet.append(await pace(replica, asyncio.sleep(size.window_seconds)))
                lost.append(seconds * (1 - swapping / mean(quiet[-2:])) / size.swaps)
        peer = BlockingPeer(replica.url, token_from_environment(), content_type="application/json")
        reload = partial(peer.once, "/collective_rpc", b'{"method": "reload_weights"}', 300.0)
        reloads = interleaved({"reload": reload}, ROUNDS)["reload"]
    row = {"in flight": size.in_flight, "decode step, ms": 1e3 * size.in_flight / median(quiet)}
    for kind, answers in (("full", replies[:ROUNDS]), ("delta", replies[ROUNDS:])):
        row[f"{kind}: pause, ms"] = 1e3 * median(answer.pause_seconds for answer in answers)
        row[f"{kind}: loading, ms"] = 1e3 * median(answer.apply_seconds for answer in answers)
    row |= {"engine's time for a delta, ms": 1e3 * median(lost), "vLLM's reload, ms": 1e3 * median(reloads)}
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


@contextlib.asynccontextmanager
async def in_flight(replica: HttpReplica, size: Size) -> AsyncIterator[None]:
    """Keep `size.in_flight` completions in flight, warmed up; they are aborted at the end."""
    tasks = [asyncio.create_task(complete(replica, size, seed)) for seed in range(REQUESTS)]
    await asyncio.sleep(size.window_seconds)
    yield
    failed = [task for task in tasks if task.done()]
    await cancel(tasks)
    await asyncio.gather(*failed)


async def complete(replica: HttpReplica, size: Size, seed: int) -> None:
    """One request after the other, without end."""
    random, shape = np.random.default_rng(seed), (size.in_flight // REQUESTS, PROMPT_TOKENS)
    while True:
        ids = random.integers(2, size.model["vocab_size"], shape).tolist()
        prompts = [wire.GeneratePrompt(str(number), row) for number, row in enumerate(ids)]
        request = wire.GenerateRequest(sampling=wire.Sampling(max_tokens=TOKENS), prompts=prompts)
        async for answer in replica.generate(request):
            if isinstance(answer, wire.GenerateFailed):
                raise DistillError(f"the replica could not generate: {answer.error}")


async def pace(replica: HttpReplica, meanwhile: Awaitable[None]) -> float:
    """Tokens generated per second."""
    before, began = (await replica.state()).tokens, time.monotonic()
    await meanwhile
    after, seconds = (await replica.state()).tokens, time.monotonic() - began
    return (after - before) / seconds


async def swap(
    replica: HttpReplica, versions: Sequence[wire.Version], seconds: float, replies: list[wire.UpdateReply]
) -> None:
    """One update after the other, spread evenly over `seconds` as far as they are fast enough."""
    began = time.monotonic()
    for number, version in enumerate(versions, 1):
        replies.append(await replica.update(wire.UpdateRequest(version=version), 300.0))
        due = began + seconds * number / len(versions)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


PARTS: Final[dict[str, Callable[[Size, Path], Figures]]] = {
    "codec": run_codec,
    "transports": run_stores,
    "swaps": lambda size, folder: asyncio.run(run_swaps(size, folder)),
}


def run(
    folder: Folder = Path("runs/bench-sync"),
    full: Annotated[bool, typer.Option("--full", help="At 101 M parameters too.")] = False,
) -> Figures:
    """Measure a weight sync in parts: codec, transports, swaps."""
    cache, figures = TrialCache(folder), Figures()
    for name, part in itertools.product(SIZES if full else ("toy",), PARTS):
        measure = partial(PARTS[part], SIZES[name], cache.folder)
        figures[f"{part}, {name}"] = cache.get({"size": name, "part": part}, measure)
    return figures


def table(figures: Figures) -> str:
    sections = ([f"### {name}", "", *listing(part["rows"]), ""] for name, part in figures.items())
    return "\n".join(itertools.chain(*sections))


if __name__ == "__main__":
    command(run, table)
