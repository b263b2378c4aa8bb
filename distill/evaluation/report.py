"""The figures of an evaluation, from its completions and the evaluator's sums. Pure.

`reverse_kl` is KL(p‖q) of student p and teacher q, averaged over completion tokens. Completions are sampled
from p at temperature 1, so

    exact       Σ_v p(v) (log p(v) − log q(v)) over the whole vocabulary at each token, fp32; it needs the
                hidden states and the head of both
    estimate    log p(y) − log q(y) of the sampled token y: the same mean in expectation. With x_i the sum
                over the n_i tokens of completion i of m, and r = Σx / Σn, the standard error of r is
                sqrt(m/(m−1) · Σ e_i²) / Σn, e_i = x_i − r·n_i: completions are independent, their tokens are
                not; with several teachers e_i is less its mean over the completions of that teacher

Rows of a model beyond the tokenizer's vocabulary do not exist for it. The evaluator computes the sums.

pass@1 is the mean over prompts of the share of a prompt's completions that pass; avg@k the mean of the mean
reward; maj@k the share of prompts whose most frequent answer passes, where answers that tie share the vote.

Intervals are over prompts, whose completions are not independent. With m_i the mean of prompt i of P, m their
mean and s² = Σ(m_i − m)²/(P−1):

    shares    Wilson's score interval of m with the effective size n = m(1−m)·P/s², at least P (completions
              of a prompt agree) and at most P·k (they are independent); for k = 1 it is Wilson's interval
    means     m ± t·s/√P, t of Student's distribution with P−1 degrees of freedom; one prompt has no interval

Letters in shapes: M completions, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from distill.config.evaluation import HELD_OUT
from distill.evaluation.completions import Completion, behaviour
from distill.evaluation.sets import PromptSet
from distill.interfaces import Transform
from distill.prompts.rewards import VOTING
from sync.wire import Estimate, EvalReply, EvalReport, EvalRequest, PartReport, SetReport, Version, pack

Z = 1.959964
"""Quantile of the normal distribution, for intervals of 95 %."""


class ReverseKL(NamedTuple):
    """Sums over the tokens of each completion, by one teacher."""

    is_exact: bool
    sum_M: np.ndarray
    """f8: of the divergence, or of log p − log q"""
    tokens_M: np.ndarray
    """0: this teacher did not score it"""

    def among(self, completions: Sequence[int]) -> ReverseKL:
        """Sums of those of these completions that it scored."""
        scored = [number for number in completions if self.tokens_M[number]]
        return ReverseKL(self.is_exact, self.sum_M[scored], self.tokens_M[scored])

    def variance(self, ratio: float) -> float:
        """Variance of the sum of e over all completions; `ratio`: the r of all teachers. 0: it is exact."""
        if self.is_exact:
            return 0.0
        if (count := len(self.sum_M)) == 1:
            return float(self.sum_M[0] ** 2)  # nothing to compare it with
        return count * count / (count - 1) * float((self.sum_M - ratio * self.tokens_M).var())


def total(parts: Sequence[ReverseKL]) -> tuple[float | None, float | None]:
    """Mean over the tokens of all teachers, and its standard error, None where it is exact; both None where
    nothing was compared."""
    parts = [part for part in parts if len(part.sum_M)]
    if not parts:
        return None, None
    tokens = int(sum(part.tokens_M.sum() for part in parts))
    value = float(sum(part.sum_M.sum() for part in parts)) / tokens
    if all(part.is_exact for part in parts):
        return value, None
    return value, math.sqrt(sum(part.variance(value) for part in parts)) / tokens


class Comparison:
    """The held-out completions of a version, as the evaluator is asked about them."""

    def __init__(
        self,
        version: Version,
        completions: Sequence[Completion],
        prompt_set: PromptSet,
        route: Callable[[str], str],
        shown: Mapping[str, Transform],
    ) -> None:
        """`route`: data source → teacher; empty: there are none. `shown`: what teachers with a tokenizer of
        their own see of a prompt, by name."""
        self._count = len(completions)
        self._numbers: dict[str, list[int]] = {}
        """Teacher → the completion that each of its sequences is of."""
        self.request = EvalRequest(version=version, teachers={})
        for number, completion in enumerate(completions):
            prompt = prompt_set.prompts[completion.index]
            if not (teacher := route(prompt.source)):
                continue
            seen = pack(np.array(shown[teacher](prompt), np.int32)) if teacher in shown else None
            sampled = [part.sent(seen) for part in completion.sequences if part.own]
            self.request.teachers.setdefault(teacher, []).extend(sampled)
            self._numbers.setdefault(teacher, []).extend([number] * len(sampled))

    def sums(self, reply: EvalReply) -> list[ReverseKL]:
        """By teacher; `reply` was checked."""

        def by_completion(teacher: str, values: Sequence[float]) -> np.ndarray:
            return np.bincount(self._numbers[teacher], values, self._count)

        return [
            ReverseKL(
                reply.teachers[name].exact,
                by_completion(name, reply.teachers[name].sums),
                by_completion(name, [tokens.count for tokens in asked]),
            )
            for name, asked in self.request.teachers.items()
        ]


def report_of(
    version: Version,
    sets: Mapping[str, PromptSet],
    completions: Mapping[str, list[Completion]],
    compared: list[ReverseKL],
    reference: list[Completion] | None,
    route: Callable[[str], str],
    seconds: float,
) -> EvalReport:
    """The report of a version; `completions` by set, the held-out ones among them."""
    prompt_set, held_out = sets[HELD_OUT], completions[HELD_OUT]
    passed = [prompt_set.passes(completion.index, completion.reward) for completion in held_out]
    of_all = _figures(compared, held_out, passed, range(len(held_out)))
    rated = of_all.pass_rate is not None
    interval = share(_per_prompt(passed, prompt_set.completions), 1) if rated else None
    sources = [prompt_set.prompts[completion.index].source for completion in held_out]
    return EvalReport(
        version=version,
        **msgspec.structs.asdict(of_all),
        pass_rate_interval=None if interval is None else (interval.low, interval.high),
        truncated=_truncated(held_out),
        seconds=seconds,
        sets={name: _set_report(sets[name], made) for name, made in completions.items() if name != HELD_OUT},
        behaviour=behaviour(held_out),
        reference=None if reference is None else behaviour(reference),
        sources=_by_name(sources, compared, held_out, passed),
        teachers=_by_name([route(source) for source in sources], compared, held_out, passed),
    )


def _set_report(prompt_set: PromptSet, completions: list[Completion]) -> SetReport:
    k, votes = prompt_set.completions, None
    passed = [prompt_set.passes(completion.index, completion.reward) for completion in completions]
    function = getattr(prompt_set.config, "reward_fn", None)
    if function in VOTING or any(completion.answer is not None for completion in completions):
        rows = [slice(start, start + k) for start in range(0, len(completions), k)]
        votes = [majority([o.answer for o in completions[row]], passed[row]) for row in rows]
    return SetReport(
        prompts=len(prompt_set.prompts),
        completions=len(completions),
        tokens=sum(completion.tokens for completion in completions),
        truncated=_truncated(completions),
        failed=sum(completion.error is not None for completion in completions),
        pass_at_1=share(_per_prompt(passed, k), k),
        average=mean(_per_prompt([completion.reward or 0.0 for completion in completions], k)),
        majority=None if votes is None else share(np.array(votes), 1),
    )


def _truncated(completions: Sequence[Completion]) -> float:
    return sum(completion.finish_reason == "length" for completion in completions) / len(completions)


def _by_name(
    names: Sequence[str], compared: list[ReverseKL], completions: Sequence[Completion], passed: Sequence[bool]
) -> dict[str, PartReport]:
    """Figures by name; `names`: one of each completion. Empty: they have one name."""
    members: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        members.setdefault(name, []).append(number)
    return {
        n: _figures(compared, completions, passed, indices)
        for n, indices in sorted(members.items())
        if len(members) > 1
    }


def _figures(
    compared: list[ReverseKL],
    completions: Sequence[Completion],
    passed: Sequence[bool],
    members: Sequence[int],
) -> PartReport:
    """Figures of some completions; `compared`: with each teacher. Without rewards where one has none."""
    chosen = [completions[number] for number in members]
    value, error = total([kl.among(members) for kl in compared])
    rewarded = all(completion.reward is not None or completion.error for completion in chosen)
    rewards = [completion.reward or 0.0 for completion in chosen]
    return PartReport(
        completions=len(chosen),
        tokens=sum(completion.tokens for completion in chosen),
        reverse_kl=value,
        reverse_kl_error=error,
        pass_rate=sum(passed[number] for number in members) / len(members) if rewarded else None,
        reward=sum(rewards) / len(rewards) if rewarded else None,
    )


def _per_prompt(values: Sequence[float], k: int) -> np.ndarray:
    """f8 [P]: mean of each prompt's k completions, which stand together."""
    return np.array(values, float).reshape(-1, k).mean(1)


# --- figures of prompts


def share(mean_P: np.ndarray, k: int) -> Estimate:
    """Mean of shares in [0, 1], each over k completions, with Wilson's interval."""
    p, size = float(mean_P.mean()), float(len(mean_P))
    if 0 < p < 1 and size > 1:
        spread = float(mean_P.var(ddof=1))
        size = min(size * k, max(size, p * (1 - p) * size / spread)) if spread > 0 else size * k
    centre, divisor = p + Z**2 / (2 * size), 1 + Z**2 / size
    half = Z * math.sqrt(p * (1 - p) / size + Z**2 / (4 * size**2))
    return Estimate(p, max(0.0, (centre - half) / divisor), min(1.0, (centre + half) / divisor))


def mean(mean_P: np.ndarray) -> Estimate:
    """Mean of numbers of any scale; of one number, the interval is that number."""
    value, free = float(mean_P.mean()), len(mean_P) - 1
    if free == 0:
        return Estimate(value, value, value)
    half = _student(free) * float(mean_P.std(ddof=1)) / math.sqrt(free + 1)
    return Estimate(value, value - half, value + half)


def _student(free: int) -> float:
    """Z of Student's distribution, by Cornish and Fisher's expansion: within 1 % from two degrees on."""
    z, powers = Z, [1 / free**n for n in range(1, 5)]
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term * power for term, power in zip(terms, powers, strict=True))


def majority(answers: Sequence[str | None], passes: Sequence[bool]) -> float:
    """Share of the vote on one prompt that passes; completions without an answer do not vote."""
    votes: dict[str, list[bool]] = {}
    for answer, passed in zip(answers, passes, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(passed)
    count = max(map(len, votes.values()), default=0)
    leading = [sum(passed) / count for passed in votes.values() if len(passed) == count]
    return sum(leading) / max(1, len(leading))
