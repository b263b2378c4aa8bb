"""Experts that ranks share: the check of replaced layers, shards, replay.

AutoEP's layers are made here without a launcher; tests/integration/test_expert_parallel.py has the ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_step import ALONE, zero_shards
from routed_models import BY_RANKS, CHOSEN, EXPERTS, build, gradients, live_routes, loss_of
from torch import Tensor

from distill.model_facts import expert_parameters, layers_of_experts
from student_trainer import parallelism
from student_trainer.config import TrainerSettings
from student_trainer.engine import Student
from student_trainer.expert_layers import LIMITS, Part, check_experts, originals, parts
from student_trainer.ranks import Ranks
from student_trainer.routing import replayed, routers
from student_trainer.weights import Weights
from sync.base.errors import ConfigError
from sync.wire.head import HeadShape

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_shared = pytest.mark.parametrize("family", BY_RANKS)


def section_of(student: Student) -> dict[str, Any]:
    settings = TrainerSettings(deepspeed=Path(), expert_parallel=2)
    return parallelism.section(settings, student.config.model_type)


def replace_layers(student: Student, section: dict[str, Any], size: int = 1, rank: int = 0) -> None:
    """What deepspeed.initialize does with the layers of one rank; with size 1 they run without peers."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    auto = AutoEP(student, parse_autoep_config(section | {"autoep_size": size}))
    auto.replace_moe_layers(auto.ep_parser(), size, rank)


def autoep_layers(student: Student) -> list[Any]:
    return [layer for layer in student.modules() if getattr(layer, "_is_autoep_layer", False)]


def student_of(family: str) -> Student:
    return Student(build(family), HeadShape(31), 8)


def test_experts_that_autoep_refuses_are_named() -> None:
    named = {"num_experts_attr": "num_local_experts", "router_pattern": "router"}
    section = section_of(student_of("olmoe")) | named
    with pytest.raises(ConfigError, match="clamp their SwiGLU"):
        originals(student_of("gpt-oss"), section, 0)


@pytest.mark.parametrize("what", ["a scale", "an expert", "nothing was replaced"])
def test_a_replaced_layer_that_differs_in_one_thing_is_found(what: str) -> None:
    student, why = student_of("qwen3"), r"layers\.2\.mlp with"
    before = originals(student, section_of(student), 0)
    if what == "nothing was replaced":
        why = r"left model\.model\.layers\.0\.mlp as it was"
    else:
        replace_layers(student, section_of(student))
    layer: Any = student.get_submodule("model.model.layers.2.mlp")
    if what == "a scale":
        layer.router.route_scale *= 1 + 1e-4
    elif what == "an expert":
        layer.experts.w3.data[5] *= 1 + 1e-3
    with pytest.raises(ConfigError, match=why):
        check_experts(before, student, ALONE)


def test_bf16_has_a_limit_that_rounding_keeps_and_another_function_does_not() -> None:
    _, limit = LIMITS[torch.bfloat16]
    student = student_of("mixtral").to(torch.bfloat16)
    student.model.set_experts_implementation("eager")
    before = originals(student, section_of(student) | {"use_grouped_mm": False}, 0)
    replace_layers(student, section_of(student) | {"use_grouped_mm": False})
    assert check_experts(before, student, ALONE) < limit / 5
    for layer in autoep_layers(student):
        layer.router.route_norm = False
    with pytest.raises(ConfigError, match=f"limit {limit:g}"):
        check_experts(before, student, ALONE)


def test_a_checkpoint_tensor_with_gate_and_up_of_an_expert_is_no_range_of_either() -> None:
    gate = Part("p", (6, 4, 3), (2, 2, 3), expert=2, row=0, group=object())
    with pytest.raises(ValueError, match="spans more than one expert's gate or up"):
        gate.start(0, 12)


def partitioned(student: Student, rank: int) -> Ranks:
    """Shards of rank `rank` of four, two of which share the experts."""
    for layer in autoep_layers(student):
        layer.ep_group = object()
    shared = parts(student.model)
    for name, parameter in student.model.named_parameters():
        part = shared.get(name)
        position, count = (rank // 2, 2) if part is not None and part.group is not None else (rank, 4)
        parameter.ds_tensor = zero_shards(parameter, count)[position]
        parameter.ds_shape, parameter.ds_zero_partition_rank = parameter.shape, position
    return Ranks(rank, 4, torch.device("cpu"))


@every_shared
def test_shards_of_four_ranks_tile_the_saved_checkpoint_bit_for_bit(family: str) -> None:
    plain = Weights(build(family), ALONE)
    wanted = plain.snapshot()
    seen = {name: np.zeros(len(flat), int) for name, flat in wanted.items()}
    for rank in range(4):
        student = student_of(family)
        replace_layers(student, section_of(student), 2, rank % 2)
        weights = Weights(student.model, partitioned(student, rank))
        assert weights.fingerprint == plain.fingerprint
        held = weights.snapshot()
        for part in weights.slices:
            there = slice(part.start, part.start + part.count)
            seen[part.name][there] += 1
            assert np.array_equal(held[part.name], wanted[part.name][there]), part.name
    assert all((count == 1).all() for count in seen.values())


@every_shared
def test_a_rank_has_whole_and_keeps_what_the_preflight_counts(family: str) -> None:
    plain, student = build(family), student_of(family)
    replace_layers(student, section_of(student), 2, 1)
    whole: Counter[str] = Counter()
    for name, parameter in student.model.named_parameters():
        prefix, experts, _ = name.partition(".experts.")
        whole[prefix if experts else "the rest"] += parameter.numel()
    rest = whole.pop("the rest")
    counted, layers = expert_parameters(plain.config), layers_of_experts(plain.config)
    assert [*whole.values()] == [counted / 2] * layers
    total = sum(parameter.numel() for parameter in plain.parameters())
    assert rest == total - layers * counted
    partitioned(student, 1)
    shards: Any = [*student.model.parameters()]
    kept = sum(parameter.ds_tensor.numel() for parameter in shards)
    assert total / 4 <= kept < total / 4 + len(shards), "a fourth of all, and padding"


def through(model: Any, routes_SMK: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with replayed(routers(model), routes_SMK):
        loss = loss_of(model)
        loss.backward()
    return loss.detach(), gradients(model)


@every_shared
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_replaced_layers_compute_what_the_original_ones_do_replayed_or_not(
    family: str, checkpointing: bool
) -> None:
    plain, student = build(family), Student(build(family, checkpointing), HeadShape(31), 8)
    own_SMK, before = live_routes(plain), originals(student, section_of(student), 0)
    assert len(before) == own_SMK.shape[1]
    replace_layers(student, section_of(student))
    assert check_experts(before, student, ALONE) < 1e-6
    model = student.model
    routed = routers(model)
    assert [(one.num_experts, one.top_k) for one in routed.values()] == [(EXPERTS, CHOSEN)] * own_SMK.shape[1]
    assert torch.equal(live_routes(model).sort(-1).values, own_SMK.sort(-1).values)
    live = loss_of(model)
    live.backward()
    expected = gradients(model)
    again, found = through(model, live_routes(model))
    assert torch.equal(again, live)
    assert all(torch.equal(found[name], one) for name, one in expected.items())

    others_SMK = (own_SMK + 3) % EXPERTS
    (theirs, grown), (ours, found) = through(plain, others_SMK), through(model, others_SMK)
    assert abs(float(theirs - live.detach())) > 1e-3, "other experts, another function"
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    for name, part in parts(model).items():
        if name.endswith("router.gate.weight"):
            torch.testing.assert_close(found[name], grown[part.source], rtol=1e-4, atol=1e-6)
