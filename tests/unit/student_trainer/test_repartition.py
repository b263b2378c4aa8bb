"""Shards of another number of ranks, against arrays that are simply cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_step import zero_shards
from torch import Tensor

from student_trainer.checkpoint import Place, layout, rebuild
from student_trainer.ranks import Ranks
from sync.base.errors import DataError

SHAPES = [{"a": (3, 5), "b": (1,)}, {"c": (7,)}]


def wholes(seed: float) -> list[dict[str, Tensor]]:
    """None has a number that another one begins with."""
    sizes = [{name: torch.Size(shape).numel() for name, shape in group.items()} for group in SHAPES]
    return [{name: seed + torch.arange(n, 2 * n) for name, n in group.items()} for group in sizes]


def flat(ranks: int, rank: int, seed: float) -> list[Tensor]:
    return [torch.cat([zero_shards(t, ranks)[rank] for t in group.values()]) for group in wholes(seed)]


def saved(ranks: int, held: Any = flat, **more: Any) -> list[dict[str, Any]]:
    """What so many ranks saved of two parameter groups."""
    shards: list[dict[str, Any]] = []
    for rank in range(ranks):
        moments = enumerate(held(ranks, rank, 100.0))
        state = {i: {"step": torch.tensor(4.0), "exp_avg": moment, **more} for i, moment in moments}
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
        shards.append({"fp32_flat_groups": held(ranks, rank, 0.0), "overflow": False})
        shards[-1]["optimizer_state_dict"] = {"state": state, "param_groups": groups}
        shards[-1]["ds_zero_partition_groups"] = ["of the old ranks"]
    return shards


def check(state: dict[str, Any], masters: list[Tensor], moments: list[Tensor]) -> None:
    """A rank's state holds these, without their padding."""
    assert "ds_zero_partition_groups" not in state
    assert len(state["fp32_flat_groups"]) == len(masters)
    for index, (master, moment) in enumerate(zip(masters, moments, strict=True)):
        assert torch.equal(state["fp32_flat_groups"][index], master.clamp(min=0))
        assert torch.equal(state["optimizer_state_dict"]["state"][index]["exp_avg"], moment.clamp(min=0))


@pytest.mark.parametrize("old", [1, 2, 3, 8])
@pytest.mark.parametrize("new", [1, 2, 3, 8, 17])
def test_masters_moments_and_settings_are_those_that_were_saved(old: int, new: int) -> None:
    places = layout(SHAPES, old)
    groups = [[places["a"], places["b"]], [places["c"]]]
    for rank in range(new):
        state = rebuild(saved(old), groups, [0, 1], Ranks(rank, new, torch.device("cpu")))
        assert state["overflow"] is False
        check(state, flat(new, rank, 0.0), flat(new, rank, 100.0))
        optimizer = state["optimizer_state_dict"]
        assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
        assert [optimizer["state"][index]["step"] for index in (0, 1)] == [4.0, 4.0]


def test_flat_groups_may_differ_from_the_saved_ones() -> None:
    places = layout(SHAPES, 2)
    state = rebuild(saved(2), [[places[name]] for name in "abc"], [0, 0, 1], Ranks(0, 1, torch.device("cpu")))
    assert [group["params"] for group in state["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]
    assert torch.equal(state["fp32_flat_groups"][2], torch.arange(7.0, 14.0))


def test_a_state_that_cannot_be_cut_is_refused() -> None:
    shards = saved(2, row=torch.zeros(3))
    shards[1]["optimizer_state_dict"]["state"][0]["row"] = torch.ones(3)
    places = layout(SHAPES, 2)
    with pytest.raises(DataError, match="resume on as many ranks"):
        rebuild(shards, [[places["a"]]], [0], Ranks(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (6, 2), (2, 6), (4, 6)])
def test_shared_experts_come_to_the_ranks_that_hold_the_same_ones_now(old: int, new: int) -> None:
    """Two ranks share the experts `x`: those of even and of odd ranks are others; `a` lies over all ranks."""
    experts = [torch.arange(7.0) + 10, torch.arange(7.0) + 20]

    def held(size: int, rank: int, more: float) -> list[Tensor]:
        own = zero_shards(experts[rank % 2] + more, size // 2)[rank // 2]
        return [zero_shards(torch.arange(15.0) + more, size)[rank], own]

    places = layout([{"a": (3, 5)}, {"x": (7,)}], old, {"x": 2})
    assert places["x"] == Place(1, 0, 7, 2)
    groups = [[places["a"]], [places["x"]]]
    for rank in range(new):
        state = rebuild(saved(old, held), groups, [0, 1], Ranks(rank, new, torch.device("cpu")))
        check(state, held(new, rank, 0.0), held(new, rank, 100.0))


def test_parameters_behind_shared_experts_in_a_flat_group_are_found() -> None:
    assert layout([{"x": (7,), "a": (9,)}], 4, {"x": 2})["a"] == Place(0, 4, 9)
