"""A vLLM engine on a tiny mixture of experts that records its routes, in a process of its own.

    python route_recorder.py FOLDER FOLDER_OF_THE_SWAP OUT.npz

Generates under chunked prefill and preemption, then swaps weights in the middle of a completion, then has the
first completion continued as the second turn of an episode, whose first routes are known. Writes every
sequence with its routes, and what happened on the way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sync.base.settings import ReplicaConfig

SEQUENCES, PROMPT, COMPLETION, SWAP_AT, ASKED = 8, 30, 40, 6, 9
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "onpolicy_distill",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    **ReplicaConfig(run="none", store_path=Path("store"), mirror=Path("mirror")).environment(),
}
ENGINE: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
ENGINE["gpu_memory_utilization"] = 0.2
SMALL = ENGINE | {"max_model_len": 128, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": 24}
SMALL |= {"block_size": 32, "num_gpu_blocks_override": 15}
"""Prompts come in chunks, and completions are preempted."""
OURS = {
    "weight_transfer_config": {"backend": "distill"},
    "worker_extension_cls": "sync.vllm.engine.WorkerExtension",
}


def written(program: str, *words: str | Path) -> dict[str, np.ndarray]:
    """What a program such as this one writes to the last of its words."""
    line = [sys.executable, program, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(np.load(words[-1]))


def swap(rpc: Callable[..., list[Any]], folder: str) -> str | None:
    """Bring an engine's worker to the checkpoint in `folder`; why it refuses it, None: it holds it."""
    rpc("distill_prepare", args=(folder, None))
    while not (answer := rpc("distill_prepared")[0])["done"]:
        time.sleep(0.01)
    return answer["error"] or rpc("distill_apply")[0]


class Recorded:
    """The engine, and what its record is told."""

    def __init__(self, folder: str) -> None:
        import vllm

        from sync.vllm.routing import RouteRecord

        self.happened: Counter[str] = Counter()
        write = RouteRecord.write

        def counted(record: Any, request: str, start: int, token_N: Any, *more: Any) -> None:
            again = start == 0 and request in record._requests
            self.happened.update(
                passes=1, preempted=again, prompts_in_part=start == 0 and len(token_N) < PROMPT
            )
            write(record, request, start, token_N, *more)

        RouteRecord.write = counted  # type: ignore[method-assign]
        llm = vllm.LLM(folder, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 26, **SMALL, **OURS)
        self.rpc, self.engine, self._params = llm.collective_rpc, llm.llm_engine, vllm.SamplingParams
        self.shape = self.rpc("distill_record_routes")[0]
        assert self.rpc("distill_record_routes")[0] == self.shape, "again changes nothing"
        self.record = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.distill_record

    def add(self, name: str, prompt: list[int], routes_from: int | None = 0) -> None:
        """Without a seed of its own: with one, a prompt in parts ends vLLM's engine on CPUs. As of a
        replica log-probabilities are asked for; nobody looks at them.

        `routes_from`: as in GeneratePrompt; None: no routes are wanted.
        """
        from sync.vllm.routing import ROUTES_FROM

        wanted = None if routes_from is None else {ROUTES_FROM: routes_from}
        params = self._params(
            max_tokens=COMPLETION, ignore_eos=True, detokenize=False, logprobs=0, extra_args=wanted
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def steps(self, limit: int | None = None) -> dict[str, list[int]]:
        """By name, prompt and completion, as far as `limit` steps finish them."""
        done: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests() and limit != 0:
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            limit = None if limit is None else limit - 1
        return done

    def take(self, name: str, tokens: list[int]) -> np.ndarray:
        from sync.vllm.routing import routes_of

        return routes_of(self.rpc("distill_routes", args=([name],))[0][0], np.array(tokens, np.int32))

    def finish(self, routes_from: int = 0) -> dict[str, Any]:
        """Arrays of all sequences in flight, taken as they finish."""
        found: dict[str, Any] = {}
        for name, tokens in self.steps().items():
            found |= {f"{name}/tokens": tokens, f"{name}/routes": self.take(name, tokens[routes_from:])}
        return found


def main(folder: str, swapped: str, out: str) -> None:
    recorded, found = Recorded(folder), dict[str, Any]()
    g = np.random.default_rng(0)
    prompts = [g.integers(0, 64, PROMPT).tolist() for _ in range(SEQUENCES)]
    for index, prompt in enumerate(prompts):
        recorded.add(f"first-{index}", prompt)
    found |= recorded.finish()
    recorded.add("swapped-0", prompts[0])
    recorded.steps(2 + SWAP_AT)  # the prompt takes two
    (held,) = recorded.record._requests.values()
    found["old rows"] = held.length
    assert swap(recorded.rpc, swapped) is None
    assert recorded.engine.reset_prefix_cache(reset_running_requests=True)
    found |= recorded.finish()
    asked = g.integers(0, 64, ASKED).tolist()
    recorded.add("turn", [*found["first-0/tokens"], *asked], len(found["first-0/routes"]))
    recorded.add("evaluation", prompts[1], None)
    recorded.steps(2)
    found["held beside an evaluation"] = len(recorded.record._requests)
    recorded.engine.abort_request(["evaluation"])
    found |= recorded.finish(len(found["first-0/routes"]))

    from sync.vllm import routing

    routing.KEPT_SECONDS = -1.0  # type: ignore[misc]
    recorded.add("left", prompts[0])
    recorded.steps(3)
    held_before = len(recorded.record._requests)
    recorded.engine.abort_request(["left"])
    recorded.add("other", prompts[1])
    recorded.steps()
    recorded.add("last", prompts[2])
    recorded.steps(1)
    found |= {"held before and after": [held_before, len(recorded.record._requests)]}
    found |= {f"happened {name}": count for name, count in recorded.happened.items()}
    found |= {f"shape {name}": count for name, count in recorded.shape.items()}
    np.savez(out, **found)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])
