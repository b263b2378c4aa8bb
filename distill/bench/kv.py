"""What becomes of running completions at a swap of weights: `distill bench kv`.

`weights.kv_on_swap` recomputes their KV cache with the new weights, or keeps the old one; then a token is
sampled from a mixture that no version alone gives, and p/μ of its version is not 1.

    mismatch   one replica, a version per optimizer step at each of LRS, completions of TOKENS in flight:
               KL(μ‖p) under the version that each token is stamped with, by its place; the engine's time
    learned    the quickstart both ways
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from distill.aio import cancel
from distill.bench import pipeline
from distill.bench.runner import Figures, Row, TrialCache, comparison, markdown, medians
from distill.bench.sync_transports import (
    PROMPT_TOKENS,
    Versions,
    completed,
    cost_of_a_swap,
    qwen3,
    started,
)
from distill.bench.trajectory import Training, Weights, trajectory
from distill.rollout.replica_client import HttpReplica
from distill.tasks.teaching import make_tokenizer
from sync.weights.stores.directory import DirectoryStore
from sync.wire import (
    Generated,
    GeneratePrompt,
    GenerateRequest,
    Sampling,
    UpdateRequest,
    Version,
    unpack,
)

Kv = Literal["recompute", "keep"]
Completions = list[tuple[list[int], Generated]]
"""With their prompts."""
WAYS: Final[tuple[Kv, ...]] = get_args(Kv)
LRS: Final = (1e-6, 1e-5, 1e-4, 1e-3)
SIZE: Final = Training(256, 3, 2048, tokens=2048, sequence=256, warm_up=60, settle=0)
IN_FLIGHT, TOKENS, SWAPS = 64, 240, 6
"""Completions, their length, and the swaps on their way."""
BINS: Final = ((0, 32), (32, 96), (96, 240))
"""Places of a completion's tokens."""
STEPS: Final = 120
"""Of a quickstart."""
LEARNED_LRS: Final = (2e-3, 2e-4)
"""The quickstart's, and a tenth of it."""
ROWS: Final = {
    "reverse_kl": Row("reverse KL at the end", ".3f"),
    "pass_rate": Row("pass rate at the end", ".1%"),
    "step_ms": Row("ms per step, median", ".0f", -1),
    "mean_step_ms": Row("ms per step, mean", ".0f", -1),
    "generated_per_second": Row("tokens generated per second", ",.0f", 1),
    "age": Row("mean age, versions", ".2f"),
}


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; all figures. Raises DistillError when an engine or a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    learned: dict[str, dict[str, list[Figures]]] = {}
    for rate in LEARNED_LRS:
        common = (*pipeline.OVERLAPPED, f"trainer.lr={rate}")
        ways: dict[str, Sequence[str]] = {kv: (*common, f"weights.kv_on_swap={kv}") for kv in WAYS}
        figures = pipeline.measure_and_learned
        learned[f"{rate:g}"] = pipeline.side_by_side(cache, folder, ways, seeds, STEPS, figures)
    return {"mismatch": cache.get({"part": "mismatch"}, lambda: mismatch(folder)), "learned": learned}


# --- mismatch ---------------------------------------------------------------------------------------------


def mismatch(folder: Path) -> Figures:
    """Learning rate → way → "kl" of each of BINS, nats per token, and "swap_seconds" of the engine."""
    work, versions = folder / "replica", versions_by_rate(SIZE, SWAPS)
    model = qwen3(SIZE.vocabulary, SIZE.hidden, SIZE.layers, 3 * SIZE.hidden)
    sampled = asyncio.run(generated(work, model, versions))
    torch.set_num_threads(1)
    found: Figures = {}
    for rate, own in versions.items():
        found[f"{rate:g}"] = {
            kv: {"kl": kl_by_place(model, own, answers), "swap_seconds": cost}
            for kv, (answers, cost) in sampled[rate].items()
        }
    return found


def versions_by_rate(size: Training, swaps: int) -> dict[float, dict[Version, Weights]]:
    """At each of LRS the weights before, and after each of `swaps` optimizer steps from the same start.

    Steps of the versions count on from one rate to the next.
    """
    found: dict[float, dict[Version, Weights]] = {rate: {} for rate in LRS}
    numbers = itertools.count()
    for rate, count, old, new in trajectory(size, LRS, range(1, swaps + 1)):
        if count == 1:
            found[rate][Version(0, next(numbers))] = old
        found[rate][Version(0, next(numbers))] = new
    return found


async def generated(
    work: Path, model: Any, versions: dict[float, dict[Version, Weights]]
) -> dict[float, dict[Kv, tuple[Completions, float]]]:
    """Completions of a replica that is brought from the first to the last version of a rate meanwhile.

    With them seconds of the engine for each swap: its pace is compared with that of a round without swaps.
    """
    publish(work, model, {version: bits for own in versions.values() for version, bits in own.items()})
    found: dict[float, dict[Kv, tuple[Completions, float]]] = {}
    async with started(work / "model", work) as replica:
        await completions(replica, ())
        for rate, (first, *later) in versions.items():
            found[rate] = {}
            for kv in WAYS:
                await replica.update(UpdateRequest(version=first), 300.0)
                _, quiet = await completions(replica, ())
                answers, seconds = await completions(replica, later, kv, quiet / (len(later) + 1))
                cost = cost_of_a_swap(1 / seconds, 1 / quiet, seconds, len(later))
                found[rate][kv] = answers, cost
    return found


async def completions(
    replica: HttpReplica, swaps: Sequence[Version], kv: Kv = "recompute", every: float = 0.0
) -> tuple[Completions, float]:
    """They, and the seconds these took; `every` seconds an update to the next version."""
    random = np.random.default_rng(0)
    prompts = random.integers(2, SIZE.vocabulary, (IN_FLIGHT, PROMPT_TOKENS)).tolist()
    request = GenerateRequest(
        sampling=Sampling(max_tokens=TOKENS),
        prompts=[GeneratePrompt(str(index), ids) for index, ids in enumerate(prompts)],
    )
    began = time.monotonic()

    async def update() -> None:
        for number, version in enumerate(swaps, 1):
            await asyncio.sleep(max(0.0, began + number * every - time.monotonic()))
            await replica.update(UpdateRequest(version=version, kv_on_swap=kv), 300.0)

    updating = asyncio.create_task(update())
    try:
        answers = [one async for one in completed(replica, request)]
        seconds = time.monotonic() - began
        await updating
    finally:
        await cancel([updating])
    return answers, seconds


def publish(work: Path, model: Any, versions: dict[Version, Weights]) -> None:
    """The folder `work`/model with the weights of the first version, and all versions in `work`/store."""
    folder, (first, *later) = work / "model", versions
    load(model, versions[first])
    model.bfloat16().save_pretrained(folder)
    model.float()
    words = [f"w{number}" for number in range(SIZE.vocabulary)]
    make_tokenizer(words, "w[0-9]+", "w1", "w0").save_pretrained(folder)
    published = Versions(folder, work, DirectoryStore(work / "store"))
    published.publish("full")
    for version in later:
        for name, bits in published.arrays.items():
            bits[:] = versions[version][name].ravel()
        assert published.publish("delta").version == version, "they count on"


def load(model: Any, weights: Weights) -> None:
    """Give a model in fp32 the weights of a version."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            bits = torch.from_numpy(weights[name].view(np.int16))
            parameter.copy_(bits.view(torch.bfloat16).view_as(parameter))


def kl_by_place(model: Any, versions: dict[Version, Weights], answers: Completions) -> list[float]:
    """KL(μ‖p), nats per token, of the tokens in each of BINS; p: of the version that a token is stamped with.

    The estimate is the mean of ρ - 1 - log ρ, which is 0 or more for every token. T tokens of a completion.
    """
    terms = np.zeros((len(answers), TOKENS))
    for version, weights in versions.items():
        load(model, weights)
        for row, (prompt, answer) in enumerate(answers):
            own = [span for span in answer.spans if span.version == version]
            if own:
                logp_T = log_probs(model, prompt, unpack(answer.token_ids)).numpy()
                log_rho_T = logp_T - unpack(answer.logprob)
                for span in own:
                    part = log_rho_T[span.start : span.end].astype(float)
                    terms[row, span.start : span.end] = np.expm1(part) - part
    return [float(terms[:, low:high].mean()) for low, high in BINS]


def log_probs(model: Any, prompt: list[int], completion_T: np.ndarray) -> Tensor:
    """[T]: log p of a completion's tokens."""
    ids_1L = torch.tensor([[*prompt, *completion_T.tolist()]])
    with torch.inference_mode():
        logits_TV = model(ids_1L[:, :-1]).logits[0, len(prompt) - 1 :]
    return logits_TV.log_softmax(-1).gather(1, ids_1L[0, len(prompt) :, None])[:, 0]


# --- tables -----------------------------------------------------------------------------------------------


def table(report: Figures) -> str:
    """Both parts as Markdown."""
    head = ["learning rate", *(f"KL(μ‖p), tokens {low} to {high}" for low, high in BINS), "ms per swap"]
    rows = [
        [
            rate,
            *(
                ", ".join(f"{kl:.1e}" for kl in bins)
                for bins in zip(*(of[kv]["kl"] for kv in WAYS), strict=True)
            ),
            ", ".join(f"{1000 * of[kv]['swap_seconds']:.0f}" for kv in WAYS),
        ]
        for rate, of in report["mismatch"].items()
    ]
    lines = [f"{SWAPS} swaps while {IN_FLIGHT} completions of {TOKENS} tokens run: {', '.join(WAYS)}", ""]
    lines += markdown(head, rows)
    for rate, of in report["learned"].items():
        lines += ["", f"the quickstart at a learning rate of {rate}, medians", ""]
        lines += comparison({kv: medians(of[kv], ROWS) for kv in WAYS}, ROWS)
    return "\n".join(lines)
