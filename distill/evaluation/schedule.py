"""When the student is evaluated, which version is best, and when more steps are of no use.

Nothing waits for an evaluation but the end of the run; when one takes longer than the steps between two, the
older of the waiting versions is left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Literal, Protocol

from distill.aio import Signal
from distill.config import EvaluationConfig
from distill.events import ErrorBudget
from distill.metrics.timeline import Timeline
from distill.run_log.provenance import report_problem
from distill.run_log.records import Evaluated
from distill.run_log.run_log import RunLog
from sync.errors import RemoteError, Unreachable, WireError, WrongServer
from sync.wire import EvalReport, Version, checks

logger = logging.getLogger(__name__)


class Evaluator(Protocol):
    """Evaluates a published version; step 0 of a lineage is the model folder. May raise Unreachable (asked
    again) and RemoteError (given up)."""

    async def evaluate(self, version: Version) -> EvalReport: ...


def score(report: EvalReport, metric: Literal["reverse_kl", "pass_rate"]) -> float:
    """How good a report is: higher is better."""
    if metric == "reverse_kl":
        return -report.reverse_kl
    return -math.inf if report.pass_rate is None else report.pass_rate


def best(reports: list[EvalReport], metric: Literal["reverse_kl", "pass_rate"]) -> EvalReport | None:
    """The first of the best; None: no report."""
    return max(reports, key=lambda report: score(report, metric), default=None)


def exhausted(
    reports: list[EvalReport], metric: Literal["reverse_kl", "pass_rate"], patience: int | None
) -> bool:
    """Whether the last `patience` reports brought nothing better; None: never."""
    top = best(reports, metric)
    return patience is not None and top is not None and len(reports) - 1 - reports.index(top) >= patience


class Evaluations:
    """`run()` for the length of the run; `due()` and `now()` at any time: they take turns.

    `done` is called with every report and whether it is the best so far; `stop` with a reason when patience
    is at its end.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        config: EvaluationConfig,
        run_log: RunLog,
        timeline: Timeline,
        done: Callable[[EvalReport, bool], None],
        stop: Callable[[str], None],
        retry_seconds: float = 5.0,
        trust: ErrorBudget | None = None,
    ) -> None:
        self._evaluator = evaluator
        self._config = config
        self._run_log = run_log
        self._timeline = timeline
        self._done = done
        self._stop, self._trust = stop, trust
        self._retry_seconds = retry_seconds
        self._waiting: Version | None = None
        self._newest: Version | None = None
        """The newest version that was due."""
        self._answered = False
        """The evaluator has evaluated a version of this run."""
        self._changed = Signal()
        self._turn = asyncio.Lock()

    def due(self, version: Version) -> None:
        """A version was published: evaluate it when its turn has come.

        Versions that the current lineage did not pass, since it was rolled back, do not count as evaluated.
        """
        state, every = self._run_log.state, self._config.every
        known = [report.version for report in state.evaluations]
        known += [] if self._newest is None else [self._newest]
        last = max((one.step for one in known if state.step_of(one) == one.step), default=-1)
        if (version.step == 0 and last < 0) or (
            every and version.step > last and version.step // every > max(last, 0) // every
        ):
            self._waiting = self._newest = version
            self._changed.wake()

    async def run(self) -> None:
        """Evaluate what is due, one after the other, until cancelled."""
        while True:
            while self._waiting is None:
                await self._changed.wait()
            version, self._waiting = self._waiting, None
            try:
                await self.now(version)
            except Unreachable as error:
                logger.warning("evaluation of %s is tried again: %s", version, error)
                self._waiting = self._waiting or version
                await asyncio.sleep(self._retry_seconds)
            except (RemoteError, WireError) as error:
                if isinstance(error, WrongServer) and not self._answered:
                    raise  # it was another run's from the start
                logger.error("evaluation of %s is left out: %s", version, error)

    async def now(self, version: Version) -> EvalReport:
        """The report of `version`: the one that is known, or that is under way, else a new one."""
        async with self._turn:
            known = [one for one in self._run_log.state.evaluations if one.version == version]
            return known[0] if known else await self._evaluate(version)

    async def _evaluate(self, version: Version) -> EvalReport:
        """Evaluate, record the report and look at patience."""
        metric, reports = self._config.metric, self._run_log.state.evaluations
        self._timeline.level("evaluator", "evaluate", 1)
        try:
            report = await self._checked(version)
        finally:
            self._timeline.level("evaluator", "evaluate", 0)
        self._answered = True
        self._run_log.write(Evaluated(report))
        await self._run_log.journal.commit()
        self._done(report, best(reports, metric) is report)
        if exhausted(reports, metric, self._config.patience):
            self._stop(
                f"{self._config.patience} evaluations brought no better {metric} than {best(reports, metric)}"
            )
        return report

    async def _checked(self, version: Version) -> EvalReport:
        """A report that can be recorded. Raises WireError for one that cannot."""
        try:
            report = await self._evaluator.evaluate(version)
            if wrong := report_problem(report, version):
                raise RemoteError(wrong)
            if problem := checks.evaluation(report, version):
                raise WireError(f"the evaluator's report of {version} cannot be used: {problem}")
        except WireError as error:
            if self._trust is not None:
                self._trust.bad("the evaluator", version, str(error), lambda: False)
            raise
        if self._trust is not None:
            self._trust.good("the evaluator")
        return report
