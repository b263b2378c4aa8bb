"""Routing replay: recorded experts in place of the router's choice, weights and gradients still live."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import routed_models
import torch
import transformers
from peft import LoraConfig, get_peft_model
from plain_step import ALONE, PlainEngine, difference, flat_rows
from routed_models import CHOSEN, CONFIGS, EXPERTS, VOCAB, build, gradients, live_routes, loss_of
from small_config import make_config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from distill import model_facts
from distill.model_facts import has_experts, routing
from distill.preflight_checks.checks import model_problems
from student_trainer import parallelism
from student_trainer.engine import Student, head_shape
from student_trainer.objectives.config import Sampled
from student_trainer.routing import FAMILIES, LIVE, check_routes, placed, replayed, routers
from student_trainer.step import loss_of as step_loss
from student_trainer.step import train_step
from student_trainer.varlen import replace_attention
from sync.base.errors import ConfigError, DataError
from sync.wire import Rows, TrainBatch, Version, pack
from sync.wire.head import HeadShape

every_family = pytest.mark.parametrize("family", CONFIGS)


def local(kind: str, **more: Any) -> Any:
    return routed_models.untrained(kind, routed_models.LOCAL | more)


def other(routes_SMK: Tensor) -> Tensor:
    """Other experts for every token."""
    return (routes_SMK + 3) % EXPERTS


def with_routes(model: Any, routes_SMK: Tensor) -> Tensor:
    """The loss, through these experts."""
    with replayed(routers(model), routes_SMK):
        return loss_of(model)


class Precisely(TorchFunctionMode):
    """All in fp64: routers and norms compute in fp32 whatever the model's precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@every_family
def test_the_routers_own_choice_replayed_changes_no_bit_of_loss_and_gradients(
    family: str, implementation: str
) -> None:
    model = build(family)
    model.set_experts_implementation(implementation)
    own_SMK = live_routes(model)
    loss = loss_of(model)
    loss.backward()
    expected = gradients(model)
    some_SMK = own_SMK.clone()
    some_SMK[[0, 5, 10, 21]] = LIVE
    for routes_SMK in (own_SMK, some_SMK):
        model.zero_grad()
        with replayed(routers(model), routes_SMK):
            again = loss_of(model)
            again.backward()
        assert torch.equal(again, loss)
        assert gradients(model).keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())


@every_family
def test_gradients_of_routers_through_other_experts_are_those_of_finite_differences(family: str) -> None:
    model = build(family).double()
    model.set_experts_implementation("eager")  # the others have no fp64
    routed = routers(model)
    routes_SMK = other(live_routes(model))
    routes_SMK[3] = LIVE
    parameters = [parameter for module in routed.values() for parameter in module.parameters()]
    step = 1e-5
    with Precisely():
        live = loss_of(model)
        with replayed(routed, routes_SMK):
            loss = loss_of(model)
            loss.backward()
            assert abs(float((loss - live).detach())) > 1e-3, "other experts, another function"
            for seed, parameter in enumerate(parameters):
                draw = torch.Generator().manual_seed(seed)
                direction = torch.randn(parameter.shape, generator=draw).double()
                with torch.no_grad():
                    sides = []
                    for shift in (step, -2 * step, step):
                        parameter += shift * direction
                        sides.append(loss_of(model))
                numeric = float(sides[0] - sides[1]) / (2 * step)
                assert abs(numeric) > 1e-6
                assert float((parameter.grad * direction).sum()) == pytest.approx(numeric, rel=1e-5)


@every_family
def test_checkpointing_changes_no_bit_of_gradients_through_other_experts(family: str) -> None:
    routes_SMK, found = other(live_routes(build(family))), []
    for checkpointing in (False, True):
        model = build(family, checkpointing)
        with replayed(routers(model), routes_SMK):
            loss_of(model).backward()
        found.append(gradients(model))
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_an_expert_of_a_group_that_is_not_live_weighs_what_its_probability_says() -> None:
    """DeepSeek-V2 zeroes the scores of other groups; through given experts, its groups change nothing."""
    grouped, greedy = build("deepseek-v2 groups"), build("deepseek-v2")
    routes_SMK = other(live_routes(grouped))
    losses = []
    for model in (grouped, greedy):
        with replayed(routers(model), routes_SMK):
            losses.append(loss_of(model))
            losses[-1].backward()
    assert torch.equal(*losses)
    assert all(torch.equal(one, gradients(greedy)[name]) for name, one in gradients(grouped).items())


# --- rows without a route, rows of different lengths ------------------------------------------------------


def test_routes_are_laid_out_for_padded_and_for_packed_rows() -> None:
    first = np.array([[[0, 255]], [[7, 3]]], np.uint8)
    third, nothing = np.array([[[5, 4]]], np.uint8), first[:0]
    padded = placed([first, nothing, third], [0, 3, 6], [3, 2, 2], (9, 1, 2))
    assert padded[:, 0].tolist() == [[0, 255], [7, 3], *[[LIVE] * 2] * 4, [5, 4], *[[LIVE] * 2] * 2]
    packed = placed([first, nothing, third], [0, 3, 5], [3, 2, 2], (7, 1, 2))
    assert packed[:, 0].tolist() == [[0, 255], [7, 3], *[[LIVE] * 2] * 3, [5, 4], [LIVE] * 2]
    assert packed.dtype == torch.int16
    many = placed([first.astype(np.int32) + 70_000], [0], [3], (3, 1, 2))
    assert many[:, 0].tolist() == [[70_000, 70_255], [70_007, 70_003], [LIVE] * 2]
    assert placed([], [], [], (2, 1, 2)).flatten().tolist() == [LIVE] * 4
    for rows in (first[:, :, :1], np.repeat(first, 2, 0), np.repeat(first, 2, 1)):
        with pytest.raises(DataError, match="row 1 of a batch has 3 tokens and routes"):
            placed([nothing, rows], [0, 3], [3, 3], (6, 1, 2))


# --- steps on rows that carry their routes ----------------------------------------------------------------


LENGTHS = [(3, 4), (2, 6), (1, 2), (4, 3)]
"""Prompt and completion of the rows; the third was generated by a teacher and has no routes."""


def routed_rows(which: list[int], routed: bool = True) -> Rows:
    """Rows of LENGTHS, with different experts for every token in each of two layers."""
    random = [np.random.default_rng(row) for row in which]
    tokens = [g.integers(0, VOCAB, sum(LENGTHS[row])) for g, row in zip(random, which, strict=True)]
    pairs = [np.split(part, [LENGTHS[row][0]]) for row, part in zip(which, tokens, strict=True)]
    places = [0 if row == 2 else sum(LENGTHS[row]) - 1 for row in which]
    drawn = [
        [g.permutation(EXPERTS)[:CHOSEN] for _ in range(2 * count)]
        for g, count in zip(random, places, strict=True)
    ]
    routes = [np.array(part, "u1").reshape(-1, 2, CHOSEN) for part in drawn]
    more = {"routes": pack(np.concatenate(routes)), "route_lens": pack(np.array(places, "i4"))}
    return flat_rows([str(row) for row in which], *zip(*pairs, strict=True), **more if routed else {})


def stepped(micro_batches: list[Rows], varlen: bool) -> list[Tensor]:
    """Gradients of a step, as shares of the largest of them."""
    model = build("qwen3")
    if varlen:
        replace_attention(model, "sdpa")
    engine = PlainEngine(Student(model, head_shape(model.config, VOCAB, 1.0), 64, varlen), 0.0)
    batch = TrainBatch(version=Version(0, 0), denominator=15, micro_batches=micro_batches)
    train_step(engine, batch, step_loss(Sampled(), ["t"]), ALONE)
    most = max(float(one.abs().max()) for one in engine.gradients)
    return [one / most for one in engine.gradients]


def test_any_packing_of_routed_rows_gives_the_same_gradient_and_none_without_routes() -> None:
    whole = stepped([routed_rows([0, 1, 2, 3])], varlen=False)
    for varlen in (False, True):
        for parts in ([[0, 1, 2, 3]], [[3, 2], [1, 0]], [[1], [2], [0, 3]]):
            assert difference(stepped([routed_rows(part) for part in parts], varlen), whole) < 1e-5
    assert difference(stepped([routed_rows([0, 1, 2, 3], routed=False)], varlen=True), whole) > 0.05


# --- which models -----------------------------------------------------------------------------------------


def test_the_table_of_families_is_that_of_the_tests() -> None:
    page = (Path(__file__).parents[3] / "docs/large-models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ((?:yes|refused|not).*) \|$", page, re.MULTILINE)
    told = {name: [cell.strip() == "yes" for cell in cells.split("|")] for name, cells in rows}
    trained = CONFIGS, routed_models.BY_RANKS, routed_models.PUBLISHED
    lists = *trained, routed_models.SERVED, routed_models.SCORED
    shown = [{routed_models.config_of(family).model_type for family in families} for families in lists]
    assert told == {name: [name in families for families in shown] for name in shown[0]}
    assert shown[0] == {*model_facts.FAMILIES}
    assert shown[1] == {*parallelism.FAMILIES}


def test_a_student_whose_experts_replicas_cannot_update_is_refused(tmp_path: Path) -> None:
    routed_models.config_of("gpt-oss").save_pretrained(tmp_path)
    (problem,) = model_problems(make_config(student={"path": str(tmp_path)}))
    assert "the student is a gpt_oss: vLLM loads its experts past the reload" in problem
    assert not [*model_problems(make_config(student={"path": str(tmp_path)}, trainer={"lora": {}}))]


def test_every_known_router_is_tested() -> None:
    tested = {type(module).__name__ for family in CONFIGS for module in routers(build(family)).values()}
    assert tested == FAMILIES


def test_layers_are_found_in_order_under_peft_and_the_student() -> None:
    plain = build("qwen3")
    names = ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
    assert [*routers(plain)] == names
    assert {(router.num_experts, router.top_k) for router in routers(plain).values()} == {(EXPERTS, CHOSEN)}
    student = Student(plain, HeadShape(VOCAB), 64)
    assert [*routers(student)] == [f"model.{name}" for name in names]
    adapters = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert [*routers(adapters).values()] == [*routers(student).values()]


def test_a_dense_model_has_no_routers() -> None:
    dense = routed_models.untrained("Qwen3", routed_models.GROUPED | {"intermediate_size": 24, "head_dim": 8})
    adapters = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert routers(dense) == {}
    assert routers(Student(get_peft_model(dense, adapters), HeadShape(VOCAB), 64)) == {}


class Block(torch.nn.Module):
    """Experts under names that say nothing, as code beside a checkpoint may have them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.MixtralConfig(num_local_experts=4)
        self.gate = torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: local("Phimoe"), "PhimoeTopKRouter at model.layers.0.mlp"),
        (lambda: local("Jamba", use_mamba_kernels=False), "blocks of experts with 0 known"),
        (Block, "num_local_experts = 4"),
    ],
    ids=["another router", "experts without a router", "only its configuration tells"],
)
def test_an_unknown_family_is_refused_by_name(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        routers(make())


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [[0, EXPERTS], [-2, 1], [3, 3], [LIVE, 3]])
def test_a_route_that_no_router_chooses_is_refused(route: list[int]) -> None:
    model = build("qwen3")
    routes_SMK = live_routes(model)
    check_routes(routers(model), routes_SMK)
    routes_SMK[13, 1] = torch.tensor(route)
    with pytest.raises(DataError, match=r"place 13 in model\.layers\.2\.mlp\.gate is"):
        with_routes(model, routes_SMK)


def test_routes_of_another_shape_are_refused() -> None:
    model = build("qwen3")
    routes_SMK = live_routes(model)
    for wrong in (routes_SMK[:, :1], routes_SMK[..., :1], routes_SMK.float(), routes_SMK.to(torch.uint8)):
        with pytest.raises(DataError, match="must be signed integers, for 2 layers of experts"):
            check_routes(routers(model), wrong)
    with pytest.raises(DataError, match="routes 22 tokens, and routes of 21 were given"):
        with_routes(model, routes_SMK[1:])
    assert torch.equal(live_routes(model), routes_SMK), "an error leaves no route behind"


LATE = "ran after its routes were taken away|number of tensors was saved|recomputed values"
"""Ours, and what PyTorch itself says of a recomputation that differs."""


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_a_backward_pass_after_the_routes_are_gone_is_refused(checkpointing: bool) -> None:
    model = build("qwen3", checkpointing)
    with replayed(routers(model), other(live_routes(model))):
        loss = loss_of(model)
    with pytest.raises((DataError, CheckpointError), match=LATE):
        loss.backward()


def test_a_router_that_does_not_choose_by_one_topk_is_refused() -> None:
    model = build("qwen3")
    routes_SMK, routed = live_routes(model), routers(model)
    gate: Any = routed["model.layers.2.mlp.gate"]

    def by_sorting(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.nn.functional.linear(hidden, gate.weight).softmax(-1).sort(-1, descending=True)
        return scores.values, scores.values[:, :CHOSEN], scores.indices[:, :CHOSEN]

    def twice(hidden: Tensor) -> Any:
        type(gate).forward(gate, hidden)
        return type(gate).forward(gate, hidden)

    for forward, calls in ((by_sorting, 0), (twice, 2)):
        gate.forward, why = forward, rf"Qwen3MoeTopKRouter at model.layers.2.mlp.gate .* {calls} calls"
        with pytest.raises(ConfigError, match=why):
            with_routes(model, routes_SMK)
        assert gate.forward is forward, "what replaced a forward before is back"


def test_a_router_that_never_ran_is_refused() -> None:
    model = build("qwen3")
    model.model.layers[2].mlp.forward = lambda hidden: hidden
    with pytest.raises(DataError, match=r"model\.layers\.2\.mlp\.gate, which did not run"):
        with_routes(model, live_routes(build("qwen3")))


@every_family
def test_the_preflight_reads_the_same_routing_from_the_configuration(family: str) -> None:
    found = routers(routed_models.untrained(*CONFIGS[family]))
    config = routed_models.config_of(family)
    assert routing(config) == (len(found), CHOSEN, EXPERTS)
    assert has_experts(config)


def test_a_model_without_experts_or_of_an_unknown_family_has_no_routing() -> None:
    dense, jamba = transformers.LlamaConfig(), transformers.JambaConfig()
    assert (has_experts(dense), routing(dense)) == (False, None)
    assert (has_experts(jamba), routing(jamba)) == (True, None)
