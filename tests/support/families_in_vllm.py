"""Families with experts in vLLM's engines on a CPU, one after the other in a process of its own.

    python families_in_vllm.py replica FOLDER OUT.npz FAMILY ...
    python families_in_vllm.py teacher [FAMILY ...]

FOLDER has FAMILY/first and FAMILY/second. A replica generates with the first one's weights, is brought to the
second's by the project's own update, and generates again, recording its routes: OUT holds tokens, logp and
routes of both, or `refused`, why there was no update. A teacher of engine "vllm" scores a sequence, and the
largest distance to the scores of transformers is printed, in nats: it starts a process for each, so the suite
leaves this out.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from route_recorder import ENVIRONMENT, swap
from routed_models import CONFIGS, TAUGHT_TOKENS, VOCAB, save_for_vllm

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "max_model_len": 64,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.2,
}
PROMPTS, PROMPT, COMPLETION = 4, 9, 12


def replica(home: Path) -> dict[str, Any]:
    import vllm

    from sync.vllm.routing import ROUTES_FROM, routes_of

    llm = vllm.LLM(
        model=str(home / "first"),
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "distill"},
        worker_extension_cls="sync.vllm.engine.WorkerExtension",
        **ENGINE,
    )
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


def replicas(folder: str, out: str, *families: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    found: dict[str, Any] = {}
    for family in families:
        found |= {f"{family}/{name}": np.array(one) for name, one in replica(Path(folder) / family).items()}
        gc.collect()
        cleanup_dist_env_and_memory()
    np.savez(out, **found)


def teachers(*families: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from teacher_service.config import TeacherConfig
    from teacher_service.engines import build
    from teacher_service.engines.base import Item, ScoreOptions

    args = {name: ENGINE[name] for name in ("enforce_eager", "gpu_memory_utilization")}
    args["distributed_executor_backend"] = "uni"
    ids_1L = torch.tensor([TAUGHT_TOKENS])
    for family in families or CONFIGS:
        with tempfile.TemporaryDirectory() as home:
            save_for_vllm(family, Path(home), 0)
            model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
            with torch.no_grad():
                logp_LV = model(ids_1L[:, :-1]).logits[0].log_softmax(-1)
            own = logp_LV.gather(1, ids_1L[0, 1:, None])[:, 0].numpy()
            engine = build(TeacherConfig(path=home, dtype="float32", engine="vllm", engine_args=args), VOCAB)
            scores = engine.score([Item(np.array(TAUGHT_TOKENS, np.int32), 1)], ScoreOptions())
            engine.close()
        sys.stdout.write(f"{family}: {np.abs(np.asarray(scores.logprob_C) - own).max():.1e}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    {"replica": replicas, "teacher": teachers}[sys.argv[1]](*sys.argv[2:])
    os._exit(0)  # vLLM's engines do not end their threads
