"""Runs that learn from rewards alone: no teacher is asked, named or needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from audited import check
from in_memory import MemoryEvaluator, MemoryPrompts, MemoryReplica, MemoryRewards, MemoryTrainer
from small_config import make_config
from started import killed_after, to_the_end

from distill.config import RunConfig
from distill.config.loading import validate
from distill.controller import Controller
from distill.evaluation.schedule import best
from distill.metrics import card
from distill.metrics.console import evaluation_line
from distill.metrics.samples import Sample, choose, figures
from distill.metrics.summary import before_and_after, evaluation
from distill.preflight_checks.checks import check_keys
from distill.prompts.stream import Prompt, PromptStream
from distill.record.reader import ask
from distill.topology import processes
from student_trainer.objectives.config import Rewards, TaskReward, needs
from sync.base.errors import ConfigError
from sync.wire import EvalReport, Version, Want, checks, unpack
from teacher_service.router import Router


def length_of(prompt: Prompt, tokens: Sequence[int]) -> float:
    return float(len(tokens) % 3)


def alone(**sections: Any) -> RunConfig:
    """The small configuration without its teacher."""
    task = {"baseline": "group", "scale": "std", "average": "rollouts", "clip": [0.2, 0.28]}
    more = {"objective": {"type": "rewards", "task": task}, "rollout": {"per_prompt": 4}}
    made = make_config(**{**more, **sections})
    return RunConfig.model_validate({**made.model_dump(mode="json"), "teachers": {}})


@pytest.fixture
def build(controller: Callable[..., Controller]) -> Callable[..., Controller]:
    def made(settings: RunConfig, **parts: Any) -> Controller:
        prompts = PromptStream(MemoryPrompts(), seed=0, per_prompt=settings.rollout.per_prompt)
        given = {
            "teachers": {}, "route": Router({}).route, "want": needs(settings.objective), "prompts": prompts,
            "rewards": MemoryRewards(length_of), **parts,
        }  # fmt: skip
        return controller(settings, **given)

    return made


@pytest.mark.virtual_time
async def test_a_run_that_is_killed_goes_on_and_every_rollout_is_accounted_for(build, tmp_path) -> None:
    settings, ledger = alone(run={"steps": 10}), dict[int, Any]()
    first = MemoryTrainer((run := build(settings)).session, checkpoint_every=2)
    await killed_after(5, run, first)
    ledger |= first.ledger
    replicas = {"r0": MemoryReplica(), "r1": MemoryReplica(seed=1, token_seconds=0.001)}
    run = build(settings, replicas=replicas)
    second = MemoryTrainer(run.session, ranks=2, checkpoint_every=2, checkpoint=first.checkpoint)
    summary = await to_the_end(run, second)
    assert (summary["steps"], summary["lineages"]) == (10, 2)
    assert check(tmp_path, ledger | second.ledger).ok
    assert [welcome.teachers for welcome in (*first.welcomes, *second.welcomes)] == [[], []]
    for rows in first.rows + second.rows:
        assert (rows.teacher, rows.teacher_logprob, rows.teacher_entropy, rows.kept) == (None,) * 4
        assert (rows.segment, rows.by_teacher) == (None, None)
        if rows.ids:
            assert len(unpack(rows.reward)) == len(unpack(rows.deviation)) == len(rows.ids)
    asked = "SELECT count(*), count(reverse_kl), count(reward) FROM rollout WHERE scored"
    _, (counts,) = ask(tmp_path, asked)
    assert counts[1] == 0 < counts[0] == counts[2]


@pytest.mark.virtual_time
async def test_versions_are_evaluated_without_a_reverse_kl(build) -> None:
    run = build(alone(), evaluator=MemoryEvaluator())
    summary = await to_the_end(run, MemoryTrainer(run.session))
    reports = summary["evaluations"]
    assert len(reports) > 1
    assert {report["reverse_kl"] for report in reports} == {None}
    assert not [name for name in run.figures() if "reverse_kl" in name]
    assert "eval/truncated" in run.figures()


def test_the_best_version_is_that_of_the_highest_reward() -> None:
    reports = [
        EvalReport(
            version=Version(0, step), reverse_kl=None, pass_rate=reward > 0.5, completions=1, tokens=1,
            truncated=0.0, seconds=1.0, reward=reward,
        )
        for step, reward in enumerate([0.25, 0.75, 0.5])
    ]  # fmt: skip
    assert best(reports, "reward") is reports[1]
    assert checks.evaluation(reports[0], Version(0, 0)) is None
    rows = before_and_after({"before": evaluation(reports[0]), "after": evaluation(reports[1])})
    assert rows == [("pass rate", "0.0%", "100.0%"), ("reward", "0.250", "0.750")]


def test_what_is_shown_of_a_run_names_no_teacher(tmp_path: Any) -> None:
    line = evaluation_line(3, {"eval/truncated": 0.0, "eval/pass_rate": 0.5, "eval/reward": 0.25})
    assert line == "step 3, held out: pass rate 50.0%, reward 0.250"
    sample = Sample("s", "0:0", 1, "", [1], [2, 3], [-0.5, -1.5], None, 0.25, False, False)
    assert (sample.reverse_kl, sample.excess) == (None, [0.0, 0.0])
    assert figures(sample) == "2 tokens  age 1  reward 0.25"
    better = msgspec.structs.replace(sample, reward=1.0)
    assert choose([better, sample], "worst", 1) == [sample]
    settings = alone()
    card.write_card(tmp_path, settings, {}, None)
    text = (tmp_path / "README.md").read_text()
    assert "trained on its own samples by their rewards." in text
    assert "distillation" not in text.split("---")[1].replace("onpolicy-distill", "")


def test_without_teachers_the_objective_is_the_reward_and_no_process_is_a_teachers() -> None:
    raw = make_config().model_dump(mode="json")
    without = {name: value for name, value in raw.items() if name not in ("teachers", "objective")}
    for teachers in ({}, {"teachers": {}}, {"teachers": False}):
        made = validate({**without, "objective": {"type": "rewards"}, **teachers}, "x")
        assert made.objective == Rewards(task=TaskReward())
        assert made.metric == "reward"
        assert needs(made.objective) == Want()
        names = [process.name for process in processes(made)]
        assert names == ["student-0", "evaluator", "trainer"]
        check_keys(made)
    assert made.objective.on_policy == 1
    assert Router({}).route("anything") == ""


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ({"type": "rewards", "on_policy": 0.5}, "on_policy is not a known key: known of type 'rewards' are"),
        ({"type": "rewards", "teacher_temperature": "one"}, "teacher_temperature is not a known key"),
        ({}, 'type is "auto", which learns from a teacher, and there are none'),
    ],
)
def test_what_needs_a_teacher_is_refused_by_its_key(objective: dict[str, Any], says: str) -> None:
    raw = {**make_config().model_dump(mode="json"), "teachers": {}, "objective": objective}
    with pytest.raises(ConfigError, match=rf"objective\.{says}"):
        check_keys(validate(raw, "x"))


def test_limits_and_metrics_of_a_teacher_are_refused_without_one() -> None:
    guard = {"max_reverse_kl": 1.0, "min_end_share": 0.1}
    settings = alone(guard=guard, evaluation={"metric": "reverse_kl"})
    with pytest.raises(ConfigError) as refused:
        check_keys(settings)
    lines = str(refused.value).splitlines()
    keys = ("guard.max_reverse_kl", "guard.min_end_share", 'evaluation.metric = "reverse_kl"')
    assert lines == [f"{key} needs a teacher, and there is none: leave it out" for key in keys]
    with pytest.raises(ConfigError, match=r'"rewards", which learns from no .* \[teachers\] names t'):
        check_keys(make_config(objective={"type": "rewards"}))
