"""vLLM's weight-transfer engine of this project: checkpoints or adapters from a folder, or a broadcast.

One class serves all of them, so that all load, record and revert in the same code. It differs from vLLM's
own engines in what a pause is for and in what failure means: everything but the last copy comes before it; an
update that fails in it is reverted (`WorkerExtension.distill_revert`) before anyone may resume, and a revert
that fails ends the process.

Beside `vllm_compat`, every touch of vLLM 0.32 that routes need is here too. Where the engine records them
itself (`enable-return-routed-experts`, the V2 model runner), it is `MoERunner.layer_id`. Where we do,
`MoERunner.router.set_capture_fn` with `_quant_method`, and of the V1 model runner `_model_forward`,
`_update_states`, `query_start_loc`, `input_batch.req_ids` and `requests`. tests/v2_runner and
tests/integration/test_replica_routing.py exercise it against the pinned version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from sync.base.address import token_from_environment
from sync.base.decoding import convert
from sync.base.errors import ConfigError, SnapshotError
from sync.base.settings import ReplicaConfig
from sync.vllm.routing import ROUTES_FROM, NativeRoutes, RouteRecord
from sync.vllm.swap import Place, Source, Swap
from sync.vllm.vllm_weights import initial_weights, leave_out_padding, stage_adapter, stage_weights
from sync.weights.broadcast import Receiver, Reception, in_thread
from sync.weights.snapshots.checkpoint import NamedTensors, read_folder
from sync.wire import BroadcastTicket, Routing


class CheckpointEngine(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Brings checkpoints into one worker's model, or adapters when it was started for them. Registered as
    "distill" by `sync.vllm.plugin`."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._config = ReplicaConfig.from_environment()
        leave_out_padding(model, vllm_config, self._config.known_ids)
        self._adapters = vllm_config.lora_config is not None
        start = partial(initial_weights, vllm_config, model)
        name, read = ("no adapter", tuple) if self._adapters else ("the model folder of the start", start)
        self.swap = Swap(Source(name, read, self._stage()))
        self._receiver: Receiver | None = None  # from the first broadcast on
        self._reception: Reception | None = None
        self._preparing: Future[None] | None = None

    def prepare(self, path: str | None, ticket: BroadcastTicket | None) -> None:
        """Begin to read the checkpoint or adapter folder `path`, or to receive it by this worker's `ticket`,
        and to stage it, in the background, after what began before."""
        before, reception = self._preparing, None
        if ticket is not None:
            if self._receiver is None:
                limit = self._config.timeout_seconds
                self._receiver = Receiver(limit, self.device, token_from_environment())
            reception = self._receiver.receive(ticket)

        def work() -> None:
            if before is not None:
                wait([before])
            self.swap.prepare(self._source(path, reception))

        self._reception, self._preparing = reception, in_thread(work)

    def progress(self) -> dict[str, Any]:
        """{"done": bool, "bytes": received by broadcast, "error": text or None} of what is being prepared."""
        if self._preparing is None:
            return {"done": True, "bytes": 0, "error": "nothing was asked for"}
        done, reception = self._preparing.done(), self._reception
        error = self._preparing.exception() if done else None
        return {
            "done": done,
            "bytes": 0 if reception is None else reception.bytes_received,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def settle(self) -> None:
        """Free what the last update replaced, in the background."""
        self._reception, self._preparing = None, in_thread(self.swap.settle)

    def _source(self, path: str | None, reception: Reception | None) -> Source:
        """Waits for the broadcast, where the version comes by one."""
        if path is not None:
            folder = Path(path)
            settings = (folder / "adapter_config.json").read_text() if self._adapters else None
            return Source(path, partial(read_folder, folder), self._stage(settings))
        assert reception is not None, "a path or a ticket"
        received = reception.result()
        if (received.adapter_config is not None) != self._adapters:
            kinds = ["an adapter", "a whole checkpoint"]
            sent, expected = reversed(kinds) if self._adapters else kinds
            raise SnapshotError(
                f"broadcast {received.group} is {sent} and this replica was started for {expected}: start "
                "trainer and replica with the same [trainer.lora]"
            )
        stage = self._stage(received.adapter_config)
        return Source(f"broadcast {received.group}", received.tensors.items, stage, received.digests)

    def _stage(self, settings: str | None = None) -> Callable[[NamedTensors], Place]:
        """`settings`: of `stage_adapter`; the empty adapter leaves the model as it was started."""
        if self._adapters:
            return partial(stage_adapter, self.model, self.vllm_config, settings)
        room = self._config.staging_bytes
        return partial(stage_weights, self.model, self.vllm_config, self.device, room)

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """Refused: vLLM's own session has no revert."""
        raise RuntimeError("weights come through /distill/v1/update alone")

    def _nothing(self, *_: Any) -> None:
        """Of that session: an update of ours is one call, so that it cannot be left half made."""

    init_transfer_engine = start_weight_update = finish_weight_update = _nothing

    def shutdown(self) -> None:
        """Let go of the trainer; a reception under way ends with its time-out."""
        if self._receiver is not None:
            self._receiver.close()


# --- what the API process calls -------------------------------------------------------------------------


class WorkerExtension:
    """What the API process may call in every vLLM worker by `collective_rpc`; arguments are plain data.

    Named by `--worker-extension-cls`: vLLM adds it to its worker's base classes, so `self` is a vLLM worker
    and all names carry a prefix. An update runs: distill_prepare, then distill_prepared until it is done,
    while generating; pause, distill_apply, distill_revert of all if any failed, resume, distill_settle.
    """

    weight_transfer_engine: CheckpointEngine
    vllm_config: Any
    model_runner: Any
    rank: int
    distill_record: RouteRecord | None = None
    """Set by the first `distill_record_routes`."""

    def distill_prepare(self, path: str | None, broadcast: dict[str, Any] | None) -> None:
        """Begin to stage a version, from a folder or by the ticket of this replica's first worker; worker i
        has the i-th rank from there. See `distill_prepared`."""
        ticket = None if broadcast is None else convert(broadcast, BroadcastTicket)
        if ticket is not None:
            ticket = msgspec.structs.replace(ticket, rank=ticket.rank + self.rank)
        self.weight_transfer_engine.prepare(path, ticket)

    def distill_prepared(self) -> dict[str, Any]:
        return self.weight_transfer_engine.progress()

    def distill_apply(self) -> str | None:
        """Put in place what is staged: why that failed in this worker; None: it holds the new version."""
        with set_current_vllm_config(self.vllm_config):
            return self.weight_transfer_engine.swap.apply()

    def distill_settle(self) -> None:
        """Free what an update replaced that succeeded in all workers."""
        self.weight_transfer_engine.settle()

    def distill_revert(self) -> None:
        """Load what was held before the last update (before the first one: what the engine was started with),
        or end this process."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.swap.revert_or_end()

    def distill_digests(self) -> dict[str, str] | None:
        """Checkpoint tensor name → BLAKE3 hex of the bytes last given to the loader; None: none were."""
        return self.weight_transfer_engine.swap.digests

    def distill_record_routes(self) -> dict[str, Any]:
        """Record the experts of every token from now on; again changes nothing. Call it before any request.

        {"layers": M, "chosen": K, "experts": E}, or {"error": why this engine cannot}; where it records them
        itself, "native" lists the layers that have experts. {} of all workers but the first: those of a
        tensor-parallel replica choose alike.
        """
        if self.rank > 0:
            return {}
        if native := native_routes(self.model_runner, self.vllm_config):
            return {"native": native.layers, **native.shape._asdict()}
        try:
            if self.distill_record is None:
                self.distill_record = record_routes(self.model_runner, self.vllm_config)
        except ConfigError as error:
            return {"error": str(error)}
        return self.distill_record.shape._asdict()

    def distill_routes(self, requests: list[str]) -> list[dict[str, Any] | None]:
        """Messages for `routing.routes_of` of these requests, whose completions were given out.
        They are forgotten here. None of all workers but the first."""
        record = self.distill_record
        return [None if record is None else record.take(request) for request in requests]


# --- the experts of tokens --------------------------------------------------------------------------------


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
    Raises ConfigError when routes cannot be recorded as this engine was started, or its model has no
    experts."""
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
    """Modules with experts, in the order of the model's layers."""
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
        """Stand in for the runner's `_model_forward`."""
        self._pass = [None] * len(self._pass)
        output = inner(**inputs)
        names = self._runner.input_batch.req_ids
        first = {name: place for name in names if (place := self._routes_from(name)) is not None}
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

    def _routes_from(self, name: str) -> int | None:
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
        """Stand in for the runner's `_update_states`, which learns of requests that ended."""
        self.record.end(scheduled.finished_req_ids)
        return inner(scheduled)
