"""Every probe catches the set-up it is there for; teachers are in memory.

The teacher is a function of the whole prefix, so that what a model would do (a token alters all later scores)
holds. Broken ones are made from it by changing what comes in or what goes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from distill.evaluation.probes import objective_figures
from distill.preflight_checks import probes
from distill.preflight_checks.probes import Finding, Score
from student_trainer.objectives.config import Full, Sampled, TopK
from student_trainer.objectives.divergences import build
from sync.wire import Scored, ScoreRefused, ScoreSequence, TeacherInfo, pack, unpack

V, T = 40, 8
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
SEQUENCES = probes.probe_sequences(PROMPTS, 4, T)
ARROWS = np.random.default_rng(0).normal(size=(V, V))


def whole_prefix(token_ids_L: np.ndarray, temperature: float = 0.5) -> np.ndarray:
    """log q [L, V] from a sum over the prefix that forgets slowly, and from the last token."""
    states = np.zeros((len(token_ids_L), V))
    state = np.zeros(V)
    for i, token in enumerate(token_ids_L):
        state = 0.8 * state + ARROWS[token]
        states[i] = state
    logits = states / temperature
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def teacher(source: Callable = whole_prefix) -> Score:
    async def score(sequences: list[ScoreSequence]) -> list[Scored | ScoreRefused]:
        answers = []
        for sequence in sequences:
            ids_L, start = unpack(sequence.token_ids), sequence.start
            logp_TV = source(ids_L)[start - 1 : -1]
            answers.append(Scored(sequence.id, pack(logp_TV[np.arange(len(logp_TV)), ids_L[start:]])))
        return answers

    return score


def altered(alter: Callable[[int, ScoreSequence, Scored], Scored | ScoreRefused]) -> Score:
    """The sound teacher, with `alter` done to each answer of a request, by its place."""
    sound = teacher()

    async def score(sequences: list[ScoreSequence]) -> list[Scored | ScoreRefused]:
        answers = await sound(sequences)
        pairs = enumerate(zip(sequences, answers, strict=True))
        return [alter(i, s, answer) for i, (s, answer) in pairs if isinstance(answer, Scored)]

    return score


def changed(alter: Callable[[np.ndarray], np.ndarray], first: int = 0) -> Score:
    """The sound teacher, with `alter` done to the scores [T] of every sequence, from the `first` on."""

    def replaced(place: int, _: ScoreSequence, answer: Scored) -> Scored:
        scores = unpack(answer.logprob)
        scores = alter(scores) if place >= first else scores
        return msgspec.structs.replace(answer, logprob=pack(scores.astype("f4")))

    return altered(replaced)


def shifted(by: int) -> Score:
    """Score t is that of token t + by; the one that has no token is -1."""
    if by > 0:
        return changed(lambda scores: np.append(scores[by:], [-1.0] * by))
    return changed(lambda scores: np.append([-1.0] * -by, scores[:by]))


def caught(finding: Finding, says: str) -> None:
    assert finding.problem is not None, finding.line
    assert says in finding.line, finding.line
    assert finding.line.startswith("FAILED ")


# --- requests -----------------------------------------------------------------------------------------------


def test_probe_sequences_are_prompts_that_go_on_with_other_prompts() -> None:
    tokens = [unpack(sequence.token_ids).tolist() for sequence in SEQUENCES]
    assert tokens[0] == [1, 2, 3] + [4, 5, 6, 7, 8, 9, 10, 11]
    assert [sequence.start for sequence in SEQUENCES] == [3, 2, 5, 1]
    assert all(len(ids) == start + T for ids, start in zip(tokens, [3, 2, 5, 1], strict=True))
    assert len({tuple(ids) for ids in tokens}) == 4


def test_every_turn_gives_another_token() -> None:
    found = {int(unpack(probes.replaced(SEQUENCES[0], 3, V, turn).token_ids)[3]) for turn in probes.turns(V)}
    assert len(found) == probes.REPLACEMENTS
    assert int(unpack(SEQUENCES[0].token_ids)[3]) not in found
    assert probes.turns(2) == [1]


# --- broken set-ups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (shifted(1), "1 position(s) too early"),
        (shifted(-1), "1 position(s) too late"),
        (teacher(lambda ids: np.full((len(ids), V), -np.log(V), "f4")), "a uniform teacher gives -3.69"),
    ],
    ids=["too early", "too late", "uniform"],
)
async def test_a_teacher_that_is_shifted_or_uniform_is_caught(wrong: Score, says: str) -> None:
    caught(await probes.not_shifted(wrong, SEQUENCES[0], V, 0.0), says)


@pytest.mark.parametrize("seen", [T, T + 4])
async def test_a_truncated_context_is_caught(seen: int) -> None:
    """Of a server that sees no more than the last `seen` tokens, and of one that refuses longer sequences."""
    longest = probes.longest_sequence(PROMPTS, 30, T)
    last = lambda ids, i: whole_prefix(ids[max(0, i + 1 - seen) : i + 1])[-1]  # noqa: E731
    forgetful = teacher(lambda ids: np.stack([last(ids, i) for i in range(len(ids))]))
    caught(await probes.not_truncated(forgetful, longest, V), "does not see the beginning")
    fits = lambda sequence: sequence.token_ids.shape[0] <= 30  # noqa: E731
    refusing = altered(lambda _, s, answer: answer if fits(s) else ScoreRefused(s.id, "too long"))
    caught(await probes.not_truncated(refusing, longest, V), "raise the teacher's max_length")


async def test_answers_of_a_batch_that_are_not_those_of_each_sequence_alone_are_caught() -> None:
    leaks = changed(lambda scores: scores - np.float32(0.1), first=1)
    finding, noise = await probes.repeatable(leaks, SEQUENCES, 1e-3)
    caught(finding, "scored differently in a batch than alone")
    assert noise == pytest.approx(0.1, abs=1e-5)
    finding, _ = await probes.repeatable(changed(lambda scores: scores[1:]), SEQUENCES, 1e-3)
    caught(finding, "[7, 7, 7, 7] scores for [8, 8, 8, 8] tokens")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (teacher(lambda ids: whole_prefix(ids, 0.6)), "another temperature"),
        (changed(lambda scores: scores * np.nan), "mean difference nan"),
    ],
    ids=["another temperature", "not a number"],
)
async def test_scores_that_are_not_those_of_a_plain_pass_are_caught(wrong: Score, says: str) -> None:
    plain = await probes.scores(teacher(), SEQUENCES)
    caught(probes.equals_plain(await probes.scores(wrong, SEQUENCES), plain, 1e-3), says)


def info(**engine_info: Any) -> TeacherInfo:
    known: dict[str, Any] = {
        "name": "t", "model": "m", "revision": None, "dtype": "float32", "engine": "table", "vocab_size": V,
        "hidden_size": 4, "max_length": 64, "max_topk": 8,
        "tokenizer_fingerprint": "a" * 32 + "b" * 32,
        "chat_template_fingerprint": "d" * 32, "can": [], "fingerprint": "e" * 64,
    }  # fmt: skip
    return TeacherInfo(**known | engine_info)


def test_another_vocabulary_is_caught_and_other_merges_are_said() -> None:
    ours = info().tokenizer_fingerprint
    assert probes.same_tokenizer(ours, info()).problem is None
    caught(probes.same_tokenizer("f" * 32 + ours[32:], info(), 7), "start its process with known_ids = 7")
    finding = probes.same_tokenizer(ours[:32] + "f" * 32, info())
    assert finding.problem is None
    assert finding.figure == "merges differs (vocabulary, merges)"


def test_another_chat_template_is_caught_where_prompts_use_it() -> None:
    for ours in (None, "e" * 32):
        caught(probes.same_template(ours, info(), needed=True), "another chat format")
    assert probes.same_template(None, info(), needed=False).problem is None
    assert probes.same_template("d" * 32, info(), needed=True).problem is None


# --- the objective ------------------------------------------------------------------------------------------

TOKENS = torch.arange(12) % V
STUDENT = torch.from_numpy(ARROWS[:12]).float().log_softmax(1)
TEACHER = torch.from_numpy(ARROWS[12:24]).float().log_softmax(1)


@pytest.mark.parametrize("config", [Sampled(), TopK(k=5)], ids=lambda config: config.type)
def test_objectives_rest_at_a_self_teacher_and_feel_a_real_one(config: Sampled | TopK) -> None:
    figures = objective_figures(build(config), STUDENT, TEACHER, TOKENS, getattr(config, "k", 0))
    loss, gradient, change = figures
    assert probes.self_teacher(loss, gradient).problem is None
    assert probes.gradient_depends(change).problem is None


def test_the_gradient_of_the_full_objective_is_its_closed_form() -> None:
    d, p = STUDENT - TEACHER, STUDENT.exp()
    wanted = (p * (d - (p * d).sum(1, keepdim=True))).norm() / len(TOKENS)
    _, _, change = objective_figures(build(Full()), STUDENT, TEACHER, TOKENS)
    assert change == pytest.approx(float(wanted), rel=1e-4)


def test_a_gradient_without_its_teacher_is_caught() -> None:
    none_is_left = build(Sampled(drop_rho_outside=(2.0, 5.0)))  # of fresh tokens
    _, _, change = objective_figures(none_is_left, STUDENT, TEACHER, TOKENS)
    caught(probes.gradient_depends(change), "drop_rho_outside contains 1")


def test_an_objective_that_does_not_rest_at_its_teacher_is_caught() -> None:
    def truncated(logp: torch.Tensor, goal: Any) -> Any:
        own = logp.gather(1, goal.support_NK)
        return (own.exp() * (own - goal.support_logp_NK)).sum(1), {}

    loss, gradient, _ = objective_figures(truncated, STUDENT, TEACHER, TOKENS, 5)
    assert loss < 1e-6
    caught(probes.self_teacher(loss, gradient), "minimum is not at the teacher")


# --- rollouts, and figures alone ---------------------------------------------------------------------------


async def test_a_rollout_engine_of_other_weights_is_caught() -> None:
    p = await probes.scores(teacher(), SEQUENCES)
    assert probes.mismatch(p, p) == 0.0
    rounding = [one + 0.01 for one in p]
    assert probes.mismatch(p, rounding) == pytest.approx(np.exp(-0.01) - 1 + 0.01)
    assert probes.rollouts_match(probes.mismatch(p, rounding), 0.02, "p").problem is None
    hot = await probes.scores(teacher(lambda ids: whole_prefix(ids, 1.0)), SEQUENCES)
    caught(probes.rollouts_match(probes.mismatch(p, hot), 0.02, "p"), "does not sample from the weights")


def test_a_figure_is_caught_where_it_is_beyond_its_limit() -> None:
    assert probes.scores_match(0.0004, 0.1).problem is None
    caught(probes.scores_match(2.0, 0.1), "they are shifted, or its head is another one")
    assert probes.fits("it", 52, 12, 64, "raise it").problem is None
    caught(probes.fits("it", 53, 12, 64, "raise it"), "up to 53 + 12. rollouts would be cut")
