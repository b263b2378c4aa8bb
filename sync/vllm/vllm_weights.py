"""Beside `vllm_compat`, every touch of vLLM 0.32 that weights need; all of it in a worker.

`model_loader.reload` (layerwise reload), `get_model_loader(...).get_all_weights`, what `ParallelLMHead` and
experts pack on the CPU, `model.lora_manager` with `LoRAModel`, `PEFTHelper` and how a manager merges and
holds an adapter, and `model.compute_logits`, which both model runners call outside of captured graphs.
tests/integration/test_replica.py and test_lora.py exercise all of it against the pinned version.

A checkpoint is made ready (`Staging`) while the live model generates. A shadow of the model has a module for
each live one and no weights. vLLM's layerwise loading fills and processes its layers one by one, as at a
first load, so what a finished layer holds has the layout in which the live layer computes. It is compared
with the live tensors, and what differs waits in host memory, pinned for a GPU. `place` copies it, each tensor
into the live one of the same shape, which keeps its storage, and assigns what a kernel keeps outside of
tensors: on CPUs functions that hold a linear layer's packed weights.

The shadow shares with the live modules all attributes that are no tensors and no modules; loading replaces
such attributes and never changes them in place, as far as `why_not_staged` lets a model through.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.attention.backend import AttentionImplBase

from sync.base.tokenizers import never_sample_from, vocab_size
from sync.vllm.swap import Place
from sync.vllm.vllm_compat import ADAPTER
from sync.weights.snapshots.checkpoint import NamedTensors

logger = logging.getLogger(__name__)
_STRUCTURE: Final = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """Put a whole checkpoint into a live model that is not staged, in place, through layerwise reload. Raises
    as `stage_weights`; the model is then mixed, but can be loaded again."""
    names = {name for name, _ in model.named_parameters()}
    layerwise.initialize_layerwise_reload(model)
    try:
        missing = _fill(model, names, tensors)
        layerwise.finalize_layerwise_reload(model, model_config)
    except BaseException:
        for layer in model.modules():  # the live tensors again, not placeholders: a new reload can start
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        raise
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            cast(Any, layer).quant_method.process_weights_after_loading(layer)  # a tied one loads nothing
        _pack_experts(layer)
    if model_config.quantization is None:
        _refuse(missing)


def _pack_experts(layer: nn.Module) -> None:
    """Pack experts as a CPU's kernel reads them: vLLM 0.32 does so only at its first load."""
    method = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
        cast(Any, method).moe_kernel.fused_experts.process_weights_after_loading(layer)


def _fill(model: Any, names: set[str], tensors: NamedTensors) -> set[str]:
    """Parameters that got nothing, of a model in layerwise reload that otherwise has those of `names`."""
    expected = names & {name for name, _ in model.named_parameters()}  # without what vLLM computes of them
    loaded = model.load_weights(tensors)
    infos = ((prefix, layer, layerwise.get_layerwise_info(layer)) for prefix, layer in model.named_modules())
    idle = [(prefix, layer) for prefix, layer, info in infos if info.can_load() and info.load_numel <= 0]
    kept = {f"{prefix}.{name}" for prefix, layer in idle for name, _ in layer.named_parameters(recurse=False)}
    if past := kept & (loaded or set()):
        raise ValueError(f"vLLM loads {sorted(past)[:3]} past a reload, so that the old values would stay")
    return set() if loaded is None else expected - loaded


def _refuse(missing: set[str]) -> None:
    if missing:
        raise ValueError(f"the checkpoint has nothing for {sorted(missing)[:3]}: publish a whole checkpoint")


@torch.no_grad()
def stage_adapter(model: Any, config: VllmConfig, settings: str | None, tensors: NamedTensors) -> Place:
    """Make an adapter ready for the place of the one before, under ADAPTER's number. `settings`: the text of
    its adapter_config.json, which says how `tensors` apply; None: an empty adapter. Raises ValueError for an
    adapter that does not fit."""
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

    def place() -> None:
        manager.remove_adapter(adapter.id)
        manager._registered_adapters[adapter.id] = adapter
        manager.activate_adapter(adapter.id)

    return place


# --- staging ----------------------------------------------------------------------------------------------


def why_not_staged(model: nn.Module, quantised: bool, room: int | None) -> str | None:
    """Why weights of this model load inside the pause; None: they are staged. `room`: bytes for them."""
    if quantised:
        return "the engine quantises them at every swap"
    for name, layer in model.named_modules():
        if is_deferred_attention_layer(layer) and not _plain(layer):
            return f"{name} ({type(layer).__name__}) computes weights of its own from those of other layers"
    needed = bytes_needed(model)
    if room is not None and needed > room:
        return f"staging takes {needed} bytes here and student.staging_bytes allows {room}"
    return None


def bytes_needed(model: nn.Module) -> int:
    """Most host memory that staging takes in this worker: every parameter once, a tied head's too."""
    infos = (layerwise.get_layerwise_info(module) for module in model.modules())
    return sum(tensor.nbytes for info in infos for tensor in info.restore_metadata[0].values())


def _plain(layer: nn.Module) -> bool:
    method = getattr(type(getattr(layer, "impl", None)), "process_weights_after_loading", None)
    return isinstance(layer, Attention) and method is AttentionImplBase.process_weights_after_loading


class _Watched(LayerReloadingInfo):
    """Tells which tensors of its layer were loaded, once that is processed."""

    done: Callable[[set[str]], None]

    def reset(self) -> None:
        loaded = {name for name, _ in self.loaded_weights}
        super().reset()
        if loaded:
            self.done(loaded)


class Staging:
    """One checkpoint on its way into `model`: `shadow` is loaded, in any thread, then `finish`, `close`, and
    `place` between two decode steps."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [(live, _bare_copy(live)) for live in model.modules()]
        shadows = {id(live): shadow for live, shadow in self._pairs}
        clones: dict[int, torch.Tensor] = {}
        for live, shadow in self._pairs:
            children = shadow._modules.items()
            shadow._modules = {n: None if child is None else shadows[id(child)] for n, child in children}
            self._empty(live, shadow, clones)
        self.shadow: Any = self._pairs[0][1]
        """What `load_weights` of the model fills."""
        self._before = [dict(shadow.__dict__) for _, shadow in self._pairs]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._new: dict[int, torch.Tensor | None] = {}  # id of a live tensor → the shadow's, on a CPU

    def _empty(self, live: nn.Module, shadow: nn.Module, clones: dict[int, torch.Tensor]) -> None:
        """Take the weights out of a shadow, and have vLLM process it when it is loaded again."""
        known = layerwise.get_layerwise_info(live)
        parameters, buffers = known.restore_metadata
        tensors = _alike(parameters), _alike(buffers)
        info = layerwise.LAYERWISE_INFO[shadow] = _Watched(tensors, known.restore_device)
        info.done = partial(self._processed, live, shadow)
        meta.restore_layer_on_meta(shadow, info)
        for kind in (cast(dict[str, Any], shadow._parameters), cast(dict[str, Any], shadow._buffers)):
            for name, tensor in kind.items():
                if tensor is not None and not tensor.is_meta:  # vLLM loads it in place
                    if id(tensor) not in clones:
                        clones[id(tensor)] = _like(tensor, tensor.data.clone())
                    kind[name] = clones[id(tensor)]
        layerwise.initialize_online_processing(shadow)

    def _processed(self, live: nn.Module, shadow: nn.Module, loaded: set[str]) -> None:
        _pack_experts(shadow)
        loaded |= shadow._parameters.keys()
        self._take(live, shadow, loaded - meta.SKIP_LOAD_TENSORS)  # these come later

    def _take(self, live: nn.Module, shadow: nn.Module, names: set[str]) -> None:
        """Keep what differs from the live tensors of these names."""
        present, staged = get_layer_tensors(live), get_layer_tensors(shadow)
        for name in sorted(names & staged.keys()):
            old, new = present.get(name), staged[name].data
            if new.is_meta or id(old) in self._new:
                continue
            if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(f"{name} of {type(live).__name__} has another layout than at the start")
            self._new[id(old)] = new if current_platform.is_cpu() else None
            if not torch.equal(_bits(old.data), _bits(new)):
                pinned = None if new.is_cpu else torch.empty_like(new, device="cpu", pin_memory=True)
                self._copies.append((old.data, new if pinned is None else pinned.copy_(new)))
            if not current_platform.is_cpu():  # free the device's memory, layer by layer
                staged[name].data = torch.empty(0, dtype=new.dtype, device=new.device)

    def finish(self) -> None:
        """Process layers with padding and take over what is left, when the shadow's loader is through.
        Raises ValueError for what no swap can bring."""
        for live, shadow in self._pairs:
            info = layerwise.get_layerwise_info(shadow)
            if info.can_load() and info.load_numel > 0:
                if is_deferred_attention_layer(shadow):
                    raise ValueError(f"{type(live).__name__} has tensors of its own, which are not staged")
                layerwise._layerwise_process(shadow, info)
        for (live, shadow), before in zip(self._pairs, self._before, strict=True):
            self._take(live, shadow, meta.SKIP_TENSORS)
            self._pack_tied_head(live, shadow)
            for name, value in shadow.__dict__.items():
                if name not in _STRUCTURE and before.get(name) is not value:
                    self._attributes.append((live, name, value))

    def _pack_tied_head(self, live: Any, shadow: Any) -> None:
        """A head tied to the embedding has no weights of its own to load, but on a CPU a packed copy."""
        if isinstance(live, ParallelLMHead) and hasattr(live, "cpu_linear") and shadow.weight.is_meta:
            if (new := self._new.get(id(live.weight))) is None:  # not tied, and not in the checkpoint
                return
            shadow.weight = nn.Parameter(new, requires_grad=False)
            shadow.quant_method.process_weights_after_loading(shadow)

    def close(self) -> None:
        """Release the shadow; again changes nothing."""
        for _, shadow in self._pairs:
            # Its key and vLLM's loaders refer to it in circles, which would hold this staging's tensors until
            # Python collects its oldest objects: hundreds of versions, in an engine that makes few.
            info = layerwise.LAYERWISE_INFO.pop(shadow, None)
            if isinstance(info, _Watched):
                del info.done
            shadow.__dict__.clear()
        self._pairs, self._before, self._new = [], [], {}

    def drop(self) -> None:
        """Free what was staged: the error of a failed staging is kept, and refers to this."""
        self._copies, self._attributes = [], []

    def place(self) -> None:
        """Put everything into the live model. Nothing is read, hashed, allocated or freed here."""
        for live, staged in self._copies:
            live.copy_(staged, non_blocking=True)
        for at, (module, name, value) in enumerate(self._attributes):
            self._attributes[at] = module, name, module.__dict__.get(name)
            setattr(module, name, value)
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()


def _bare_copy(module: nn.Module) -> nn.Module:
    """One that shares all attributes, but owns which parameters, buffers and modules it has."""
    bare = module.__class__.__new__(module.__class__)
    bare.__dict__ = dict(module.__dict__) | {name: copy.copy(module.__dict__[name]) for name in _STRUCTURE}
    return bare


def _alike(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _like(tensor, tensor.data) for name, tensor in tensors.items()}


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` with the class and attributes of `tensor`, without what a reload put around its loader."""
    alike = data.detach()
    alike.__class__, alike.__dict__ = tensor.__class__, tensor.__dict__.copy()
    if hasattr(alike, "weight_loader"):
        alike.weight_loader = layerwise._get_original_loader(alike)
    return alike


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers, which compare bit by bit."""
    return tensor.view(_BITS[tensor.element_size()])
