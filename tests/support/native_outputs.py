"""A vLLM engine on its second model runner, in a process of its own: what vLLM itself gives of routes and
sampling masks of a tiny mixture of experts, beside what we make of it.

    python native_outputs.py FOLDER READ.npz OUT.npz

READ.npz is what route_recorder.py wrote; the engine reads its sequences as prompts. Prompts come in chunks,
completions are preempted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from route_recorder import COMPLETION, ENVIRONMENT, PROMPT, SEQUENCES, SMALL

VOCABULARY = 64
CUTS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 7},
    "top_p": {"top_k": 24, "top_p": 0.8},
    "min_p": {"top_k": 40, "min_p": 0.05, "temperature": 0.7},
}
"""Ways to sample; `top_k` has to bound every one."""


class Observed:
    """An engine of which every last output is kept."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.outputs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, params: Any, request: str, **options: Any) -> AsyncIterator[Any]:
        async for output in self._engine.generate(prompt, params, request, **options):
            self.outputs[request] = output
            yield output


def start(folder: str) -> Observed:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    native = {"enable_return_routed_experts": True, "return_sampling_mask": True, "max_logprobs": -1}
    native |= {"enable_prefix_caching": True, "logprobs_mode": "processed_logprobs"}
    return Observed(AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **SMALL, **native)))


async def complete(engine: Observed, name: str, prompt: list[int], tokens: int, **cut: Any) -> dict[str, Any]:
    """Arrays of one completion: `native_…` are vLLM's own."""
    from sync.vllm import completions, vllm_compat
    from sync.wire import Sampling, unpack

    sampling = Sampling(max_tokens=tokens, mask=True, **{"top_k": VOCABULARY, **cut})
    params = vllm_compat.sampling_params(sampling, VOCABULARY)
    completion = await vllm_compat.complete(engine, prompt, params, name)
    answer = completions.generated(name, completion, sampling)
    native = engine.outputs[name].outputs[0]
    masks = [list(ids) for ids in native.sampling_mask.token_ids]
    arrays = {
        "tokens": [*prompt, *completion.token_ids.tolist()],
        "logp": unpack(answer.logprob),
        "mask_sizes": unpack(answer.mask.sizes),
        "mask_ids": unpack(answer.mask.ids),
        "native_mask_sizes": [len(ids) for ids in masks],
        "native_mask_ids": [one for ids in masks for one in ids],
        "native_routes": native.routed_experts,
    }
    return {f"{name}/{key}": value for key, value in arrays.items()}


def preemptions() -> int:
    from prometheus_client import REGISTRY

    counted = REGISTRY.restricted_registry(["vllm:num_preemptions_total"]).collect()
    return int(sum(one.value for metric in counted for one in metric.samples if one.name.endswith("_total")))


async def everything(folder: str, read: dict[str, np.ndarray]) -> dict[str, Any]:
    engine = start(folder)
    assert engine.vllm_config.use_v2_model_runner
    found: dict[str, Any] = {}

    async def together(*asked: Any) -> None:
        for arrays in await asyncio.gather(*asked):
            found.update(arrays)

    prompts = [read[f"first-{index}/tokens"].tolist() for index in range(SEQUENCES)]
    await together(*(complete(engine, f"read-{i}", one, 1) for i, one in enumerate(prompts)))
    g = np.random.default_rng(2)
    prompts = [g.integers(0, VOCABULARY, PROMPT).tolist() for _ in range(SEQUENCES)]
    before = preemptions()
    await together(*(complete(engine, f"own-{i}", one, COMPLETION) for i, one in enumerate(prompts)))
    found["preempted"] = preemptions() - before
    for name, cut in CUTS.items():
        await together(
            *(complete(engine, f"{name}-{i}", one, 12, **cut) for i, one in enumerate(prompts[:3]))
        )
    engine.shutdown()
    return found


def main(folder: str, read: str, out: str) -> None:
    np.savez(out, **asyncio.run(everything(folder, dict(np.load(read)))))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    os.environ.pop("VLLM_PLUGINS")
    main(*sys.argv[1:])
