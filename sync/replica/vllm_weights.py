"""Beside `vllm_compat`, every touch of vLLM 0.32 that weights need; all of it in a worker.

`model_loader.reload` (layerwise reload), `get_model_loader(...).get_all_weights`, what `ParallelLMHead` and
experts pack on the CPU, `model.lora_manager` with `LoRAModel` and `PEFTHelper`, and `model.compute_logits`,
which both model runners call outside of captured graphs.
tests/integration/test_replica.py and test_lora.py exercise all of it against the pinned version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
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

from sync.replica.vllm_compat import ADAPTER
from sync.snapshots.checkpoint import NamedTensors
from sync.tokenizers import never_sample_from, vocab_size

logger = logging.getLogger(__name__)


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
    their storage, so captured graphs stay valid; not run here). Raises what the model's loader raises, and
    ValueError for a parameter that got nothing; the model is then mixed, but can be loaded again.
    """
    held = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        expected = held & {name for name, _ in model.named_parameters()}  # without what vLLM computes of them
        loaded = model.load_weights(tensors)
        if past := _not_reloaded(model) & (loaded or set()):
            raise ValueError(
                f"vLLM loads {sorted(past)[:3]} past a reload, so that the old values would stay"
            )
        finalize_layerwise_reload(model, model_config)
    except BaseException:
        _abandon_reload(model)
        raise
    _repack_heads(model)
    if current_platform.is_cpu():
        _repack_experts(model)
    if missing := set() if loaded is None or model_config.quantization else expected - loaded:
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
