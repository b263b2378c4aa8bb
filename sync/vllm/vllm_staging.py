"""A checkpoint made ready for a live vLLM model while that generates; touches of vLLM 0.32 for it.

A shadow of the model has a module for each live one and no weights. vLLM's layerwise loading fills and
processes its layers one by one, as at a first load, so what a finished layer holds has the layout in which
the live layer computes. It is compared with the live tensors, and what differs waits in host memory, pinned
for a GPU. `place` copies it, each tensor into the live one of the same shape, which keeps its storage, and
assigns what a kernel keeps outside of tensors: on CPUs functions that hold a linear layer's packed weights.

The shadow shares with the live modules all attributes that are no tensors and no modules; loading replaces
such attributes and never changes them in place, as far as `why_not_staged` lets a model through.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    _layerwise_process,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_TENSORS,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

_STRUCTURE: Final = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    parameters = (get_layerwise_info(module).restore_metadata[0].values() for module in model.modules())
    return sum(tensor.nbytes for layer in parameters for tensor in layer)


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
        known = get_layerwise_info(live)
        parameters, buffers = known.restore_metadata
        tensors = _alike(parameters), _alike(buffers)
        info = LAYERWISE_INFO[shadow] = _Watched(tensors, known.restore_device)
        info.done = partial(self._processed, live, shadow)
        restore_layer_on_meta(shadow, info)
        for kind in (cast(dict[str, Any], shadow._parameters), cast(dict[str, Any], shadow._buffers)):
            for name, tensor in kind.items():
                if tensor is not None and not tensor.is_meta:  # vLLM loads it in place
                    if id(tensor) not in clones:
                        clones[id(tensor)] = _like(tensor, tensor.data.clone())
                    kind[name] = clones[id(tensor)]
        initialize_online_processing(shadow)

    def _processed(self, live: nn.Module, shadow: nn.Module, loaded: set[str]) -> None:
        method = getattr(shadow, "quant_method", None)
        if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
            cast(Any, method).moe_kernel.fused_experts.process_weights_after_loading(shadow)
        self._take(live, shadow, (loaded | shadow._parameters.keys()) - SKIP_LOAD_TENSORS)  # these come later

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
                self._copies.append((old.data, _in_host_memory(new)))
            if not current_platform.is_cpu():  # free the device's memory, layer by layer
                staged[name].data = torch.empty(0, dtype=new.dtype, device=new.device)

    def finish(self) -> None:
        """After the shadow's loader is through: process layers with padding, and take over what is left.

        Raises ValueError for what no swap can bring.
        """
        for live, shadow in self._pairs:
            info = get_layerwise_info(shadow)
            if info.can_load() and info.load_numel > 0:
                if is_deferred_attention_layer(shadow):
                    raise ValueError(f"{type(live).__name__} has tensors of its own, which are not staged")
                _layerwise_process(shadow, info)
        for (live, shadow), before in zip(self._pairs, self._before, strict=True):
            self._take(live, shadow, SKIP_TENSORS)
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
            LAYERWISE_INFO.pop(shadow, None)  # it refers to its key
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
        alike.weight_loader = _get_original_loader(alike)
    return alike


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers, which compare bit by bit."""
    return tensor.view(_BITS[tensor.element_size()])


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
