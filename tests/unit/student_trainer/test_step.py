"""A whole step without DeepSpeed: any packing gives the same gradient; a student at its teacher stays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from plain_step import ALONE, VOCAB, PlainEngine, difference, flat_rows, student

from distill.metrics.names import FIGURES
from student_trainer.engine import Student, check_head
from student_trainer.head import Loss
from student_trainer.objectives import config as objectives
from student_trainer.objectives.config import SFT, Full, ObjectiveConfig, Sampled, TaskReward, TopK
from student_trainer.step import Stopwatch, collate, loss_of, train_step
from student_trainer.varlen import PackedRows
from sync.base.errors import ConfigError, DataError
from sync.wire import PARTED_BYTES, Rows, Segment, TrainBatch, Version, pack
from sync.wire.head import HeadShape, OutputHead

TEACHERS = ("t0",)


@torch.no_grad()
def scored_rows(teacher: Student, indices: list[int], step: int = 3) -> Rows:
    """Rollouts whose every mark is computed from `teacher` one row at a time, without any padding."""
    prompts, completions, log_rows, hidden_rows = [], [], [], []
    for index in indices:
        g = np.random.default_rng(index)
        prompt = g.integers(0, VOCAB, 2 + index % 3)
        completion = g.integers(0, VOCAB, 1 + (3 * index) % 7)
        tokens = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        hidden = teacher.model.model(input_ids=tokens).last_hidden_state[0, len(prompt) - 1 : -1]
        log_rows.append((hidden @ teacher.head.weight.t())[:, :VOCAB].log_softmax(1))
        hidden_rows.append(hidden)
        prompts.append(prompt)
        completions.append(completion)
    logq_CV = torch.cat(log_rows)
    token_C = torch.from_numpy(np.concatenate(completions))
    best = logq_CV.topk(5, dim=1)
    return flat_rows(
        [str(index) for index in indices],
        prompts,
        completions,
        token_step=pack(np.full(len(token_C), step - 1, np.int32)),
        teacher_logprob=pack(logq_CV.gather(1, token_C[:, None])[:, 0].numpy()),
        teacher_topk_ids=pack(best.indices.numpy().astype(np.int32)),
        teacher_topk_logprob=pack(best.values.numpy()),
        teacher_hidden=pack(torch.cat(hidden_rows).numpy()),
        truncated=pack(np.array([i % 2 for i in indices], np.uint8)),
    )


def own_topk(rows: Rows) -> Rows:
    """The same rows with S sent as the student's top-k."""
    ids, logprob = rows.teacher_topk_ids, rows.teacher_topk_logprob
    none = {"teacher_topk_ids": None, "teacher_topk_logprob": None}
    return replace(rows, student_topk_ids=ids, student_topk_teacher_logprob=logprob, **none)


def spec(config: ObjectiveConfig, teacher: Student) -> Loss:
    heads: tuple[OutputHead, ...] = ()
    if isinstance(config, Full):
        heads = (OutputHead(teacher.head.weight.detach(), None, HeadShape(VOCAB)),)
    return loss_of(config, TEACHERS, heads)


def batch(parts: list[Rows]) -> TrainBatch:
    tokens = sum(part.behavior_logprob.shape[0] for part in parts)
    return TrainBatch(version=Version(0, 3), denominator=tokens, micro_batches=parts)


def stepped(
    parts: list[Rows], loss: Loss, pupil: Student | None = None
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients and metrics of a step, of the student of seed 2 unless another is given."""
    engine = PlainEngine(pupil or student(2), 0.1)
    metrics = train_step(engine, batch(parts), loss, ALONE)
    assert engine.boundaries == [False] * (len(parts) - 1) + [True]
    return engine.gradients, metrics


OBJECTIVES = [Full(), Sampled(), Sampled(discount=0.9), TopK(k=5), TopK(k=5, discount=0.5)]


@pytest.mark.parametrize("config", OBJECTIVES, ids=str)
def test_packing_padding_and_chunks_do_not_change_the_gradient(config: ObjectiveConfig) -> None:
    teacher, found, metrics = student(1), [], []
    indices = [0, 1, 2, 3, 4, 5, 6, 7]
    packings = [[indices], [[i] for i in indices], [indices[:1], indices[1:6], indices[6:]], [indices[::-1]]]
    for packing, varlen in itertools.product(packings, (False, True)):
        for chunk in (3, 64):
            parts = [scored_rows(teacher, part) for part in packing]
            step = stepped(parts, spec(config, teacher), student(2, chunk, varlen))
            found.append(step[0])
            metrics.append(step[1])
    size = max(float(g.abs().max()) for g in found[0])
    assert size > 1e-3
    for gradients, other in zip(found[1:], metrics[1:], strict=True):
        assert difference(found[0], gradients) <= 1e-6 * max(1.0, size)
        for name in ("loss", "reverse_kl", "student_entropy", "rho_mean", "tokens", "truncation_rate"):
            assert other[name] == pytest.approx(metrics[0][name], rel=1e-5)


def test_parts_of_a_step_are_timed_and_summed_over_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(Stopwatch, "_now", lambda self: next(ticks) ** 2)
    teacher, clock = student(1), Stopwatch(torch.device("cpu"))
    parts = [scored_rows(teacher, [0, 1]), scored_rows(teacher, [2])]
    train_step(PlainEngine(student(2), 0.1), batch(parts), spec(Sampled(), teacher), ALONE, clock)
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
    teacher = student(1)
    rows, nothing = scored_rows(teacher, [1, 2]), flat_rows([], [], [])
    with_rows, beside = (
        stepped(parts, spec(Sampled(), teacher), student(2, varlen=varlen))[0]
        for parts in ([rows], [rows, nothing])
    )
    assert difference(with_rows, beside) == 0.0


@pytest.mark.parametrize("config", [*OBJECTIVES, objectives.StudentTopK(k=5)], ids=str)
def test_a_student_equal_to_its_teacher_is_a_fixed_point_of_a_whole_step(config: ObjectiveConfig) -> None:
    teacher = student(1)
    rows = scored_rows(teacher, [0, 1, 2, 3, 4])
    if isinstance(config, objectives.StudentTopK):
        rows = own_topk(rows)
    pupil = student(1)
    _, metrics = stepped([rows], spec(config, teacher), pupil)
    assert abs(metrics["loss"]) < 1e-6
    for before, after in zip(teacher.parameters(), pupil.parameters(), strict=True):
        assert float((after - before).norm().detach()) <= 1e-6 * float(before.norm().detach())


def test_metrics_follow_from_the_rows() -> None:
    teacher = student(1)
    rows = scored_rows(teacher, [1, 2, 5])
    _, metrics = stepped([rows], spec(TopK(k=5), teacher))
    tokens, prompts = 4 + 7 + 2, 3 + 4 + 4
    assert metrics["tokens"] == tokens
    assert metrics["rows"] == 3
    assert metrics["truncation_rate"] == pytest.approx(2 / 3)
    assert metrics["eos_rate"] == pytest.approx(1 / 3)
    assert metrics["age_mean"] == metrics["age_max"] == 1
    assert metrics["tokens_per_slot"] == pytest.approx((tokens + prompts) / (3 * 11))
    _, metrics = stepped([rows], spec(TopK(k=5), teacher), student(2, varlen=True))
    assert metrics["tokens_per_slot"] == (tokens + prompts) / 64
    assert 0 < metrics["effective_sample_size"] < 1
    assert 0 <= metrics["topk_overlap"] <= 1
    assert "mismatch_kl" not in metrics
    assert not [name for name in metrics if not any(row.names(f"train/{name}") for row in FIGURES)]


def test_mismatch_kl_counts_tokens_of_the_current_version_alone() -> None:
    teacher = student(1)
    rows = scored_rows(teacher, [1, 2, 5], step=4)
    _, metrics = stepped([rows], spec(Sampled(), teacher))
    assert metrics["mismatch_kl"] > 0
    assert metrics["age_max"] == 0


def test_tokens_of_weights_off_the_path_are_of_age_0_and_not_fresh() -> None:
    rows = scored_rows(student(1), [1, 2, 5], step=4)
    off_path = np.arange(rows.token_step.shape[0]) % 3 == 0
    targets = collate(replace(rows, off_path=pack(off_path.astype("u1"))), 3, VOCAB).targets
    assert targets.fresh_N.tolist() == (~off_path).tolist()


def test_bad_rows_are_refused_with_value_rule_and_remedy() -> None:
    rows = scored_rows(student(1), [1, 2])
    with pytest.raises(DataError, match=r"tokenizer has 5 ids.*share one tokenizer"):
        collate(rows, 3, 5)
    broken = np.full(rows.teacher_logprob.shape, np.nan, np.float32)
    with pytest.raises(DataError, match="teacher_logprob of a batch is not finite"):
        collate(replace(rows, teacher_logprob=pack(broken)), 3, VOCAB)


def test_rows_laid_end_to_end_keep_their_places() -> None:
    rows = scored_rows(student(1), [1, 2, 5])
    padded, packed = collate(rows, 3, VOCAB), collate(rows, 3, VOCAB, varlen=True)
    assert padded.layout is None
    assert packed.layout == PackedRows((7, 11, 6, *[1] * 40))
    assert packed.tokens_RL.shape == (1, 64)
    assert packed.tokens_RL[0, :24].tolist() == np.frombuffer(rows.tokens.data, np.int32).tolist()
    assert packed.positions_C.tolist() == [2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 21, 22]
    before = packed.tokens_RL.flatten()[packed.positions_C + 1]
    assert torch.equal(before, padded.tokens_RL.flatten()[padded.positions_C + 1])
    assert torch.equal(before, packed.targets.token_N)


def test_our_head_is_checked_against_the_models_own() -> None:
    good = student(1)
    assert check_head(good, good, torch.device("cpu")) < 1e-5
    wrong = student(1)
    wrong.head.shape = HeadShape(VOCAB, soft_cap=1.0)
    with pytest.raises(ConfigError, match="head differs from the model's own logits"):
        check_head(wrong, wrong, torch.device("cpu"))


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    teacher, broken = student(1), student(2)
    with torch.no_grad():
        broken.head.weight[0] = torch.nan
    with pytest.raises(DataError, match="the loss of step 4 is nan"):
        stepped([scored_rows(teacher, [1])], spec(Full(), teacher), broken)


def rewarded(rows: Rows, rewards: list[float]) -> Rows:
    return replace(rows, reward=pack(np.array(rewards, np.float32)))


def gradients(
    parts: list[Rows], config: ObjectiveConfig, teachers: tuple[str, ...] = TEACHERS
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Of one step of the same student, and its metrics."""
    return stepped(parts, loss_of(config, teachers))


def test_rewards_weigh_the_same_whatever_the_packing() -> None:
    teacher, config = student(1), Sampled(task=TaskReward())
    rewards = [0.0, 1.0, 1.0, 0.0, 0.5, 1.0]
    one, metrics = gradients([rewarded(scored_rows(teacher, [0, 1, 2, 3, 4, 5]), rewards)], config)
    parts = [([3, 1], [0.0, 1.0]), ([5], [1.0]), ([0, 2, 4], [0.0, 1.0, 0.5])]
    other, again = gradients([rewarded(scored_rows(teacher, rows), r) for rows, r in parts], config)
    assert difference(one, other) <= 1e-6
    assert metrics["reward_mean"] == again["reward_mean"] == pytest.approx(3.5 / 6)
    without, _ = gradients([scored_rows(teacher, [0, 1, 2, 3, 4, 5])], Sampled())
    assert difference(one, without) > 1e-3


def test_a_batch_without_rewards_is_refused_where_they_are_part_of_the_loss() -> None:
    with pytest.raises(DataError, match=r"0 rollouts with a reward.*leave it out"):
        gradients([scored_rows(student(1), [0])], Sampled(task=TaskReward()))


def test_rows_of_the_teacher_have_no_mismatch_and_all_their_tokens_are_its_own() -> None:
    rows = scored_rows(student(1), [0, 1, 2], step=4)
    half = replace(rows, by_teacher=pack(np.array([1, 0, 1], np.uint8)))
    assert collate(half, 3, VOCAB).targets.by_teacher_N.tolist() == [True] + [False] * 4 + [True] * 7
    for by_teacher, known in ((0, True), (1, False)):  # a teacher's were not sampled from the student
        written = replace(rows, by_teacher=pack(np.full(3, by_teacher, np.uint8)))
        assert ("mismatch_kl" in gradients([written], Sampled())[1]) is known
    own = [gradients([rows], config)[0] for config in (SFT(), Sampled())]
    assert difference(*own) <= 1e-7, "the student's own samples teach it as `sampled` does"


def test_the_reverse_kl_of_each_of_several_teachers_is_a_metric() -> None:
    first = scored_rows(student(1), [0, 1, 2])
    second = replace(scored_rows(student(1), [3, 4]), teacher=pack(np.ones(2, np.int32)))
    _, metrics = gradients([first, second], Sampled(), ("math", "code"))
    counts = [rows.behavior_logprob.shape[0] for rows in (first, second)]
    parts = metrics["reverse_kl/math"] * counts[0] + metrics["reverse_kl/code"] * counts[1]
    assert metrics["reverse_kl"] * sum(counts) == pytest.approx(parts, rel=1e-5)
    assert metrics["reverse_kl/math"] != pytest.approx(metrics["reverse_kl/code"])
    assert "reverse_kl/t0" not in gradients([first], Sampled())[1]


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_rows_of_a_teacher_that_always_parts_their_texts_train_as_those_of_ids(discount: float) -> None:
    """And so do those that stand beside it."""
    teacher, config, found = student(1), TopK(k=5, discount=discount), []
    rows, first_V = scored_rows(teacher, [0, 1, 2]), torch.arange(VOCAB)
    count = rows.behavior_logprob.shape[0]
    for segment, bits in ((None, 0), (Segment.BEGINS, 255), (Segment.TOKEN, 0)):
        if segment is not None:
            parted = pack(np.full((count, PARTED_BYTES), bits, "u1"))
            rows = replace(rows, segment=pack(np.full(count, segment, "u1")), parted=parted)
        step, metrics = stepped([rows], loss_of(config, TEACHERS, first_bytes=lambda: first_V))
        found.append((step, metrics["reverse_kl"]))
        assert ("score_gap" in metrics) == (segment is not Segment.BEGINS)
    for gradients, reverse_kl in found[1:]:
        assert difference(found[0][0], gradients) < 1e-6
        assert reverse_kl == pytest.approx(found[0][1], rel=1e-5)
