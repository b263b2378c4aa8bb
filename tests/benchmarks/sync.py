"""A weight sync in parts, one after the other; what is finished is kept in the folder.

    codec       bytes and speed of every format on a real trajectory          toy, large
    transports  publish and stage through every store                         toy, large
    swaps       pause, apply and lost engine time of a real replica           toy, large
    whole_run   what all of it costs a run that trains                        toy

`large` has 101 M parameters and comes with `full`.

The trajectory is a small Qwen3 in training: AdamW on fp32 masters, rounded to bf16. The other formats are
written from their published descriptions; each takes the bits of one tensor, old and new,
uint16 [rows, columns], and returns what it would send.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import zstandard

from sync.weights.delta import codec
from sync.weights.delta.codec import Effort
from tests.benchmarks import asynchronous, sync_replica
from tests.benchmarks.figures import Figures, TrialCache, Work, command, interleaved, markdown
from tests.benchmarks.sync_replica import SHAPES, qwen3

LRS: Final = (1e-6, 3e-6, 1e-5, 5e-5)
STEPS: Final = (1, 8)
DENSITIES: Final = (0.01, 0.1, 0.3)
ROUNDS: Final = 5
EFFORTS: Final[tuple[Effort, ...]] = ("fast", "small")

Encoder = Callable[[np.ndarray, np.ndarray], bytes]


# --- other formats ----------------------------------------------------------------------------------------


def int32_and_value(old: np.ndarray, new: np.ndarray) -> bytes:
    """A 32-bit index and the new value of each changed element: six bytes."""
    index = np.flatnonzero(old.ravel() != new.ravel())
    return index.astype("<i4").tobytes() + new.ravel()[index].tobytes()


def gap16_and_value(old: np.ndarray, new: np.ndarray) -> bytes:
    """The distance from the last changed element in 16 bits (0xFFFF: 32 more bits follow), and the value."""
    index = np.flatnonzero(old.ravel() != new.ravel())
    gap = np.diff(index, prepend=-1) - 1
    wide = gap[gap >= 0xFFFF].astype("<u4").tobytes()
    return np.minimum(gap, 0xFFFF).astype("<u2").tobytes() + wide + new.ravel()[index].tobytes()


def row_gaps_and_values(old: np.ndarray, new: np.ndarray) -> bytes:
    """PULSE (arXiv 2602.03839): row and column differences in the narrowest type, absolute values, zstd-1."""
    row, column = np.nonzero(old != new)
    down = np.diff(row, prepend=0)
    right = np.diff(column, prepend=0)
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


FORMATS: Final[dict[str, Encoder]] = {
    "int32+value": int32_and_value,
    "gap16+value": gap16_and_value,
    "PULSE-style": row_gaps_and_values,
    "XOR planes": xor_planes,
}


def entropy_given_exponent(old: np.ndarray, new: np.ndarray) -> float:
    """Bits that the changes of flat bf16 arrays carry when the old exponent is known.

    Σ over exponents of N · H(step), the step being 0 or the difference of the sign-ordered integers.
    """
    exponent = (old >> 7) & 255
    step = _ordered(new) - _ordered(old)
    pairs, counts = np.unique(exponent.astype(np.int64) << 32 | (step + (1 << 20)), return_counts=True)
    total = np.bincount(pairs >> 32, counts, 256)[pairs >> 32]
    return float(-(counts * np.log2(counts / total)).sum())


def _ordered(bits: np.ndarray) -> np.ndarray:
    """int64 that grows with the value of the float."""
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, 0x7FFF - wide, wide)


# --- weights on their way through post-training -----------------------------------------------------------

Weights = dict[str, np.ndarray]
"""Tensor name → uint16 bits of bf16, [rows, columns]; vectors are one row."""


class Training(NamedTuple):
    """What is trained, and how long."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    """Per step."""
    sequence: int
    """Tokens of a row."""
    warm_up: int
    """Steps at learning rate 1e-3 before anything is measured."""
    settle: int
    """Steps at the measured learning rate before the first weights are kept."""


def trajectory(
    size: Training, lrs: Sequence[float], steps: Sequence[int]
) -> Iterator[tuple[float, int, Weights, Weights]]:
    """(learning rate, steps, old, new): for each of `lrs` the weights, and those each of `steps` later."""
    torch.manual_seed(0)
    model = qwen3(size.vocabulary, size.hidden, size.layers, 3 * size.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    _train(model, optimizer, size, size.warm_up)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for lr in lrs:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        optimizer.param_groups[0]["lr"] = lr
        _train(model, optimizer, size, size.settle)
        old, done = _bits(model), 0
        for count in steps:
            _train(model, optimizer, size, count - done)
            done = count
            yield lr, count, old, _bits(model)


def _train(model: Any, optimizer: Any, size: Training, steps: int) -> None:
    """Next-token prediction on arithmetic sequences modulo the vocabulary, with noise."""
    for _ in range(steps):
        rows = size.tokens // size.sequence
        first = torch.randint(size.vocabulary, (rows, 1))
        stride = torch.randint(1, 17, (rows, 1))
        tokens = (first + stride * torch.arange(size.sequence)) % size.vocabulary
        noise = torch.rand(tokens.shape) < 0.1
        tokens = torch.where(noise, torch.randint(size.vocabulary, tokens.shape), tokens)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _bits(model: Any) -> Weights:
    """The masters rounded to bf16."""
    found = {}
    for name, parameter in model.named_parameters():
        bits = parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        found[name] = bits.reshape(bits.shape[0] if bits.ndim > 1 else 1, -1).copy()
    return found


# --- bytes and speed of the codec ------------------------------------------------------------------------


class Size(NamedTuple):
    """What the codec is measured on."""

    training: Training
    speed_elements: int
    """Of the tensor that speeds are taken on."""


SIZES: Final = {
    "toy": Size(Training(256, 3, 2048, tokens=512, sequence=64, warm_up=60, settle=4), 16 << 20),
    "large": Size(Training(768, 12, 20480, tokens=256, sequence=64, warm_up=40, settle=2), 64 << 20),
}


def run_codec(size: Size) -> Figures:
    """Bytes on the trajectory, speeds on one large tensor."""
    rows, parameters = [], 0
    for lr, steps, old, new in trajectory(size.training, LRS, STEPS):
        rows.append({"lr": lr, "steps": steps} | row(old, new))
        parameters = sum(bits.size for bits in old.values())
    speeds = [speed(density, size.speed_elements) for density in DENSITIES]
    return {"parameters": parameters, "rows": rows, "speeds": speeds}


def row(old: Weights, new: Weights) -> Figures:
    """Bytes per parameter of every format; "entropy" is the bound given the old exponent."""
    flat_old, flat_new = (np.concatenate([bits.ravel() for bits in side.values()]) for side in (old, new))
    encoders = FORMATS | {effort: partial(encode, effort) for effort in EFFORTS}
    sizes: dict[str, float] = {
        name: sum(len(encoder(bits, new[tensor])) for tensor, bits in old.items())
        for name, encoder in encoders.items()
    }
    sizes["entropy"] = entropy_given_exponent(flat_old, flat_new) / 8
    return {
        "changed": float((flat_old != flat_new).mean()),
        "bytes_per_parameter": {name: size / flat_old.size for name, size in sizes.items()},
    }


def speed(density: float, size: int) -> Figures:
    """GB/s by processor time of dense weights, `density` of them one ULP away; "compare" only compares."""
    random = np.random.default_rng(0)
    old = ((random.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    sign = random.choice(np.array([1, 65535], np.uint16), size)
    new = np.where(random.random(size, np.float32) < density, old + sign, old)
    works = {"compare": Work(partial(np.not_equal, old, new, out=np.ones(size, bool)))}
    for effort in EFFORTS:
        blob, target = encode(effort, old, new), old.copy()
        codec.apply(target, blob, "bf16")
        assert np.array_equal(target, new)
        works[f"{effort}: encode"] = Work(partial(encode, effort, old, new))
        works[f"{effort}: decode"] = Work(partial(codec.apply, blob=blob, kind="bf16"), old.copy)
    found = interleaved(works, ROUNDS, time.process_time)
    return {"density": density} | {name: old.nbytes / median(taken) / 1e9 for name, taken in found.items()}


def encode(effort: Effort, old: np.ndarray, new: np.ndarray) -> bytes:
    """The delta of one tensor, as published."""
    return codec.encode(old.ravel(), new.ravel(), "bf16", effort)


# --- parts -----------------------------------------------------------------------------------------------

WHOLE_RUN_STEPS: Final = 80
PARTS: Final[dict[str, Callable[[str, Path], Figures]]] = {
    "codec": lambda size, _: run_codec(SIZES[size]),
    "transports": lambda size, folder: {"rows": sync_replica.run_stores(SHAPES[size], folder)},
    "swaps": lambda size, folder: sync_replica.run_swaps(SHAPES[size], folder),
    "whole_run": lambda _, folder: whole_run(folder),
}


def run(folder: Path = Path("runs/bench-sync"), full: bool = False) -> dict[str, Figures]:
    """Size → part → figures, of what is missing in `folder` and what was kept.

    Raises DistillError when an engine or a store's server fails.
    """
    cache, figures = TrialCache(folder / "trials.jsonl"), {}
    for size in ("toy", "large") if full else ("toy",):
        figures[size] = {
            name: cache.get({"size": size, "part": name}, lambda: part(size, folder))  # noqa: B023
            for name, part in PARTS.items()
            if (size, name) != ("large", "whole_run")
        }
    return figures


def whole_run(folder: Path) -> Figures:
    """What syncing costs a quickstart. Raises DistillError when it fails."""
    settings = [f"evaluation.every={WHOLE_RUN_STEPS}", "evaluation.prompts=64"]
    asynchronous.run_quickstart(folder, "quickstart", 0, WHOLE_RUN_STEPS, settings)
    return figures_of_run(folder / "quickstart")


def figures_of_run(run_dir: Path, settled: int = asynchronous.SETTLED) -> Figures:
    """From a finished run's own files."""
    steps = asynchronous.step_lines(run_dir)[settled:]
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds = steps[-1]["time"] - steps[0]["time"]
    return {
        "steps": len(steps),
        "step_seconds": seconds / (len(steps) - 1),
        "trainer_blocked_share": sum(line["perf/publish_seconds"] for line in steps[1:]) / seconds,
        "pause_seconds": summary["sync"]["pause_seconds"],
    }


# --- tables -----------------------------------------------------------------------------------------------


def table(figures: Mapping[str, Figures]) -> str:
    """Everything that was measured, one section per part and size, and the goals."""
    lines: list[str] = []
    for size, parts in figures.items():
        lines += _codec(size, parts["codec"]) + _transports(size, parts["transports"]["rows"])
        lines += _swaps(size, parts["swaps"])
    rows = [
        [text, f"≤ {limit:.3g}", f"{reached:.3g}", "yes" if reached <= limit else "no"]
        for text, limit, reached in goals(figures)
    ]
    whole = figures["toy"]["whole_run"]
    lines += [
        f"A run of {whole['steps']} steps of {_ms(whole['step_seconds'])} ms, with a version per step: "
        f"pause {_ms(whole['pause_seconds'])} ms"
    ]
    return "\n".join([*lines, "", *markdown(["goal", "limit", "reached", "met"], rows)])


def goals(figures: Mapping[str, Figures]) -> Iterator[tuple[str, float, float]]:
    """(goal, limit, reached): met when it is not above the limit."""
    swaps, whole = figures["toy"]["swaps"], figures["toy"]["whole_run"]
    limit, pause = swaps["decode_step_seconds"] + 0.05, swaps["swaps"]["delta"]["pause_seconds"]
    yield "pause of a delta, seconds (one decode step + 50 ms)", limit, pause
    share = swaps["engine_seconds_per_swap"] / whole["step_seconds"]
    yield "pause and recomputed KV cache, share of engine time at a version per step", 0.02, share
    yield "trainer's time lost to publishing, share", 0.02, whole["trainer_blocked_share"]
    if "large" in figures:
        swaps = figures["large"]["swaps"]
        limit, pause = swaps["decode_step_seconds"], swaps["swaps"]["delta"]["pause_seconds"]
        limit += 1.2 * swaps["plain_copy_seconds"]
        yield "pause at 101 M, seconds (one decode step + 1.2 times a plain copy)", limit, pause
        yield "the same (0.8 of vLLM's own reload)", 0.8 * swaps["vllm_reload_seconds"], pause


def _codec(size: str, found: Figures) -> list[str]:
    columns, rows = (*FORMATS, *EFFORTS, "entropy"), []
    for row in found["rows"]:
        sizes = row["bytes_per_parameter"]
        rows.append(
            [f"{row['lr']:.0e}, {row['steps']}", f"{row['changed']:.2%}"]
            + [f"{sizes[name]:.3g}" for name in columns]
            + [f"{sizes['small'] / sizes['PULSE-style']:.2f}"]
        )
    speeds = found["speeds"]
    ways = [name for name in speeds[0] if name != "density"]
    cells = [[f"{speed['density']:.0%}", *(f"{speed[way]:.2f}" for way in ways)] for speed in speeds]
    return [
        f"### Codec, {size}: bytes per parameter, {found['parameters']:,} parameters (dense bf16: 2)",
        "",
        *markdown(["lr, steps apart", "changed", *columns, "small / PULSE-style"], rows),
        "",
        "GB/s of dense bf16 on one core, medians by processor time",
        "",
        *markdown(["changed", *ways], cells),
        "",
    ]


def _transports(size: str, rows: list[Figures]) -> list[str]:
    parts = ("publish_seconds", "stage_seconds")
    cells = [
        [one["store"], one["kind"], f"{one['bytes']:,.0f}", *(_ms(one[part]) for part in parts)]
        for one in rows
    ]
    head = ["store", "kind", "bytes", "publish, ms", "stage, ms"]
    return [f"### Transports, {size}: medians of one version", "", *markdown(head, cells), ""]


def _swaps(size: str, swaps: Figures) -> list[str]:
    rows = [
        [f"{kind}: pause, of it loading", f"{_ms(swap['pause_seconds'])}, {_ms(swap['apply_seconds'])}"]
        for kind, swap in swaps["swaps"].items()
    ]
    rows += [
        ["decode step", _ms(swaps["decode_step_seconds"])],
        ["engine time that a delta costs in all", _ms(swaps["engine_seconds_per_swap"])],
        ["vLLM's own reload from disk", _ms(swaps["vllm_reload_seconds"])],
        ["plain copy of the model's bytes", _ms(swaps["plain_copy_seconds"])],
    ]
    title = f"### Swaps, {size}: {swaps['in_flight']} completions in flight; medians in ms"
    return [title, "", *markdown(["", "ms"], rows), ""]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


if __name__ == "__main__":
    command("sync", run, table)
