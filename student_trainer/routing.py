"""Routing replay: a mixture-of-experts student is trained through the experts that its rollouts were sampled
through.

A router scores all experts of its layer, chooses K by `topk` and weighs them. The rollout engine and the
trainer round differently, so they choose other experts for some tokens, and p is then further from μ than any
rounding. Here a router's topk is answered with the experts that the rollout engine recorded. All else is the
family's own code on the live logits: the weights follow them, and gradients reach the router.

Letters: S places of a forward pass (rows · longest row, with padding, in the order of the flattened tokens),
M mixture-of-experts layers, K experts of a token, E experts of a layer, G groups of experts, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sync.base.errors import ConfigError, DataError

LIVE: Final = -1
"""Stands for every expert of a token and layer without a recorded route: the router chooses."""
FAMILIES: Final = frozenset(
    {
        "DeepseekV2TopkRouter",
        "DeepseekV3TopkRouter",
        "Glm4MoeTopkRouter",
        "GptOssTopKRouter",
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
    }
)
"""Routers of transformers that tests/unit/student_trainer/test_routing.py covers. They have `top_k` and
`num_experts`, choose by one topk over [S, E], and return (logits, weights, ids)."""
SHARED: Final = "TokenChoiceTopKRouter"
"""DeepSpeed AutoEP's router of experts that ranks share, in place of any family's: (weights, ids, counts)."""


Routers = dict[str, Any]
"""Name → module of what chooses the experts of a layer, `top_k` = K of `num_experts` = E."""


def routers(model: nn.Module) -> Routers:
    """The routers of a transformers model in the order of its layers; empty: it has no experts.

    `model` may be wrapped, by peft or as `engine.Student`. Raises ConfigError when it has experts that are
    not routed by one of FAMILIES.
    """
    model_routers, others, blocks = Routers(), [], 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in FAMILIES or kind == SHARED:
            model_routers[name] = module
        elif kind.endswith(("Router", "Gate", "Gating")):
            others.append(f"{kind} at {name}")
        elif kind.endswith("Experts"):
            blocks += 1
    configured = []
    if not model_routers:  # some families have no module of a telling name, but count experts
        fields = (vars(module.config) for module in model.modules() if hasattr(module, "config"))
        counts = {name: value for field in fields for name, value in field.items() if "expert" in name}
        configured = [f"{name} = {n}" for name, n in counts.items() if type(n) is int and n > 0]
    if others or blocks > len(model_routers) or configured:
        what = others[0] if others else f"{blocks} blocks of experts with {len(model_routers)} known routers"
        raise ConfigError(
            f"routing replay does not know how this model routes ({', '.join([what, *configured])}); "
            f"known are {', '.join(sorted(FAMILIES))}: train this family without replay"
        )
    return model_routers


def placed(
    recorded: Sequence[np.ndarray],
    start_R: Sequence[int],
    length_R: Sequence[int],
    shape: tuple[int, int, int],
) -> Tensor:
    """Routes int16 or int32 [S, M, K] = `shape`, of R rows with `length_R` tokens.

    Row r begins at place `start_R[r]`: at r · L where rows are padded to L, behind the row before where they
    are packed into one. `recorded[r]` holds the experts of its first tokens, integers [at most length, M, K].
    The places without a record (a row's last token, padding) are LIVE. Raises DataError for another shape.
    """
    wide = any(rows.dtype.itemsize > 1 for rows in recorded)
    routes_SMK = torch.full(shape, LIVE, dtype=torch.int32 if wide else torch.int16)
    for row, (rows, start, length) in enumerate(zip(recorded, start_R, length_R, strict=True)):
        if rows.shape[1:] != shape[1:] or len(rows) > length:
            raise DataError(
                f"row {row} of a batch has {length} tokens and routes {list(rows.shape)}: at most one a "
                f"token is possible, of {shape[1]} layers with {shape[2]} experts"
            )
        routes_SMK[start : start + len(rows)] = torch.from_numpy(rows.astype(np.int32))
    return routes_SMK


def check_routes(routed: Routers, routes_SMK: Tensor) -> None:
    """Raise DataError unless `routes_SMK` (signed integers) names K different experts below E, or none, for
    every token and layer."""
    layers, chosen = len(routed), {module.top_k for module in routed.values()}
    signed = not routes_SMK.is_floating_point() and routes_SMK.dtype.is_signed
    if not signed or routes_SMK.ndim != 3 or len(chosen) != 1 or routes_SMK.shape[1:] != (layers, *chosen):
        raise DataError(
            f"routes {list(routes_SMK.shape)} of {routes_SMK.dtype}: they must be signed integers, for "
            f"{layers} layers of experts and {sorted(chosen)} experts a token"
        )
    experts_M = torch.tensor([module.num_experts for module in routed.values()], device=routes_SMK.device)
    order_SMK = routes_SMK.sort(-1).values
    bad_SM = (order_SMK[..., 0] < LIVE) | (order_SMK[..., -1] >= experts_M)
    bad_SM |= (order_SMK[..., 0] == LIVE) & (order_SMK[..., -1] != LIVE)
    bad_SM |= ((order_SMK[..., 1:] == order_SMK[..., :-1]) & (order_SMK[..., 1:] != LIVE)).any(-1)
    if bool(bad_SM.any()):
        place, layer = (int(index) for index in bad_SM.nonzero()[0])
        name, module = list(routed.items())[layer]
        raise DataError(
            f"the route of place {place} in {name} is {routes_SMK[place, layer].tolist()}: it "
            f"must name {module.top_k} different experts below {module.num_experts}, or be all "
            f"{LIVE}; the rollout engine and the trainer serve different models, or the batch was altered"
        )


@contextmanager
def replayed(routed: Routers, routes_SMK: Tensor) -> Iterator[None]:
    """Have the routers of a model take the experts of `routes_SMK` in every forward pass over S tokens.

    It must hold until the backward pass has ended: activation checkpointing runs the routers again. A
    backward pass after it raises DataError, as does a route that `check_routes` refuses, a forward pass over
    another number of tokens, and a router that never ran. Raises ConfigError for a router that did not choose
    by one topk. In no case does a model train through other experts in silence.
    """
    check_routes(routed, routes_SMK)
    before = [vars(module).get("forward") for module in routed.values()]
    pairs = zip(routed.items(), routes_SMK.unbind(1), strict=True)
    replays = [_Replay(*router, routes_SK) for router, routes_SK in pairs]
    for module, replay in zip(routed.values(), replays, strict=True):
        # an attribute of the instance: hooks, which gather a partitioned weight, run around it as before
        module.forward = replay.forward
    try:
        yield
    finally:
        for module, replay, forward in zip(routed.values(), replays, before, strict=True):
            replay.over = True
            del module.forward
            if forward is not None:
                module.forward = forward
    if unused := sorted(replay.name for replay in replays if not replay.ran):
        raise DataError(
            f"routes were given to {unused[0]}, which did not run: another implementation of its layer chose "
            "the experts; train this family without replay"
        )


class _Replay(TorchFunctionMode):
    """One router in one use of `replayed`: while it runs, its topk over experts gives the recorded ones; that
    over groups, their groups.

    The groups matter to a family that takes its weights from scores without those of other groups
    (DeepSeek-V2): a recorded expert of a group that is not among the live ones would weigh nothing.
    """

    def __init__(self, name: str, module: Any, routes_SK: Tensor) -> None:
        super().__init__()
        self.name, self.ran, self.over = name, False, False
        self._module, self._live, self._routes_SK = module, module.forward, routes_SK
        self._groups = int(getattr(module, "num_group", None) or 1)
        self._answers = 0
        """How often the experts were asked for, in the newest run."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """What the router's own forward gives when its topk is answered with the routes."""
        kind, self._answers = type(self._module).__name__, 0
        with self:
            result = self._live(*args, **options)
        if self._answers != 1:
            raise ConfigError(
                f"routing replay: {kind} at {self.name} chose its experts by {self._answers} calls of topk, "
                "not by one: train this family without replay"
            )
        self.ran = True
        weights_SK = result[0 if kind == SHARED else 1]
        if weights_SK.requires_grad:
            weights_SK.register_hook(self._in_time)
        return result

    def _in_time(self, _: Tensor) -> None:
        if self.over:
            raise DataError("the backward pass ran after its routes were taken away: keep them until it ends")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.ndim != 2:
            return result
        scores, live = args[0], result.indices
        of_experts = (scores.shape[1], live.shape[1]) == (self._module.num_experts, self._module.top_k)
        if not of_experts and not 1 < self._groups == scores.shape[1]:
            return result
        if len(live) != len(self._routes_SK):
            raise DataError(
                f"{self.name} routes {len(live)} tokens, and routes of {len(self._routes_SK)} were "
                "given: lay them out for this forward pass"
            )
        routes_SK = self._routes_SK.to(live)
        if of_experts:
            self._answers += 1
            ids = torch.where(routes_SK == LIVE, live, routes_SK)
        else:
            ids = self._groups_of(routes_SK, live)
        return torch.return_types.topk((scores.gather(1, ids), ids))

    def _groups_of(self, routes_SK: Tensor, live: Tensor) -> Tensor:
        """Groups of the recorded experts, in as many columns as either needs: a group may be named twice."""
        recorded = routes_SK.clamp(min=0) // (self._module.num_experts // self._groups)
        width = max(live.shape[1], recorded.shape[1])
        live, recorded = (
            torch.cat([ids, ids[:, :1].expand(-1, width - ids.shape[1])], 1) for ids in (live, recorded)
        )
        return torch.where(routes_SK[:, :1] == LIVE, live, recorded)
