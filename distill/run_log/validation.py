"""Validation of rollouts: the checks of sync.wire.checks, bound to what this run requested. Pure.

A problem is returned, never raised: the caller quarantines, requeues or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from distill.config import RolloutConfig
from distill.run_log.records import Rollout
from sync.wire import (
    EvalReport,
    Generated,
    Sampling,
    Scored,
    TeacherCompletion,
    Version,
    VersionSpan,
    Want,
    checks,
)
from sync.wire.checks import Problem

if TYPE_CHECKING:
    from distill.interfaces import Components
    from distill.run_log.state import RunState

ValidateRollout = Callable[[Rollout], Rollout | Problem]
"""A rollout of the journal as it may be trained on, or why it may not."""


def validator(config: RolloutConfig, parts: Components, state: Callable[[], RunState]) -> Validator:
    """The validator of a run; `state` is called when a rollout is validated."""
    sampling = Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        stop_token_ids=config.stop_token_ids,
        student_topk=parts.student_topk,
        max_seconds=config.completion_timeout_seconds,
    )
    return Validator(sampling, parts.want, lambda spans: span_problem(spans, state()), parts.vocab_size)


@dataclass(frozen=True)
class Validator:
    """Validates what engines and the journal return for one run; None: no problem."""

    sampling: Sampling
    want: Want
    impossible: Callable[[Iterable[VersionSpan]], str | None] = lambda spans: None
    """Why tokens cannot be of the versions that their spans name; applied to rollouts of the journal."""
    vocab_size: int = checks.ANY_ID

    def generated(self, answer: Generated) -> Problem | None:
        """Of a completion by the student."""
        return checks.generated(answer, self.sampling, self.vocab_size)

    def generated_by_teacher(self, answer: TeacherCompletion) -> Problem | None:
        """Of a completion by a teacher."""
        return checks.teacher_completion(answer, self.sampling.max_tokens, self.vocab_size)

    def scored(self, answer: Scored, count: int, hidden_size: int | None = None) -> Problem | None:
        """Of a teacher's scores of `count` completion tokens."""
        gather = self.sampling.student_topk
        return checks.scored(answer, count, gather, self.want, self.vocab_size, hidden_size)

    def journaled(self, rollout: Rollout) -> Rollout | Problem:
        """A rollout read back from the journal, without diagnostics that are not usable."""
        if rollout.scored is None:
            return Problem("scores", "missing", "of every completion token")
        count, k, vocab = rollout.length, self.sampling.student_topk, self.vocab_size
        most = max(count, self.sampling.max_tokens)  # the limit may have been lowered since
        problem = checks.first(
            checks.prompt(rollout.prompt, vocab),
            checks.tokens(rollout.tokens, rollout.logprob, most, vocab),
            checks.spans(rollout.spans, 0 if rollout.by_teacher else count),
            checks.topk_ids("topk_ids", rollout.topk_ids, count, k, vocab, -1),
            self.scored(rollout.scored, count),
        )
        if problem is not None:
            return problem
        if why := self.impossible(rollout.spans):
            return Problem("spans", why, "of versions that this run published")
        scored = checks.without_bad_diagnostics(rollout.scored, count)
        return msgspec.structs.replace(rollout, scored=scored)


def may_exist(version: Version, state: RunState) -> bool:
    """Whether a replica can hold `version`: the folder it was started with, or one that was published."""
    lineage, step = version
    if version == Version(0, 0):
        return True
    return lineage in state.newest and state.lineages[lineage].start <= step <= state.newest[lineage]


def span_problem(spans: Iterable[VersionSpan], state: RunState) -> str | None:
    """Why a token cannot have been sampled from the version that its span names; None: every one can.

    A server of another run names versions that this run never published.
    """
    wrong = next((span for span in spans if not may_exist(span.version, state)), None)
    if wrong is None:
        return None
    lineage = wrong.version.lineage
    published = f"and this run published nothing of lineage {lineage}"
    if lineage in state.newest:
        first, last = Version(lineage, state.lineages[lineage].start), Version(lineage, state.newest[lineage])
        published = f"and this run published {first} to {last} of its lineage"
    return (
        f"tokens {wrong.start} to {wrong.end} are of {wrong.version}, {published}: "
        "the replica serves another run's weights; start it again, for this run alone"
    )


def report_problem(report: EvalReport, requested: Version) -> str | None:
    """Why a report is not one of the version that was requested; None: it is."""
    if report.version == requested:
        return None
    return (
        f"the evaluator was asked for {requested} and reports {report.version}: it serves another run; start "
        "it again, for this run alone"
    )
