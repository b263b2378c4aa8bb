"""A whole step without DeepSpeed: any packing gives the same gradient and metrics."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from plain_step import ALONE, VOCAB, PlainEngine, difference, flat_rows, student

from distill.metrics.names import FIGURES
from student_trainer.engine import Student, check_head
from student_trainer.objectives.config import (
    SFT,
    Full,
    ObjectiveConfig,
    Rewards,
    Sampled,
    TaskReward,
    TopK,
)
from student_trainer.step import Stopwatch, collate, loss_of, train_step
from sync.base.errors import ConfigError, DataError
from sync.wire import PARTED_BYTES, Rows, Segment, TrainBatch, Version, pack, unpack
from sync.wire.head import HeadShape, OutputHead


@cache
def teacher() -> Student:
    return student(1)


@torch.no_grad()
def scored_rows(indices: list[int], step: int = 3) -> Rows:
    """Rollouts whose every mark is computed from the teacher one row at a time, without any padding."""
    prompts, completions, hidden_rows = [], [], []
    for index in indices:
        g = np.random.default_rng(index)
        prompts.append(g.integers(0, VOCAB, 2 + index % 3))
        completions.append(g.integers(0, VOCAB, 1 + (3 * index) % 7))
        tokens = torch.from_numpy(np.concatenate([prompts[-1], completions[-1]]))[None]
        hidden = teacher().model.model(input_ids=tokens).last_hidden_state
        hidden_rows.append(hidden[0, len(prompts[-1]) - 1 : -1])
    hidden_CG, token_C = torch.cat(hidden_rows), torch.from_numpy(np.concatenate(completions))
    logq_CV = (hidden_CG @ teacher().head.weight.t())[:, :VOCAB].log_softmax(1)
    best = logq_CV.topk(5, dim=1)
    return flat_rows(
        [str(index) for index in indices],
        prompts,
        completions,
        token_step=pack(np.full(len(token_C), step - 1, np.int32)),
        teacher_logprob=pack(logq_CV.gather(1, token_C[:, None])[:, 0].numpy()),
        teacher_topk_ids=pack(best.indices.numpy().astype(np.int32)),
        teacher_topk_logprob=pack(best.values.numpy()),
        teacher_hidden=pack(hidden_CG.numpy()),
        truncated=pack(np.array([i % 2 for i in indices], np.uint8)),
        reward=pack(np.array([i % 3 / 2 for i in indices], np.float32)),
    )


def batch(parts: list[Rows]) -> TrainBatch:
    tokens = sum(part.behavior_logprob.shape[0] for part in parts)
    return TrainBatch(version=Version(0, 3), denominator=tokens, micro_batches=parts)


def stepped(
    parts: list[Rows], config: ObjectiveConfig, pupil: Student | None = None, **of_loss: Any
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients and metrics of a step, of the student of seed 2 unless another is given."""
    heads = (OutputHead(teacher().head.weight.detach(), None, HeadShape(VOCAB)),)
    loss = loss_of(config, **{"teachers": ["t0"], "heads": heads if config == Full() else (), **of_loss})
    engine = PlainEngine(pupil or student(2), 0.1)
    metrics = train_step(engine, batch(parts), loss, ALONE)
    assert engine.boundaries == [False] * (len(parts) - 1) + [True]
    return engine.gradients, metrics


OBJECTIVES = [Full(), Sampled(discount=0.9), TopK(k=5, discount=0.5), TopK(k=5, task=TaskReward())]


@pytest.mark.parametrize("config", OBJECTIVES, ids=str)
def test_packing_padding_and_chunks_change_neither_gradient_nor_metrics(config: ObjectiveConfig) -> None:
    indices = [0, 1, 2, 3, 4, 5, 6, 7]
    packings = [[indices], [[i] for i in indices], [indices[:1], indices[1:6], indices[6:]], [indices[::-1]]]
    (expected, metrics), *others = [
        stepped([scored_rows(part) for part in packing], config, student(2, chunk, varlen))
        for packing, varlen, chunk in itertools.product(packings, (False, True), (3, 64))
    ]
    size = max(float(g.abs().max()) for g in expected)
    assert size > 1e-3
    del metrics["tokens_per_slot"]
    for gradients, found in others:
        assert difference(expected, gradients) <= 1e-6 * max(1.0, size)
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_parts_of_a_step_are_timed_and_summed_over_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, clock = itertools.count(), Stopwatch(torch.device("cpu"))
    monkeypatch.setattr(Stopwatch, "_now", lambda self: next(ticks) ** 2)
    parts, loss = [scored_rows([0, 1]), scored_rows([2])], loss_of(Sampled(), ["t0"])
    train_step(PlainEngine(student(2), 0.1), batch(parts), loss, ALONE, clock)
    # forward, backward, end at 0, 1, 2 and at 3, 4, 5; the update at 6 to 7
    assert clock.seconds() == {"forward": 1 + (16 - 9), "backward": 3 + (25 - 16), "optimizer": 49 - 36}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_counts_for_the_part_that_launched_it() -> None:
    clock = Stopwatch(torch.device("cuda"))
    clock.begin("forward")
    torch.cuda._sleep(100_000_000)  # cycles
    clock.begin("backward")
    clock.begin(None)
    seconds = clock.seconds()
    assert seconds["forward"] > seconds["backward"]


@pytest.mark.parametrize("varlen", [False, True])
def test_a_rank_without_rows_adds_nothing(varlen: bool) -> None:
    rows, nothing = scored_rows([1, 2]), flat_rows([], [], [])
    with_rows, beside = (
        stepped(parts, Sampled(), student(2, varlen=varlen))[0] for parts in ([rows], [rows, nothing])
    )
    assert difference(with_rows, beside) == 0.0


def test_metrics_follow_from_the_rows() -> None:
    rows = [scored_rows([1, 2, 5])]
    (_, metrics), (_, packed) = (stepped(rows, TopK(k=5), student(2, varlen=way)) for way in (False, True))
    tokens, prompts = 4 + 7 + 2, 3 + 4 + 4
    expected = {"tokens": tokens, "rows": 3, "age_mean": 1, "age_max": 1, "truncation_rate": 2 / 3}
    expected |= {"eos_rate": 1 / 3, "tokens_per_slot": (tokens + prompts) / (3 * 11)}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert packed["tokens_per_slot"] == (tokens + prompts) / 64
    assert 0 < metrics["effective_sample_size"] < 1
    assert 0 <= metrics["topk_overlap"] <= 1
    assert "mismatch_kl" not in metrics, "no token is of the current version"
    assert not [name for name in metrics if not any(row.names(f"train/{name}") for row in FIGURES)]


def test_tokens_of_weights_off_the_path_are_of_age_0_and_not_fresh() -> None:
    rows = scored_rows([1, 2, 5], step=4)
    off_path = np.arange(rows.token_step.shape[0]) % 3 == 0
    targets = collate(replace(rows, off_path=pack(off_path.astype("u1"))), 3, VOCAB).targets
    assert targets.fresh_N.tolist() == (~off_path).tolist()


def test_bad_rows_are_refused_with_value_rule_and_remedy() -> None:
    rows = scored_rows([1, 2])
    tokens = unpack(rows.tokens)
    negative = replace(rows, tokens=pack(-tokens))
    for wrong, vocab, id_ in ((rows, 5, r"\d+"), (negative, VOCAB, -tokens.max())):
        with pytest.raises(DataError, match=rf"id {id_}, .*tokenizer has {vocab} ids.*share one tokenizer"):
            collate(wrong, 3, vocab)
    broken = np.full(rows.teacher_logprob.shape, np.nan, np.float32)
    with pytest.raises(DataError, match="teacher_logprob of a batch is not finite"):
        collate(replace(rows, teacher_logprob=pack(broken)), 3, VOCAB)


def test_our_head_is_checked_against_the_models_own() -> None:
    good = student(1)
    assert check_head(good, good, torch.device("cpu")) < 1e-5
    wrong = student(1)
    wrong.head.shape = HeadShape(VOCAB, soft_cap=1.0)
    with pytest.raises(ConfigError, match="head differs from the model's own logits"):
        check_head(wrong, wrong, torch.device("cpu"))


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    broken = student(2)
    with torch.no_grad():
        broken.head.weight[0] = torch.nan
    with pytest.raises(DataError, match="the loss of step 4 is nan"):
        stepped([scored_rows([1])], Full(), broken)


def test_a_batch_without_rewards_is_refused_where_they_are_part_of_the_loss() -> None:
    with pytest.raises(DataError, match=r"0 rollouts with a reward.*leave it out"):
        stepped([replace(scored_rows([0]), reward=None)], Sampled(task=TaskReward()))


def test_rows_of_the_teacher_have_no_mismatch_and_all_their_tokens_are_its_own() -> None:
    rows = scored_rows([0, 1, 2], step=4)
    half = replace(rows, by_teacher=pack(np.array([1, 0, 1], np.uint8)))
    assert collate(half, 3, VOCAB).targets.by_teacher_N.tolist() == [True] + [False] * 4 + [True] * 7
    for by_teacher, known in ((0, True), (1, False)):  # a teacher's were not sampled from the student
        written = replace(rows, by_teacher=pack(np.full(3, by_teacher, np.uint8)))
        assert ("mismatch_kl" in stepped([written], Sampled())[1]) is known
    own = [stepped([rows], config)[0] for config in (SFT(), Sampled())]
    assert difference(*own) <= 1e-7, "the student's own samples teach it as `sampled` does"


def test_the_reverse_kl_of_each_of_several_teachers_is_a_metric() -> None:
    first, second = scored_rows([0, 1, 2]), scored_rows([3, 4])
    second = replace(second, teacher=pack(np.ones(2, np.int32)))
    _, metrics = stepped([first, second], Sampled(), teachers=["math", "code"])
    counts = [rows.behavior_logprob.shape[0] for rows in (first, second)]
    parts = metrics["reverse_kl/math"] * counts[0] + metrics["reverse_kl/code"] * counts[1]
    assert metrics["reverse_kl"] * sum(counts) == pytest.approx(parts, rel=1e-5)
    assert metrics["reverse_kl/math"] != pytest.approx(metrics["reverse_kl/code"])
    assert "reverse_kl/t0" not in stepped([first], Sampled())[1]


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_rows_of_a_teacher_that_always_parts_their_texts_train_as_those_of_ids(discount: float) -> None:
    """And so do those that stand beside it."""
    rows, first_V, found = scored_rows([0, 1, 2]), torch.arange(VOCAB), []
    count = rows.behavior_logprob.shape[0]
    for segment, bits in ((None, 0), (Segment.BEGINS, 255), (Segment.TOKEN, 0)):
        if segment is not None:
            parted = pack(np.full((count, PARTED_BYTES), bits, "u1"))
            rows = replace(rows, segment=pack(np.full(count, segment, "u1")), parted=parted)
        step, metrics = stepped([rows], TopK(k=5, discount=discount), first_bytes=lambda: first_V)
        found.append((step, metrics["reverse_kl"]))
        assert ("score_gap" in metrics) == (segment is not Segment.BEGINS)
    for gradients, reverse_kl in found[1:]:
        assert difference(found[0][0], gradients) < 1e-6
        assert reverse_kl == pytest.approx(found[0][1], rel=1e-5)


def test_rewards_alone_are_learned_as_what_a_task_adds_to_a_divergence() -> None:
    """No teacher's arrays in, no figure of a teacher out."""
    rows, task = scored_rows([0, 1, 2]), TaskReward(scale="std", average="rollouts", clip=(0.2, 0.28))
    teachers = [name for name in rows.__struct_fields__ if name.startswith("teacher")]
    bare = replace(rows, **dict.fromkeys(teachers))
    alone, metrics = stepped([bare], Rewards(task=task), teachers=[])
    both, divergence = (stepped([rows], one)[0] for one in (Sampled(task=task), Sampled()))
    assert difference(alone, [one - less for one, less in zip(both, divergence, strict=True)]) <= 1e-6
    other = Rewards(task=TaskReward(clip=task.clip))
    assert difference(alone, stepped([bare], other, teachers=[])[0]) > 1e-3
    assert (metrics["reward_mean"], metrics["reward_std"]) == (0.5, 0.5)
    assert not [name for name in metrics if name.startswith(("reverse_kl", "teacher_", "score_gap"))]
