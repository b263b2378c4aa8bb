"""Beside `vllm_compat` and `vllm_staging`, every touch of vLLM 0.32 that weights need; all of it in a worker.

`model_loader.reload` (layerwise reload), `get_model_loader(...).get_all_weights`, what `ParallelLMHead` and
experts pack on the CPU, `model.lora_manager` with `LoRAModel`, `PEFTHelper` and how a manager merges and
holds an adapter, and `model.compute_logits`, which both model runners call outside of captured graphs.
tests/integration/test_replica.py and test_lora.py exercise all of it against the pinned version.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
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
from vllm.tokenizers import cached_tokenizer_from_config

from sync.base.tokenizers import never_sample_from, vocab_size
from sync.vllm.swap import Place
from sync.vllm.vllm_compat import ADAPTER
from sync.vllm.vllm_staging import Staging, why_not_staged
from sync.weights.snapshots.checkpoint import NamedTensors

logger = logging.getLogger(__name__)


def leave_out_padding(model: Any, config: VllmConfig, known_ids: int | None) -> None:
    """Never sample an id that the tokenizer does not have, or that is not below `known_ids`.

    Nothing changes where the model has no such row.

    vLLM's other way to logits, batch-sharded sampling, refuses the max-logprobs of -1 that we start with.
    """
    rows = config.model_config.get_vocab_size()
    known = vocab_size(cached_tokenizer_from_config(config.model_config), known_ids)
    if known < rows:
        logger.info("ids %d to %d have no token: they are never sampled", known, rows - 1)
        never_sample_from(model, known)


def initial_weights(config: VllmConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint the engine was started with, by vLLM's own loader (local folder or Hub)."""
    yield from get_model_loader(config.load_config).get_all_weights(config.model_config, model)


@torch.no_grad()
def stage_weights(
    model: Any, config: VllmConfig, device: torch.device, room: int | None, tensors: NamedTensors
) -> Place:
    """Make a whole checkpoint ready for a live model, which may generate meanwhile.

    `device`: the worker's, with its index: a thread begins on the first one. `room`: of `why_not_staged`.

    Raises what the model's loader raises, and ValueError for a parameter that got nothing; the model is as it
    was. A model that is not staged is loaded by what is returned, for the reason that is logged.
    """
    quantised = config.model_config.quantization is not None
    if reason := why_not_staged(model, quantised, room):
        logger.warning("weights are loaded inside the pause: %s", reason)
        return partial(load_weights, model, config.model_config, tensors)
    names, staging = {name for name, _ in model.named_parameters()}, Staging(model)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            missing = _fill(staging.shadow, names, tensors)
            staging.finish()
        _refuse(missing)
    except BaseException:
        staging.drop()
        raise
    finally:
        staging.close()
    return staging.place


@torch.no_grad()
def load_weights(model: Any, model_config: ModelConfig, tensors: NamedTensors) -> None:
    """Put a whole checkpoint into a live model that is not staged, in place, through layerwise reload.

    Raises as `stage_weights`; the model is then mixed, but can be loaded again.
    """
    names = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        missing = _fill(model, names, tensors)
        finalize_layerwise_reload(model, model_config)
    except BaseException:
        _abandon_reload(model)
        raise
    if current_platform.is_cpu():
        _repack(model)
    if model_config.quantization is None:
        _refuse(missing)


def _fill(model: Any, names: set[str], tensors: NamedTensors) -> set[str]:
    """Parameters that got nothing, of a model in layerwise reload that otherwise has those of `held`."""
    expected = names & {name for name, _ in model.named_parameters()}  # without what vLLM computes of them
    loaded = model.load_weights(tensors)
    if past := _not_reloaded(model) & (loaded or set()):
        raise ValueError(f"vLLM loads {sorted(past)[:3]} past a reload, so that the old values would stay")
    return set() if loaded is None else expected - loaded


def _refuse(missing: set[str]) -> None:
    if missing:
        raise ValueError(f"the checkpoint has nothing for {sorted(missing)[:3]}: publish a whole checkpoint")


@torch.no_grad()
def stage_adapter(model: Any, config: VllmConfig, settings: str | None, tensors: NamedTensors) -> Place:
    """Make an adapter ready for the place of the one before, under ADAPTER's number.

    `settings`: the text of its adapter_config.json, which says how `tensors` apply; None: an empty adapter.
    Raises ValueError for an adapter that does not fit.
    """
    manager, lora = model.lora_manager, config.lora_config
    assert lora is not None, "started with --enable-lora"
    if settings is None:
        rank = lora.max_lora_rank  # a dummy is all zeros
        adapter = manager.create_dummy_lora(ADAPTER.adapter_id, rank, model.embedding_modules)
    else:
        helper = PEFTHelper.from_dict(json.loads(settings))
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
    manager._validate_moe_lora_format(adapter)
    manager._create_merged_loras_inplace(adapter)
    return partial(_place_adapter, manager, adapter)


def _place_adapter(manager: Any, adapter: LoRAModel) -> None:
    manager.remove_adapter(adapter.id)
    manager._registered_adapters[adapter.id] = adapter
    manager.activate_adapter(adapter.id)


def _not_reloaded(model: Any) -> set[str]:
    """Parameters of layers to which the reload under way gave nothing."""
    infos = ((prefix, layer, get_layerwise_info(layer)) for prefix, layer in model.named_modules())
    idle = [(prefix, layer) for prefix, layer, info in infos if info.can_load() and info.load_numel <= 0]
    return {f"{prefix}.{name}" for prefix, layer in idle for name, _ in layer.named_parameters(recurse=False)}


def _abandon_reload(model: torch.nn.Module) -> None:
    """Put the live tensors back where layerwise reload left placeholders, so that a new reload can start."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _repack(model: torch.nn.Module) -> None:
    """Pack anew what the CPU's kernels read in a layout of their own and a reload leaves as it was: an output
    head that is tied to the embedding, so has no weights of its own to load, and experts, which vLLM 0.32
    packs only at its first load."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            method.process_weights_after_loading(layer)
        elif isinstance(method, UnquantizedFusedMoEMethod):
            cast(Any, method).moe_kernel.fused_experts.process_weights_after_loading(layer)
