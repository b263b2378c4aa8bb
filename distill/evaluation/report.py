"""The figures of an evaluation, from its completions and the evaluator's sums. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from distill.config.evaluation import HELD_OUT
from distill.evaluation import statistics
from distill.evaluation.completions import Completion, Tokens, behaviour
from distill.evaluation.reverse_kl import ReverseKL, total
from distill.evaluation.sets import PromptSet
from distill.interfaces import Transform
from distill.prompts.rewards import VOTING
from sync.wire import (
    Array,
    EvalReply,
    EvalReport,
    EvalRequest,
    OwnTokens,
    PartReport,
    SetReport,
    Version,
    pack,
)

Route = Callable[[str], str]
"""Data source → teacher; empty: there are none."""


class Comparison:
    """The held-out completions of a version, as the evaluator is asked about them."""

    def __init__(
        self,
        version: Version,
        completions: Sequence[Completion],
        prompt_set: PromptSet,
        route: Route,
        shown: Mapping[str, Transform],
    ) -> None:
        """`shown`: what teachers with a tokenizer of their own see of a prompt, by name."""
        self._completions = completions
        self._asked: dict[str, list[tuple[int, OwnTokens]]] = {}
        """Teacher → sequences, each with the number of its completion."""
        for number, completion in enumerate(completions):
            prompt = prompt_set.prompts[completion.index]
            if not (teacher := route(prompt.source)):
                continue
            seen = pack(np.array(shown[teacher](prompt), np.int32)) if teacher in shown else None
            sampled = [(number, _own_tokens(part, seen)) for part in completion.sequences if part.own]
            self._asked.setdefault(teacher, []).extend(sampled)
        teachers = {name: [tokens for _, tokens in asked] for name, asked in self._asked.items()}
        self.request = EvalRequest(version=version, teachers=teachers)

    def sums(self, reply: EvalReply) -> list[ReverseKL]:
        """By teacher; `reply` was checked."""
        by_teacher = []
        for name, asked in self._asked.items():
            by_teacher.append(kl := ReverseKL(reply.teachers[name].exact))
            for (number, tokens), value in zip(asked, reply.teachers[name].sums, strict=True):
                kl.add(number, value, tokens.count)
        return by_teacher


def _own_tokens(tokens: Tokens, shown: Array | None) -> OwnTokens:
    first = len(tokens.prompt_ids)
    token_ids_L = np.concatenate([np.array(tokens.prompt_ids, np.int32), tokens.token_ids])
    return OwnTokens(pack(token_ids_L), [(first + start, first + end) for start, end in tokens.own], shown)


def report_of(
    version: Version,
    sets: Mapping[str, PromptSet],
    completions: Mapping[str, list[Completion]],
    compared: list[ReverseKL],
    reference: list[Completion] | None,
    route: Route,
    seconds: float,
) -> EvalReport:
    """The report of a version; `completions` by set, the held-out ones among them."""
    prompt_set, held_out = sets[HELD_OUT], completions[HELD_OUT]
    passed = [prompt_set.passes(completion.index, completion.reward) for completion in held_out]
    of_all = _figures(compared, held_out, passed, range(len(held_out)))
    rated = of_all.pass_rate is not None
    interval = statistics.share(_per_prompt(passed, prompt_set.completions), 1) if rated else None
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
        votes = [statistics.majority([o.answer for o in completions[row]], passed[row]) for row in rows]
    return SetReport(
        prompts=len(prompt_set.prompts),
        completions=len(completions),
        tokens=sum(completion.tokens for completion in completions),
        truncated=_truncated(completions),
        failed=sum(completion.error is not None for completion in completions),
        pass_at_1=statistics.share(_per_prompt(passed, k), k),
        average=statistics.mean(_per_prompt([completion.reward or 0.0 for completion in completions], k)),
        majority=None if votes is None else statistics.share(np.array(votes), 1),
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
    value, error = total([part for kl in compared if (part := kl.among(set(members))).sums])
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
