"""One process distills with the pipeline's own parts, put together by the objective benchmark."""

import numpy as np
import pytest
import torch

from distill.bench.local_evaluation import Limits
from distill.bench.toy import (
    OBJECTIVES,
    Delayed,
    Setup,
    Trial,
    World,
    configured,
    copy_of,
    evaluated,
    generate,
    items,
    learn,
    score,
    wire_bytes,
)
from distill.evaluation.reference import LanguageModel
from distill.prompts.stream import Prompt
from distill.tasks import spellings
from distill.tasks.spellings import EOS_ID, PAD_ID, VOCABULARY
from distill.tasks.teaching import Recipe, new_model
from teacher_service.engines.head import find_head
from teacher_service.engines.transformers import TransformersEngine

RECIPE = Recipe(32, 1, 1, 1, 32, steps=0, rows=0, rate=0.0, muon=False, both_choices=False)
SETUP = Setup("random", tokens=150, rows=8, k=4, evaluations=2)
K = SETUP.k


def language_model(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    model = new_model(RECIPE, len(VOCABULARY), EOS_ID, PAD_ID).eval()
    return LanguageModel(model, find_head(model, len(VOCABULARY)))


@pytest.fixture(scope="module")
def world() -> World:
    teacher, student, task = language_model(1), language_model(2), spellings.make()
    made = [task.held_out(0, index) for index in range(8)]
    prompts = [Prompt(prompt.text, list(prompt.token_ids or ()), text=prompt.text) for prompt in made]
    engine = TransformersEngine(teacher.model, len(VOCABULARY))
    return World(teacher, engine, student, task, prompts, Limits(4, (EOS_ID,)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_on_as_many_tokens_as_asked(world: World, name: str) -> None:
    found = learn(world, SETUP, Trial(name, 3e-2, 0))
    tokens = [point["tokens"] for point in found["points"]]
    assert tokens[0] == 0
    assert len(tokens) == 3
    assert SETUP.tokens <= tokens[-1] < SETUP.tokens + 8 * 4
    assert found["points"][0] == evaluated(world, world.student, 0)
    assert np.isfinite([point["reverse_kl"] for point in found["points"]]).all()
    assert set(found["cpu_seconds"]) == {"generate", "score", "train"}


def test_exact_objectives_approach_the_teacher(world: World) -> None:
    setup = Setup("random", tokens=3000, rows=32, evaluations=1)
    first, last = learn(world, setup, Trial("full", 1e-2, 0))["points"]
    assert last["reverse_kl"] < 0.5 * first["reverse_kl"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sampled", 4 + 4),  # log q(y), entropy
        ("topk", 4 + 4 + K * (4 + 2)),  # and ids, log-probabilities
        ("student_topk", 4 + 4 + K * 2),
        ("forward_topk", 4 + 4 + K * (4 + 2)),
        ("full", 4 + 32 * 2),  # hidden states
    ],
)
def test_bytes_of_a_teachers_scores_are_those_of_the_wire_arrays(
    world: World, name: str, expected: int
) -> None:
    config = configured(name, K)
    prompts = [prompt.token_ids for prompt in world.held_out]
    made = generate(
        world.student, prompts, world.limits, torch.Generator().manual_seed(0), K * (name[:2] == "st")
    )
    assert wire_bytes(score(world.engine, made, config)) == expected * len(made.logp_C)


def test_completions_are_cut_into_the_sequences_that_the_teacher_scores(world: World) -> None:
    prompts = [prompt.token_ids for prompt in world.held_out]
    made = generate(world.student, prompts, world.limits, torch.Generator().manual_seed(0), K)
    sequences = items(made)
    assert [row.token_ids_L[: row.first].tolist() for row in sequences] == prompts
    for row in sequences:
        logits = world.student.model(torch.from_numpy(row.token_ids_L)[None].long()).logits[
            0, row.first - 1 : -1
        ]
        top = logits.topk(K, dim=1).indices
        assert row.gather_ids_TK is not None
        assert torch.equal(top.sort(1).values, torch.from_numpy(row.gather_ids_TK).long().sort(1).values)
    flat = np.concatenate([row.token_ids_L[row.first :] for row in sequences])
    assert len(flat) == len(made.logp_C) == made.completion_B.sum()


def test_the_behaviour_log_probability_is_that_of_the_model_that_generated(world: World) -> None:
    prompts = [prompt.token_ids for prompt in world.held_out]
    made = generate(world.student, prompts, world.limits, torch.Generator().manual_seed(0))
    row = items(made)[0]
    ids = torch.from_numpy(row.token_ids_L).long()
    logp = world.student.model(ids[None]).logits[0].log_softmax(-1)
    expected = logp[row.first - 1 : -1].gather(1, ids[row.first :, None])[:, 0]
    assert torch.allclose(torch.from_numpy(made.logp_C[: row.positions]), expected, atol=1e-5)


def test_a_delayed_model_generates_with_the_weights_of_so_many_steps_ago() -> None:
    live = copy_of(language_model(3))
    delayed, norm = Delayed(live, lag=2), live.model.model.norm.weight
    seen = []
    for step in range(5):
        norm.data.fill_(step)
        seen.append(delayed.model().model.model.norm.weight[0].item())
    assert seen == [0.0, 0.0, 0.0, 1.0, 2.0]


def test_without_lag_the_live_weights_generate() -> None:
    live = copy_of(language_model(3))
    live.model.model.norm.weight.data.fill_(7.0)
    assert Delayed(live, lag=0).model().model.model.norm.weight[0] == 7.0


def test_the_age_of_what_was_trained_on_is_measured_token_by_token(world: World) -> None:
    """Eight completions a step, evaluated after each: ages 0, 1, 2, 2, …"""
    setup = SETUP._replace(evaluations=1000)
    found = learn(world, setup, Trial("sampled", 3e-2, 0, lag=2))
    ends = [point["tokens"] for point in found["points"]]
    ages = [min(step, 2) for step in range(len(ends) - 1)]
    assert found["age"] == pytest.approx(np.dot(np.diff(ends), ages) / ends[-1])


def test_the_start_is_never_trained(world: World) -> None:
    before = evaluated(world, world.student, 0)
    learn(world, SETUP, Trial("full", 1e-1, 0))
    assert evaluated(world, world.student, 0) == before
