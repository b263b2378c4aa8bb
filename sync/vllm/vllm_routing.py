"""Beside `vllm_compat`, every touch of vLLM 0.32 that routes need; all of it in a worker.

Where the engine records them itself (`enable-return-routed-experts`, the V2 model runner), it is
`MoERunner.layer_id`. Where we do, `MoERunner.router.set_capture_fn` with `_quant_method`, and of the V1 model
runner `_model_forward`, `_update_states`, `query_start_loc`, `input_batch.req_ids` and `requests`.
tests/v2_runner and tests/integration/test_replica_routing.py exercise it against the pinned version.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from sync.base.errors import ConfigError
from sync.vllm.routing import ROUTES_FROM, NativeRoutes, RouteRecord
from sync.wire import Routing


def native_routes(runner: Any, config: VllmConfig) -> NativeRoutes | None:
    """What is needed to read the routes that this engine records itself; None: it does not."""
    if not config.aux_output_config.enable_return_routed_experts:
        return None
    model, layers = config.model_config, [layer.layer_id for layer in _layers(runner)]
    return NativeRoutes(
        Routing(len(layers), model.get_num_experts_per_tok(), model.get_num_experts()), layers
    )


def record_routes(runner: Any, config: VllmConfig) -> RouteRecord:
    """The record that every later forward pass of this model runner adds to, for requests with ROUTES_FROM.

    Raises ConfigError when routes cannot be recorded as this engine was started, or its model has no experts.
    """
    layers = _layers(runner)
    if problem := _problem(runner, config) or _problem_of_layers(layers):
        raise ConfigError(f"this replica cannot record the experts of its tokens: {problem}")
    routers = [layer.router for layer in layers]
    shape = Routing(len(routers), routers[0].top_k, routers[0].global_num_experts)
    recorder = _Recorder(runner, RouteRecord(shape))
    for index, router in enumerate(routers):
        router.set_capture_fn(partial(recorder.capture, index))
    runner._model_forward = partial(recorder.forward, runner._model_forward)
    runner._update_states = partial(recorder.update_states, runner._update_states)
    return recorder.record


def _layers(runner: Any) -> list[Any]:
    """In the order of the model's layers."""
    return [module for module in runner.model.modules() if isinstance(module, MoERunner)]


def _problem(runner: Any, config: VllmConfig) -> str | None:
    """Why this engine, as it was started, would give no or wrong routes; None: it would not."""
    parallel = config.parallel_config
    wrong = {
        "prefix caching is on, and what a request reads from the cache has no routes: set "
        "enable-prefix-caching = false": config.cache_config.enable_prefix_caching,
        "the model is compiled, which was not tried: set enforce-eager = true": (
            config.compilation_config.mode != CompilationMode.NONE
        ),
        "speculative decoding was not tried: leave it out": config.speculative_config is not None,
        "pipeline stages hold parts of the layers: set pipeline-parallel-size = 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "data-parallel ranks mix their tokens: set data-parallel-size = 1": parallel.data_parallel_size > 1,
        "images take the place of tokens: use a model of text alone": (
            config.model_config.supports_multimodal_inputs
        ),
        f"{type(runner).__module__} is another model runner than was tried, which is vLLM's first (V1)": (
            not hasattr(runner, "_model_forward") or not hasattr(runner, "query_start_loc")
        ),
    }
    return next((problem for problem, holds in wrong.items() if holds), None)


def _problem_of_layers(layers: list[Any]) -> str | None:
    if not layers:
        return "its model has no mixture-of-experts layer"
    fused = [layer for layer in layers if layer._quant_method.is_monolithic]
    if fused:
        return f"{type(fused[0]._quant_method).__name__} chooses experts inside of its kernel"
    other = [layer.router for layer in layers if not isinstance(layer.router, BaseRouter)]
    if other:
        return f"{type(other[0]).__name__} tells nobody what it chooses"
    if any(layer.router.capture_fn is not None for layer in layers):
        return "they are recorded already"
    shapes = {(layer.router.top_k, layer.router.global_num_experts) for layer in layers}
    return f"its layers differ in experts: {sorted(shapes)}" if len(shapes) > 1 else None


class _Recorder:
    """What one forward pass chose in every layer, then the record by request."""

    def __init__(self, runner: Any, record: RouteRecord) -> None:
        self.record, self._runner = record, runner
        self._pass: list[Tensor | None] = [None] * record.shape.layers

    def capture(self, layer: int, chosen_NK: Tensor) -> None:
        """Called by the router of `layer`, in warm-up passes too."""
        self._pass[layer] = chosen_NK.clone()  # a kernel may use the memory again

    def forward(self, inner: Any, **inputs: Any) -> Any:
        """In the place of the runner's `_model_forward`."""
        self._pass = [None] * len(self._pass)
        output = inner(**inputs)
        names = self._runner.input_batch.req_ids
        first = {name: place for name in names if (place := self._wanted(name)) is not None}
        if not first:  # a warm-up, or an evaluation
            return output
        ends = self._runner.query_start_loc.np[1 : self._runner.input_batch.num_reqs + 1].tolist()
        route_NMK = self._stacked(ends[-1])
        token_N, position_N = (
            inputs[name][: ends[-1]].cpu().numpy().astype(np.int32) for name in ("input_ids", "positions")
        )
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            if name in first:
                of_name = token_N[start:end], route_NMK[start:end]
                self.record.write(name, int(position_N[start]), *of_name, first[name])
        return output

    def _wanted(self, name: str) -> int | None:
        """First position of a request whose route is wanted; None: none is."""
        params = self._runner.requests[name].sampling_params
        first = ((params and params.extra_args) or {}).get(ROUTES_FROM)
        return first if isinstance(first, int) else None  # what others send under this name is not ours

    def _stacked(self, tokens: int) -> np.ndarray:
        """[N = tokens, M, K]. Raises ConfigError, which ends the engine: its record would be wrong."""
        chosen = [ids for ids in self._pass if ids is not None]
        shape = self.record.shape
        if len(chosen) != shape.layers or any(
            len(ids) < tokens or ids.shape[1] != shape.chosen for ids in chosen
        ):
            raise ConfigError(
                f"a pass over {tokens} tokens chose experts {[list(ids.shape) for ids in chosen]} in "
                f"{shape.layers} layers of {shape.chosen}: this model's routes cannot be recorded"
            )
        kind = torch.uint8 if shape.dtype == "u1" else torch.int32
        return torch.stack([ids[:tokens].to(kind) for ids in chosen], 1).cpu().numpy()

    def update_states(self, inner: Any, scheduled: Any) -> Any:
        """In the place of the runner's `_update_states`, which learns of requests that ended."""
        self.record.end(scheduled.finished_req_ids)
        return inner(scheduled)
