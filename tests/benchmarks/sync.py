"""A weight sync in parts, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of the delta of one optimizer step            toy, large
    transports  publish and stage through every store                         toy, large
    swaps       pause, apply and lost engine time of a real replica           toy, large
    whole_run   what all of it costs a run that trains                        toy

`large` has 101 M parameters and comes with `--full`.

Two other formats are written from their published descriptions. Servers of stores run on loopback, each in a
process of its own.

In the replica, completions of TOKENS tokens are in flight all the time, as in the quickstart. Windows with
and without swaps take turns; what is generated less in those with swaps, over their number, is the engine
time that one swap costs: pause, prefilling again what was in flight, and staging on the side.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Final, NamedTuple

import httpx
import numpy as np
import torch
import typer
import zstandard
from tiny_models import language_model, save_words
from transformers import AutoModelForCausalLM
from weight_proof import RUN, Versions, on_loopback

from distill.config import StudentConfig
from distill.launch.preflight import serving
from distill.launch.roles import Ports
from distill.rollout.replica_client import HttpReplica
from student_trainer.config import LoRAConfig
from student_trainer.engine import with_adapters
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
    Work,
    chosen,
    command,
    interleaved,
    markdown,
    run_quickstart,
    step_lines,
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
WHOLE_RUN_STEPS, SETTLED = 80, 20


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


def row_gaps_and_values(old: np.ndarray, new: np.ndarray) -> bytes:
    """PULSE (arXiv 2602.03839): row and column differences in the narrowest type, absolute values, zstd-1."""
    row, column = np.nonzero(old != new)
    down, right = np.diff(row, prepend=0), np.diff(column, prepend=0)
    right[down != 0] = column[down != 0]
    streams = [
        down.astype("<u1" if down.size == 0 or down.max() < 256 else "<i4"),
        right.astype("<u2" if right.size == 0 or right.max() < 65536 else "<i4"),
        new[row, column],
    ]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(stream.tobytes() for stream in streams))


def xor_planes(old: np.ndarray, new: np.ndarray) -> bytes:
    """High and low bytes of old XOR new, each compressed with zstd-3."""
    planes = np.ascontiguousarray((old ^ new).ravel()).view("u1").reshape(-1, 2)
    compressor = zstandard.ZstdCompressor(level=3)
    return b"".join(compressor.compress(planes[:, byte].tobytes()) for byte in (0, 1))


def encode(effort: Effort, old: np.ndarray, new: np.ndarray) -> bytes:
    """The delta of one tensor, as published."""
    return codec.encode(old.ravel(), new.ravel(), "bf16", effort)


FORMATS: Final[dict[str, Callable[[np.ndarray, np.ndarray], bytes]]] = {
    "PULSE-style": row_gaps_and_values,
    "XOR planes": xor_planes,
    **{effort: partial(encode, effort) for effort in EFFORTS},
}
"""Take the bits of one tensor, old and new, uint16 [rows, columns], and return what they would send."""


def run_codec(size: Size, _: Path) -> Figures:
    """Bytes and speeds on one tensor before and after a step, at several learning rates.

    A step of Adam moves every weight by about the learning rate; of fp32 masters rounded to bf16 those change
    that lie so near to a boundary.
    """
    random = np.random.default_rng(0)
    masters = random.standard_normal((size.elements // 4096, 4096), np.float32) * 0.02
    signs = random.choice(np.array([-1, 1], np.float32), masters.shape)
    return {"rows": [codec_row(rate, bits(masters), bits(masters + rate * signs)) for rate in RATES]}


def bits(masters: np.ndarray) -> np.ndarray:
    """uint16: rounded to bf16."""
    return torch.from_numpy(masters).bfloat16().view(torch.uint16).numpy()


def codec_row(rate: float, old: np.ndarray, new: np.ndarray) -> Figures:
    """Bytes per parameter of every format; GB/s of dense weights by processor time."""
    sizes = {name: len(form(old, new)) / old.size for name, form in FORMATS.items()}
    works = {"compare": Work(partial(np.not_equal, old, new, out=np.ones(old.shape, bool)))}
    for effort in EFFORTS:
        blob, target = encode(effort, old, new), old.ravel().copy()
        codec.apply(target, blob, "bf16")
        assert np.array_equal(target, new.ravel())
        works[f"{effort}: encode"] = Work(partial(encode, effort, old, new))
        works[f"{effort}: decode"] = Work(partial(codec.apply, blob=blob, kind="bf16"), old.ravel().copy)
    seconds = interleaved(works, ROUNDS, time.process_time)
    speeds = {name: old.nbytes / median(taken) / 1e9 for name, taken in seconds.items()}
    changed = float((old != new).mean())
    return {"lr": rate, "changed": changed, "bytes_per_parameter": sizes, "gb_per_second": speeds}


# --- transports: versions through every store ---------------------------------------------------------------


def make(size: Size, folder: Path) -> tuple[Path, Path]:
    """Write a model and an adapter over all its linear layers; their folders."""
    model, adapter = folder / "model", folder / "adapter"
    random = language_model(
        "Qwen3",
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 64,
        intermediate_size=size.feed_forward,
        max_position_embeddings=CONTEXT,
        initializer_range=0.02,
        tie_word_embeddings=True,
        eos_token_id=None,  # completions have the requested length
    )
    random.to(torch.bfloat16).save_pretrained(model)
    save_words(model, (f"w{i}" for i in range(size.vocabulary)), eos_token="w1", pad_token="w0")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with_adapters(base, LoRAConfig(rank=size.rank), 0).save_pretrained(adapter)
    (adapter / "README.md").unlink(missing_ok=True)
    return model, adapter


def publish_moved(versions: Versions, kind: str, random: np.random.Generator) -> wire.Published:
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
        assert process.stdout is not None
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
        with opened(name, work) as store, Mirror(work / "mirror", store, RUN) as mirror:
            versions, random = Versions(source, work, store), np.random.default_rng(0)
            for kind in kinds:
                published, stage_seconds = [], []
                for _ in range(size.repeats):
                    published.append(publish_moved(versions, kind, random))
                    began = time.monotonic()
                    mirror.stage(published[-1].version)
                    stage_seconds.append(time.monotonic() - began)
                    mirror.promote(published[-1].version)
                row = {"store": name, "kind": kind, "bytes": median(version.bytes for version in published)}
                row["publish_seconds"] = median(version.seconds for version in published)
                rows.append({**row, "stage_seconds": median(stage_seconds)})
    return {"rows": rows}


# --- swaps: a replica under load ----------------------------------------------------------------------------


def run_swaps(size: Size, folder: Path) -> Figures:
    """Swaps by kind, vLLM's own reload, and a decode step. Raises DistillError when no engine comes up."""
    model, _ = make(size, folder)
    return asyncio.run(swapped(size, model, Path(tempfile.mkdtemp(dir=folder, prefix="swaps-"))))


async def swapped(size: Size, model: Path, work: Path) -> Figures:
    """Swap full versions, then deltas in windows between quiet ones; then vLLM's own reload."""
    publisher, random = Versions(model, work, DirectoryStore(work / "store")), np.random.default_rng(0)
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
    return {
        "in_flight": size.in_flight,
        "swaps": {"full": _medians(full), "delta": _medians(replies)},
        "vllm_reload_seconds": reload_seconds,
        "decode_step_seconds": size.in_flight / median(quiet),
        "engine_seconds_per_swap": median(lost),
    }


@contextlib.asynccontextmanager
async def started(model: Path, work: Path) -> AsyncIterator[HttpReplica]:
    """A replica on loopback, with vLLM's development routes."""
    config = StudentConfig(
        path=str(model),
        engine_args={"max-model-len": CONTEXT, "max-num-seqs": 256, "enforce-eager": True},
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    settings = ReplicaConfig(run=RUN, store_path=work / "store", mirror=work / "mirror")
    with Ports() as ports:
        child = on_loopback(config, settings, 0, ports)
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


def _medians(replies: Sequence[wire.UpdateReply]) -> Figures:
    names = ("pause_seconds", "apply_seconds")
    return {name: median(getattr(reply, name) for reply in replies) for name in names}


# --- the whole --------------------------------------------------------------------------------------------


def whole_run(_: Size, folder: Path) -> Figures:
    """What syncing costs a quickstart, by its own files. Raises DistillError when it fails."""
    settings = [f"evaluation.every={WHOLE_RUN_STEPS}", "evaluation.prompts=64", "tracking.wandb=disabled"]
    run_quickstart(folder / "quickstart", 0, WHOLE_RUN_STEPS, settings)
    steps = step_lines(folder / "quickstart")[SETTLED:]
    summary = json.loads((folder / "quickstart" / "summary.json").read_text())
    seconds = steps[-1]["time"] - steps[0]["time"]
    return {
        "steps": len(steps),
        "step_seconds": seconds / (len(steps) - 1),
        "trainer_blocked_share": sum(line["perf/publish_seconds"] for line in steps[1:]) / seconds,
        "pause_seconds": summary["sync"]["pause_seconds"],
    }


PARTS: Final[dict[str, Callable[[Size, Path], Figures]]] = {
    "codec": run_codec,
    "transports": run_stores,
    "swaps": run_swaps,
    "whole_run": whole_run,
}


def run(
    folder: Folder = Path("runs/bench-sync"),
    full: Annotated[bool, typer.Option("--full", help="At 101 M parameters too.")] = False,
    parts: Annotated[str, typer.Option(help="Parts, with commas.")] = ",".join(PARTS),
) -> dict[str, Figures]:
    """Measure a weight sync in parts: codec, transports, swaps, whole_run."""
    folder, names, figures = folder.absolute(), chosen("--parts", parts, PARTS), {}
    cache = TrialCache(folder)
    for size in SIZES if full else ("toy",):
        figures[size] = {
            name: cache.get({"size": size, "part": name}, partial(PARTS[name], SIZES[size], folder))
            for name in names
            if (size, name) != ("large", "whole_run")
        }
    return figures


def table(figures: Mapping[str, Figures]) -> str:
    """Everything that was measured, one section per part and size, and the goals."""
    lines: list[str] = []
    for size, parts in figures.items():
        lines += _codec(size, parts["codec"]["rows"]) if "codec" in parts else []
        lines += _transports(size, parts["transports"]["rows"]) if "transports" in parts else []
        lines += _swaps_table(size, parts["swaps"]) if "swaps" in parts else []
    if whole := figures["toy"].get("whole_run"):
        lines += [
            f"A run of {whole['steps']} steps of {_ms(whole['step_seconds'])} ms, with a version per step: "
            f"pause {_ms(whole['pause_seconds'])} ms",
            "",
        ]
    rows = [
        [text, f"≤ {limit:.3g}", f"{reached:.3g}", "yes" if reached <= limit else "no"]
        for text, limit, reached in goals(figures)
    ]
    return "\n".join([*lines, *markdown(["goal", "limit", "reached", "met"], rows)])


def goals(figures: Mapping[str, Figures]) -> Iterator[tuple[str, float, float]]:
    """(goal, limit, reached): met when it is not above the limit."""
    swaps, whole = figures["toy"].get("swaps"), figures["toy"].get("whole_run")
    if swaps:
        pause = swaps["swaps"]["delta"]["pause_seconds"]
        yield "pause of a delta, s (a decode step + 50 ms)", swaps["decode_step_seconds"] + 0.05, pause
    if whole:
        yield "trainer's time lost to publishing, share", 0.02, whole["trainer_blocked_share"]
    if swaps and whole:
        share = swaps["engine_seconds_per_swap"] / whole["step_seconds"]
        yield "pause and recomputed KV cache, share of engine time at a version per step", 0.02, share
    if large := figures.get("large", {}).get("swaps"):
        pause = large["swaps"]["delta"]["pause_seconds"]
        yield "pause at 101 M, s (0.8 of vLLM's own reload)", 0.8 * large["vllm_reload_seconds"], pause


def _codec(size: str, rows: list[Figures]) -> list[str]:
    speeds = [*rows[0]["gb_per_second"]]
    cells = []
    for row in rows:
        sizes = row["bytes_per_parameter"]
        ratio = sizes["small"] / sizes["PULSE-style"]
        figures = [f"{sizes[name]:.3g}" for name in FORMATS]
        figures += [f"{ratio:.2f}", *(f"{row['gb_per_second'][name]:.2f}" for name in speeds)]
        cells.append([f"{row['lr']:.0e}", f"{row['changed']:.2%}", *figures])
    head = ["lr", "changed", *FORMATS, "small / PULSE-style", *(f"{name}, GB/s" for name in speeds)]
    title = f"### Codec, {size}: bytes per parameter (dense bf16: 2), GB/s of dense bf16 on one core"
    return [title, "", *markdown(head, cells), ""]


def _transports(size: str, rows: list[Figures]) -> list[str]:
    cells = [
        [row["store"], row["kind"], f"{row['bytes']:,.0f}"]
        + [_ms(row["publish_seconds"]), _ms(row["stage_seconds"])]
        for row in rows
    ]
    head = ["store", "kind", "bytes", "publish, ms", "stage, ms"]
    return [f"### Transports, {size}: medians of one version", "", *markdown(head, cells), ""]


def _swaps_table(size: str, swaps: Figures) -> list[str]:
    rows = [
        [f"{kind}: pause, of it loading", f"{_ms(swap['pause_seconds'])}, {_ms(swap['apply_seconds'])}"]
        for kind, swap in swaps["swaps"].items()
    ]
    rows += [
        ["decode step", _ms(swaps["decode_step_seconds"])],
        ["engine time that a delta costs in all", _ms(swaps["engine_seconds_per_swap"])],
        ["vLLM's own reload from disk", _ms(swaps["vllm_reload_seconds"])],
    ]
    title = f"### Swaps, {size}: {swaps['in_flight']} completions in flight; medians in ms"
    return [title, "", *markdown(["", "ms"], rows), ""]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


if __name__ == "__main__":
    command(run, table)
