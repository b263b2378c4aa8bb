"""Families with experts in vLLM's engines on a CPU, one after the other in a process of its own.

    python families_in_vllm.py FOLDER FAMILY … OUT.npz

FOLDER has FAMILY/first and FAMILY/second. A replica generates with the first one's weights, is brought to the
second's by the project's own update, and generates again, recording its routes: OUT holds tokens, logp and
routes of both, or `refused`, why there was no update.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from route_recorder import ENGINE, ENVIRONMENT, OURS, swap
from routed_models import VOCAB

LENGTH, PROMPTS, PROMPT, COMPLETION = 64, 4, 9, 12


def replica(home: Path) -> dict[str, Any]:
    import vllm

    from sync.vllm.routing import ROUTES_FROM, routes_of

    options = {"max_model_len": LENGTH, "enable_prefix_caching": False, "logprobs_mode": "processed_logprobs"}
    llm = vllm.LLM(str(home / "first"), **options, **ENGINE, **OURS)
    assert "error" not in llm.collective_rpc("distill_record_routes")[0]
    params = vllm.SamplingParams(
        max_tokens=COMPLETION, ignore_eos=True, detokenize=False, logprobs=0, extra_args={ROUTES_FROM: 0}
    )
    draw, found = np.random.default_rng(0), dict[str, Any]()
    prompts = [{"prompt_token_ids": draw.integers(0, VOCAB, PROMPT).tolist()} for _ in range(PROMPTS)]
    for name in ("first", "second"):
        if name == "second":
            found["refused"] = swap(llm.collective_rpc, str(home / "second")) or ""
            if found["refused"]:
                break
        outputs = llm.generate(prompts, params, use_tqdm=False)
        of_all: dict[str, list[Any]] = {"tokens": [], "logp": [], "routes": []}
        for output in outputs:
            said = output.outputs[0]
            tokens = [*output.prompt_token_ids, *said.token_ids]
            of_all["tokens"].append(tokens)
            of_all["logp"].append(
                [one[token].logprob for one, token in zip(said.logprobs, said.token_ids, strict=True)]
            )
            (message,) = llm.collective_rpc("distill_routes", args=([output.request_id],))[0]
            of_all["routes"].append(routes_of(message, np.array(tokens, np.int32)))
        found |= {f"{name}/{what}": np.array(rows) for what, rows in of_all.items()}
    llm.llm_engine.engine_core.shutdown()
    return found


def replicas(folder: str, *words: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    *families, out = words
    found: dict[str, Any] = {}
    for family in families:
        found |= {f"{family}/{name}": np.array(one) for name, one in replica(Path(folder) / family).items()}
        gc.collect()
        cleanup_dist_env_and_memory()
    np.savez(out, **found)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    replicas(*sys.argv[1:])
    os._exit(0)  # vLLM's engines do not end their threads
