"""Figures of an evaluation against closed forms, on models small enough to enumerate."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluated_models import Replica, Teacher, by_hand, completed, configure, evaluated, evaluation, lines
from msgspec.structs import replace
from tiny_models import model_of

from distill.controller import Controller
from distill.evaluation import evaluator as evaluating
from distill.evaluation import generation
from distill.evaluation.completions import KEPT, file_of, remove_old, write_completions
from distill.evaluation.evaluator import parts
from distill.evaluation.models import load_model
from distill.evaluation.report import ReverseKL, Z, majority, mean, share, total
from distill.rollout.replica_client import Answer
from distill.tasks.sort_letters import letter_tokenizer
from sync.base import durable
from sync.base.errors import DataError, RemoteError, Unreachable
from sync.base.settings import ModelSource
from sync.wire import Behaviour, Estimate, Generated, GenerateRequest, Version, VersionSpan, pack
from sync.wire.teacher import TeacherCompletion, TeacherPrompt
from teacher_service.engines.base import Item

pytestmark = pytest.mark.usefixtures("ends_workers")


def evaluator(models: Path, replica: Any = None, teacher: Any = None, **settings: Any) -> Controller:
    """Of the two models, in a replica and with a teacher of its own where none is given."""
    replica, teacher = replica or Replica(models / "student"), teacher or Teacher(models / "teacher")
    return evaluation(configure(models, **settings), models, replica, {"t": teacher})


@pytest.mark.parametrize("positions", [3, 1 << 20])
async def test_reverse_kl_is_the_mean_over_tokens_of_the_full_sum_however_requests_are_split(
    models: Path, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    """Whole completions in one request, and completions split at three tokens, give the same."""
    monkeypatch.setattr(evaluating, "HIDDEN_BYTES", positions * 4 * 16)
    teacher = Teacher(models / "teacher")
    found = await evaluated(evaluator(models, teacher=teacher))
    assert (len(teacher.requests) > 8) == (positions == 3)
    rows = lines(models)
    decode = letter_tokenizer().decode
    assert [row["completion"] for row in rows] == [decode(row["token_ids"]) for row in rows]
    exact, _, tokens = by_hand(models).sum(0)
    assert found.reverse_kl == pytest.approx(exact / tokens, rel=1e-4)
    assert found.reverse_kl > 0.1
    assert (found.completions, found.tokens, found.reverse_kl_error) == (12, tokens, None)
    assert found.truncated == sum(row["finish_reason"] == "length" for row in rows) / 12


async def test_a_replica_completes_a_version_once_and_the_teacher_the_prompts_once(models: Path) -> None:
    """Whatever process evaluates: the third evaluation is one after a restart."""
    replica, teacher = Replica(models / "student"), Teacher(models / "teacher")
    first = evaluator(models, replica, teacher)
    reports = [await evaluated(first), await evaluated(first)]
    reports.append(await evaluated(evaluator(models, replica, teacher)))
    assert len(replica.served) == 3
    assert [report.reverse_kl for report in reports[1:]] == pytest.approx([reports[0].reverse_kl] * 2)
    reports.append(await evaluated(first, Version(0, 1)))
    assert len(replica.served) == 2 * 3
    assert sorted(map(int, teacher.completed)) == [*range(12)]
    assert [report.reference for report in reports] == [Behaviour(1.0, 2.0, 2.0, 0.0, 1.0)] * 4


async def test_of_a_teacher_without_hidden_states_and_completions_it_is_estimated(models: Path) -> None:
    """From the sampled tokens, and there is no reference."""
    teacher = Teacher(models / "teacher", can=["topk"])
    found = await evaluated(evaluator(models, teacher=teacher))
    assert (found.reference, teacher.completed) == (None, [])
    _, sampled_R, tokens_R = by_hand(models).T
    ratio = sampled_R.sum() / tokens_R.sum()
    rest = ((sampled_R - ratio * tokens_R) ** 2).sum()
    assert found.reverse_kl == pytest.approx(ratio, rel=1e-4)
    assert found.reverse_kl_error == pytest.approx(math.sqrt(12 / 11 * rest) / tokens_R.sum(), rel=1e-4)


async def test_a_completion_of_no_use_of_a_teacher_is_not_held_against_the_evaluator(models: Path) -> None:
    class Spoiled(Teacher):
        def _completion(self, prompt: TeacherPrompt, max_tokens: int) -> TeacherCompletion:
            return replace(super()._completion(prompt, max_tokens), logprob=pack(np.full(2, -np.inf, "f4")))

    with pytest.raises(RemoteError, match="a completion of teacher t cannot be used"):
        await evaluated(evaluator(models, teacher=Spoiled(models / "teacher")))


def test_the_error_of_several_teachers_counts_that_their_shares_of_the_tokens_vary() -> None:
    """Two teachers whose ratios differ by 2 nats, and no noise within a completion."""
    draws = np.random.default_rng(0).geometric(0.1, (400, 2, 40))
    found = [total([ReverseKL(False, 0.5 * a, a), ReverseKL(False, 2.5 * b, b)]) for a, b in draws]
    values, errors = zip(*found, strict=True)
    assert np.mean(errors) == pytest.approx(float(np.std(values)), rel=0.1)


def test_an_exact_part_adds_no_error_and_one_completion_does_not_pretend_to_be_sure() -> None:
    exact = ReverseKL(True, np.array([4.0]), np.array([4]))
    estimate = ReverseKL(False, np.array([-2.0]), np.array([2]))
    assert total([exact]) == (1.0, None)
    assert total([exact, estimate]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))


def test_work_is_split_at_the_limit_and_nothing_is_lost() -> None:
    """Every scored position comes exactly once, after all tokens before it."""
    sizes = [(2, 5), (3, 40), (1, 9), (4, 5), (2, 17)]
    items = [Item(np.arange(first + count, dtype=np.int32), first) for first, count in sizes]
    seen: list[tuple[int, int]] = []
    for numbers, part in parts(items, 16):
        assert sum(item.positions for item in part) <= 16
        for number, item in zip(numbers, part, strict=True):
            assert item.token_ids_L.tolist() == list(range(len(item.token_ids_L)))
            seen += [(number, position) for position in range(item.first, len(item.token_ids_L))]
    expected = [(i, first + t) for i, (first, count) in enumerate(sizes) for t in range(count)]
    assert sorted(seen) == expected


# --- completions ------------------------------------------------------------------------------------------


async def test_completions_that_cannot_be_used_are_generated_again_and_not_for_ever(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: Iterator[Callable[[Generated], Answer]] = itertools.cycle(
        [
            lambda answer: replace(answer, finish_reason="abort"),
            lambda answer: replace(answer, spans=[VersionSpan(Version(0, 3), 0, answer.token_ids.shape[0])]),
            lambda answer: replace(answer, token_ids=pack(np.zeros(7, "i4"))),
        ]
    )
    lying = Replica(models / "student")
    lying.spoil = lambda answer: next(changes)(answer) if ":7:0" in answer.id else answer
    run = evaluator(models, lying)
    with pytest.raises(RemoteError, match=r"5 completions of eval:.*:held_out:7:0 were lost \(unusable\)"):
        await completed(run, Version(0, 2))
    assert "it was generated with L000-v00000003, and must be with L000-v00000002" in caplog.text
    assert "7 tokens, and must be 0 to 6" in caplog.text
    assert not file_of(models / "x", Version(0, 2), "held_out").exists()


async def test_completions_wait_for_disk_space(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(path: Path, completions: Any, prompt_set: Any) -> None:
        written.append(path)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_completions(path, completions, prompt_set)

    monkeypatch.setattr(generation, "write_completions", write)
    monkeypatch.setattr(durable, "RETRY_SECONDS", 0.01)
    run = evaluator(models)
    assert len((await completed(run))["held_out"]) == 12
    assert written == [file_of(models / "x", Version(0, 0), "held_out")] * 2


class Short(Replica):
    """Leaves one prompt of its first `short` requests unanswered."""

    short = 3

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Answer, None]:
        async for answer in super().generate(request):
            if len(self.served) > self.short or not answer.id.endswith(":7:0"):
                yield answer


async def test_what_a_lost_replica_has_completed_is_not_generated_again(models: Path) -> None:
    replica = Short(models / "student")
    run = evaluator(models, replica)
    assert len((await completed(run))["held_out"]) == 12
    again = [prompt.id for request in [*replica.served][3:] for prompt in request.prompts]
    assert again == [f"eval:{Version(0, 0)}:held_out:7:0"]


async def test_a_replica_that_leaves_a_prompt_unanswered_is_given_up_at_last(models: Path) -> None:
    replica = Short(models / "student")
    replica.short = 1 << 30
    run = evaluator(models, replica)
    run.pool.budget._limit = 1 << 30  # else it is excluded first
    with pytest.raises(Unreachable, match=r"5 replicas were lost while they generated with .*r0 was lost"):
        await completed(run)


def test_the_first_and_the_newest_versions_are_kept(tmp_path: Path) -> None:
    for step in range(KEPT + 3):
        folder = file_of(tmp_path, Version(0, step), "x").parent
        folder.mkdir(parents=True)
        os.utime(folder, (-step, -step))  # whatever the clock said
    (tmp_path / "evaluations" / "notes").mkdir()
    remove_old(tmp_path)
    assert sorted(one.name for one in (tmp_path / "evaluations").iterdir()) == [
        *(str(Version(0, step)) for step in (0, *range(3, KEPT + 3))),
        "notes",
    ]


# --- named sets -------------------------------------------------------------------------------------------


async def test_a_named_set_has_its_own_sampling_rewards_and_votes(models: Path) -> None:
    """Rewards are those that the texts on disk earn; interval and majority follow from them."""
    rows = [{"prompt": text, "gold": "b", "sum": "7"} for text in ("abc>", "bca>", "cab>")]
    source = prompts_of(models, rows) | {"answer_field": "gold"}
    sets = {
        "letters": {"source": {**source, "reward_fn": "exact"}, "completions": 4, "max_tokens": 2,
                    "temperature": 0.5, "top_p": 0.9},
        "sums": {"source": {**source, "reward_fn": "number", "answer_field": "sum"}},
        "sorting": {"source": {"type": "task", "task": "sort_letters"}, "prompts": 5},
    }  # fmt: skip
    replica = Replica(models / "student")
    report = await evaluated(evaluator(models, replica, sets=sets), sets=["letters", "sorting", "sums"])
    request = next(one for one in replica.served if one.sampling.max_tokens == 2)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    found, letters = report.sets["letters"], lines(models, "letters")
    assert (found.prompts, found.completions, report.sets["sorting"].completions) == (3, 12, 5)
    said = [row["completion"].removesuffix("<eos>").strip() for row in letters]
    assert [row["answer"] for row in letters] == said
    passed = np.array([text == "b" for text in said], float).reshape(3, 4)
    assert [row["reward"] for row in letters] == passed.flatten().tolist()
    assert found.pass_at_1 == share(passed.mean(1), 4)
    assert found.average.value == passed.mean()
    assert found.majority is not None
    assert report.sets["sorting"].majority is None
    assert report.sets["sums"].majority.value == 0.0, "answers have a name, and no completion has a number"
    assert report.pass_rate == sum(row["reward"] > 0 for row in lines(models)) / 12
    assert report.pass_rate_interval is not None


def prompts_of(models: Path, rows: list[dict[str, str]]) -> dict[str, str]:
    """[prompts] of these rows."""
    (models / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "jsonl", "path": str(models / "rows.jsonl"), "template": "plain"}


@pytest.fixture
def own_rewards(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """[prompts] of texts, and a module of reward functions."""

    def written(module: str, code: str, *texts: str) -> dict[str, str]:
        (models / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(models)
        return prompts_of(models, [{"prompt": text} for text in texts])

    return written


async def test_a_set_that_was_changed_is_generated_anew_and_a_file_that_was_altered_refused(
    models: Path,
) -> None:
    sizes = (("abc>", "bca>", "cab>"), 4), (("abc>", "bca>"), 4), (("abc>", "cab>"), 4), (("abc>", "cab>"), 2)
    for texts, count in sizes:
        source = prompts_of(models, [{"prompt": text, "gold": "b"} for text in texts])
        rewards = {"answer_field": "gold", "reward_fn": "exact"}
        sets = {"letters": {"source": source | rewards, "completions": count}}
        made = (await completed(evaluator(models, sets=sets), sets=["letters"]))["letters"]
        prompts = [text for text in texts for _ in range(count)]
        assert [row["prompt"] for row in lines(models, "letters")] == prompts
        assert [completion.index for completion in made] == [texts.index(text) for text in prompts]
    path = file_of(models / "x", Version(0, 0), "letters")
    path.write_text(path.read_text()[1:])
    with pytest.raises(DataError, match=r"letters.jsonl:1: .*the file was altered"):
        await completed(evaluator(models, sets=sets), sets=["letters"])


async def test_graded_rewards_pass_from_the_threshold_of_their_prompts_on(models: Path, own_rewards) -> None:
    """Three prompts whose completions are worth 0.25, 0.5 and 0.75; one that fails passes at no threshold."""
    code = "def worth(p, c):\n    return {2: 0.25, 3: 0.5, 4: 0.75, 5: None}[len(p.text)], 'said'\n"
    source = own_rewards("graded", code, "a>", "ab>", "abc>", "abcd>")
    source["reward_fn"] = "graded:worth"
    thresholds = {"usual": {}, "half": {"pass_threshold": 0.5}, "any": {"pass_threshold": -1.0}}
    sets = {name: {"source": source | more} for name, more in thresholds.items()}
    found = (await evaluated(evaluator(models, sets=sets), sets=[*sets])).sets
    assert {name: found[name].pass_at_1.value for name in sets} == {"usual": 0, "half": 0.5, "any": 0.75}
    assert {found[name].average.value for name in sets} == {(0.25 + 0.5 + 0.75) / 4}
    assert found["half"].majority.value == 0.5


async def test_a_reward_function_that_always_fails_ends_the_evaluation(models: Path, own_rewards) -> None:
    code = "def some(p, c): return 1 / (len(p.text) % 2)\ndef none(p, c): return 1 / len(p.text[:0])\n"
    source = own_rewards("fails", code, "ab>", "abc>", "cba>", "b>")
    sets = {one: {"source": source | {"reward_fn": f"fails:{one}"}} for one in ("some", "none")}
    one = evaluator(models, sets=sets)
    report = await evaluated(one, sets=["some"])
    assert (report.sets["some"].failed, report.sets["some"].pass_at_1.value) == (3, 0.25)
    assert "ZeroDivisionError" in lines(models, "some")[1]["error"]
    with pytest.raises(DataError, match=r"ZeroDivisionError.*the last of 4 completions in a row"):
        await completed(one, sets=["none"])


# --- statistics -------------------------------------------------------------------------------------------


def test_with_one_completion_the_interval_is_wilsons() -> None:
    """8 of 30: the roots of (p − p̂)² = z² p(1 − p)/n."""
    found = share(np.array([1.0] * 8 + [0.0] * 22), 1)
    n, z, p = 30, Z, 8 / 30
    low, high = np.sort(np.roots([1 + z * z / n, -(2 * p + z * z / n), p * p]))
    assert (found.value, found.low, found.high) == pytest.approx((p, low, high))


def test_completions_that_agree_count_once_and_independent_ones_each() -> None:
    agree, once = (share(np.array([1.0] * 8 + [0.0] * 22), k) for k in (16, 1))
    assert (agree.low, agree.high) == pytest.approx((once.low, once.high))
    same = share(np.full(30, 0.5), 16)
    alone = share(np.array([0.0, 1.0] * 240), 1)
    assert (same.low, same.high) == pytest.approx((alone.low, alone.high))
    for value in (0.0, 1.0):
        never = share(np.full(30, value), 16)
        assert never.high - never.low == pytest.approx(Z**2 / (30 + Z**2))


def test_the_interval_covers_the_truth_as_often_as_it_claims() -> None:
    """Prompts of unequal difficulty, four completions each: 95 % of the intervals hold the true mean."""
    random, held = np.random.default_rng(0), 0
    for _ in range(1000):
        chance = random.beta(0.5, 1.0, size=60)
        found = share(random.binomial(4, chance) / 4, 4)
        held += found.low <= 1 / 3 <= found.high
    assert 0.93 < held / 1000 < 0.975


def test_one_prompt_is_one_observation_however_often_it_is_completed() -> None:
    assert share(np.array([0.25]), 16) == share(np.array([0.25]), 1)
    assert mean(np.array([3.0])) == Estimate(3.0, 3.0, 3.0)


@pytest.mark.parametrize(("prompts", "quantile"), [(3, 4.3027), (4, 3.1824), (11, 2.2281), (31, 2.0423)])
def test_the_mean_of_rewards_has_students_interval(prompts: int, quantile: float) -> None:
    """Quantiles of 97.5 % from a table."""
    rewards = np.random.default_rng(0).normal(size=prompts)
    found = mean(rewards)
    half = quantile * float(rewards.std(ddof=1)) / math.sqrt(prompts)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.01)
    assert found.value == pytest.approx(rewards.mean())


@pytest.mark.parametrize(
    ("answers", "passes", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "7", "8", "8"], [True, True, False, False], 0.5),
        (["7", None, None], [True, False, False], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_the_most_frequent_answer_decides(
    answers: list[str | None], passes: list[bool], expected: float
) -> None:
    for order in itertools.islice(itertools.permutations(range(len(answers))), 24):
        assert majority([answers[i] for i in order], [passes[i] for i in order]) == expected


# --- models -----------------------------------------------------------------------------------------------


def test_a_version_of_a_model_with_code_of_its_own_brings_weights_alone(models: Path) -> None:
    """The folder of a version holds no code and names none; what runs is that of the student's own folder."""
    own, version = models / "student", models / "teacher"
    (own / "modeling_x.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class Config(Qwen3Config):\n    model_type = 'x'\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    auto_map = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    settings = json.loads((own / "config.json").read_text()) | {"model_type": "x", "auto_map": auto_map}
    (own / "config.json").write_text(json.dumps(settings))
    loaded = load_model(ModelSource(path=str(own), trust_remote_code=True), version, "cpu")
    assert type(loaded).__module__.endswith("modeling_x")
    for name, parameter in model_of(version).named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
