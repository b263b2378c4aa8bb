"""The objective that a run gets when its file names none, and refusals of what no engine serves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from sized_models import dense
from small_config import make_config

from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.launch import single_role
from distill.preflight_checks import objective
from student_trainer.objectives.config import Auto, Full, Sampled, TopK
from sync.base.errors import ConfigError

WIDTH = 512


def limit(monkeypatch: pytest.MonkeyPatch, engine: str, can: tuple[str, ...]) -> None:
    """Have an engine give no more than this."""
    monkeypatch.setitem(objective.ENGINES, engine, objective.ENGINES[engine]._replace(can=can))


def unnamed(tmp_path: Path, batch: int = 256, **sections: Any) -> RunConfig:
    """A run whose objective has no type; one that names another has it."""
    path = dense(tmp_path / "model", hidden_size=WIDTH)
    given = {"student": {"path": path}, "teachers": {"t": {"path": path}}, **sections}
    base = make_config(rollout={"batch": batch, "max_tokens": 4096}, **given)
    chosen = RunConfig.model_validate(base.model_dump() | {"objective": sections.get("objective", {})})
    return chosen.model_copy(update={"preflight": type(base.preflight)()})


def test_full_is_the_default_while_a_step_of_hidden_states_is_small(tmp_path: Path) -> None:
    """256 x 4,096 tokens x (4 + 2 x 512) bytes are 1.08 GB, twice that is above 2 GB."""
    config, lines = objective.resolve(unnamed(tmp_path, objective={"coefficient": 2.0}))
    assert config.objective == Full(coefficient=2.0, forward=1.0, ends=4.0)
    assert '"full" takes 1,028 bytes a token from the teacher, 1.08 GB a step of 256 x 4,096' in lines[0]
    config, lines = objective.resolve(unnamed(tmp_path, batch=512, objective={"coefficient": 2.0}))
    assert config.objective == TopK(coefficient=2.0, forward=1.0, ends=4.0)
    assert '"topk" takes 392 bytes a token' in lines[0], "log-prob, entropy, 64 x (id + half)"
    assert '"full" takes 1,028 bytes a token from the teacher, 2.16 GB a step' in lines[0]
    assert objective.resolve(config).config == config, "resolved once"


def test_a_teacher_with_another_tokenizer_makes_topk_the_default_through_the_controller(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """64 ids come with the 33 bytes of the tokens that its tokenizer parts."""
    teachers = {"t": {"path": dense(tmp_path / "model", hidden_size=WIDTH), "tokenizer": "own"}}
    asked = unnamed(tmp_path, teachers=teachers).model_copy(update={"objective": Auto()})
    config, lines = objective.resolve(asked)
    assert config.objective == TopK()
    assert config.buffer.scores == "inline"
    assert '"topk" takes 425 bytes a token' in lines[0]
    assert "without what compares single tokens: objective.forward = 1, objective.ends = 4" in lines[0]
    assert not [*objective.unserved(config)]
    (problem,) = objective.unserved(asked.model_copy(update={"objective": TopK(ends=0.5)}))
    assert "objective.ends = 0.5 compares single tokens: set" in problem
    limit(monkeypatch, "transformers", ("entropy",))
    assert objective.resolve(asked).config.objective == Sampled()


@pytest.mark.parametrize(
    "teacher", [{"engine": "vllm"}, {"follow_student_every": 2}], ids=lambda teacher: next(iter(teacher))
)
def test_a_teacher_without_hidden_states_makes_topk_the_default(tmp_path, monkeypatch, teacher: Any) -> None:
    path = dense(tmp_path / "model", hidden_size=WIDTH)
    limit(monkeypatch, "vllm", ("topk", "generate"))
    config, lines = objective.resolve(unnamed(tmp_path, teachers={"t": {"path": path, **teacher}}))
    assert config.objective == TopK(forward=1.0, ends=4.0)
    assert "of teacher 't' gives no hidden states" in lines[0]


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"coefficient": 1e-6, "task": {}}, "reward"),
        ({"coefficient": 1e-6}, "reverse_kl"),
        ({"coefficient": 0.1, "task": {}}, "reverse_kl"),
        ({"coefficient": 1e-3, "task": {}, "teacher_coefficients": {"t": 10.0}}, "reverse_kl"),
    ],
)
def test_where_the_reward_alone_counts_it_decides_which_version_is_the_best(
    settings: Any, metric: str, tmp_path: Path
) -> None:
    evaluated = unnamed(tmp_path, objective=settings, evaluation={})
    config, lines = objective.resolve(evaluated)
    assert config.metric == metric
    assert any("evaluation.metric: reward" in line for line in lines) is (metric == "reward")
    chosen = config.model_copy(update={"evaluation": EvaluationConfig(metric="pass_rate")})
    assert chosen.metric == "pass_rate"


def test_a_default_that_depends_on_an_unreadable_model_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    gone = unnamed(tmp_path, teachers={"t": {"path": str(tmp_path / "gone")}})
    with pytest.raises(ConfigError, match=r'follow its config\.json: set objective\.type = "topk"'):
        objective.resolve(gone)


def test_every_role_alone_resolves_the_same_objective_and_leaves_the_precision_to_the_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    teacher = shutil.copytree(dense(tmp_path / "model", hidden_size=WIDTH), tmp_path / "teacher")
    config = unnamed(tmp_path, run={"folder": str(tmp_path)}, teachers={"t": {"path": str(teacher)}})
    assert single_role.prepare_train(config).objective == Full(forward=1.0, ends=4.0)
    with pytest.raises(ConfigError, match=r'run\.precision is "fastest", which a run decides before'):
        single_role.prepare_train(config.with_(run={"precision": "fastest"}))


HOT = {"teacher_temperature": "rollout"}
COLD = 'objective.type = "topk" and objective.teacher_temperature = "one"'


@pytest.mark.parametrize(
    ("objective_", "gives", "says"),
    [
        ({"type": "full"}, ("topk",), 'objective.type = "topk"'),
        ({"type": "jsd"}, (), 'objective.type = "sampled"'),
        ({"type": "student_topk"}, ("topk",), 'objective.type = "topk"'),
        ({"type": "topk"}, ("gather",), 'objective.type = "sampled"'),
        ({"type": "topk", "on_policy": 0.5}, ("topk",), "objective.on_policy = 1"),
        ({"type": "full", **HOT}, ("topk",), COLD),
        ({"type": "topk"}, ("topk",), ""),
        ({"type": "student_topk"}, ("gather",), 'buffer.scores = "inline"'),
        ({"type": "student_topk"}, ("gather", "topk"), ""),
        ({"type": "student_topk", "k": 4}, ("gather",), ""),
    ],
)
def test_the_remedy_is_the_nearest_that_the_engine_serves(objective_: Any, gives: Any, says: str) -> None:
    rollout = {"temperature": 0.5} if "teacher_temperature" in objective_ else {}
    config = make_config(objective=objective_, rollout=rollout)
    assert objective.remedy(config, gives) == says
    assert bool(says) == bool(objective.lacking(config, gives))


def test_what_an_engine_cannot_serve_is_refused_before_it_is_loaded(monkeypatch: Any) -> None:
    limit(monkeypatch, "vllm", ("topk",))
    teachers = {"t": {"path": "t", "engine": "vllm"}}
    (line,) = objective.unserved(make_config(objective={"type": "full"}, teachers=teachers))
    problem, _, remedy = line.partition(": set ")
    assert problem == "objective \"full\" needs hidden, and engine 'vllm' of teacher 't' gives topk"
    assert remedy == "objective.type = \"topk\", or teachers.t.engine = 'transformers'"


@pytest.mark.parametrize(
    ("objective_", "says"),
    [
        ({"type": "topk", "k": 1024}, ""),
        ({"type": "topk", "k": 1025}, "set objective.k = 1024"),
        ({"type": "student_topk", "k": 1025}, 'set objective.k = 1024 or buffer.scores = "inline"'),
    ],
)
def test_more_ids_than_an_engine_chooses_are_refused_before_it_is_loaded(objective_: Any, says: str) -> None:
    config = make_config(objective=objective_, teachers={"t": {"path": "t"}})
    line = f"teacher 't': objective.k is 1025, and it gives at most 1024 ids per position: {says}"
    assert [*objective.unserved(config)] == [line][: bool(says)]


def test_a_head_counts_in_the_precision_that_it_is_sent_in(tmp_path: Path) -> None:
    teacher, vocab = {"path": dense(tmp_path / "model", hidden_size=WIDTH)}, 2_100_000
    for dtype, heads in {"bfloat16": 0, "float16": 1, "float32": 1}.items():
        config = unnamed(tmp_path, objective={"type": "full"}, teachers={"t": teacher | {"dtype": dtype}})
        assert len([*objective.too_large(config, vocab)]) == heads, "2,100,000 x 512 x 4 bytes pass 4 GiB"


def test_experts_raise_the_tolerance_of_the_first_step(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_experts=4).save_pretrained(tmp_path / "moe")
    dense, _ = objective.resolve(unnamed(tmp_path))
    routed, lines = objective.resolve(unnamed(tmp_path, student={"path": str(tmp_path / "moe")}))
    assert (dense.preflight.mismatch_tolerance, routed.preflight.mismatch_tolerance) == (0.02, 0.05)
    assert "preflight.mismatch_tolerance = 0.05: the student has experts" in lines

    given = routed.with_(preflight={"mismatch_tolerance": 1.0})
    assert objective.resolve(given).config.preflight.mismatch_tolerance == 1.0


@pytest.mark.parametrize(
    ("weights", "said"),
    [({}, ["weights.kv_on_swap: recompute (auto, at trainer.lr = 2e-05)"]), ({"kv_on_swap": "keep"}, [])],
)
def test_what_becomes_of_the_cache_at_a_swap_is_said_where_it_is_chosen(
    tmp_path: Path, weights: dict[str, str], said: list[str]
) -> None:
    _, lines = objective.resolve(unnamed(tmp_path, trainer={"lr": 2e-5}, weights=weights))
    assert [line for line in lines if "kv_on_swap" in line] == said
