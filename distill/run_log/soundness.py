"""What a run's rollouts must be: the checks of sync.wire.checks with what this run asks for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from distill.config import RolloutConfig
from distill.run_log.provenance import span_problem
from distill.run_log.records import Rollout
from sync.wire import Generated, Sampling, Scored, TeacherCompletion, VersionSpan, Want, checks
from sync.wire.checks import Problem

if TYPE_CHECKING:
    from distill.interfaces import Components
    from distill.run_log.state import RunState

Sift = Callable[[Rollout], Rollout | Problem]
"""A rollout of the journal as it may be trained on, or why it may not."""


def soundness(config: RolloutConfig, parts: Components, state: Callable[[], RunState]) -> Soundness:
    """Of a run with these parts; `state` is called when there is one."""
    sampling = Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        stop_token_ids=config.stop_token_ids,
        student_topk=parts.student_topk,
        max_seconds=config.completion_timeout_seconds,
    )
    return Soundness(sampling, parts.want, lambda spans: span_problem(spans, state()), parts.vocab_size)


@dataclass(frozen=True)
class Soundness:
    """Bound to one run."""

    sampling: Sampling
    want: Want
    impossible: Callable[[Iterable[VersionSpan]], str | None] = lambda spans: None
    """Why tokens cannot be of the versions that their spans name; looked at in rollouts of the journal."""
    vocab_size: int = checks.ANY_ID

    def generated(self, answer: Generated) -> Problem | None:
        """Of a completion of the student."""
        return checks.generated(answer, self.sampling, self.vocab_size)

    def written(self, answer: TeacherCompletion) -> Problem | None:
        """Of a completion by a teacher."""
        return checks.written(answer, self.sampling.max_tokens, self.vocab_size)

    def scored(self, answer: Scored, count: int, hidden_size: int | None = None) -> Problem | None:
        """Of a teacher's scores of `count` completion tokens."""
        gather = self.sampling.student_topk
        return checks.scored(answer, count, gather, self.want, self.vocab_size, hidden_size)

    def sift(self, rollout: Rollout) -> Rollout | Problem:
        """A rollout from the journal, without diagnostics that cannot be used."""
        count, k, vocab = rollout.length, self.sampling.student_topk, self.vocab_size
        most = max(count, self.sampling.max_tokens)  # the limit may have been lowered since
        if rollout.scored is None:
            return Problem("scores", "missing", "of every completion token")
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
