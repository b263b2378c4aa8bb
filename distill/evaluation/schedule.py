"""Schedules evaluations of published versions, picks the best one, and stops early when patience runs out.

Training never blocks on an evaluation; only the end of the run does. When an evaluation takes longer than the
steps between two, the older of the pending versions is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Literal

from distill.aio import Signal, cancel, until_stalled
from distill.config import EvaluationConfig
from distill.events import ErrorBudget
from distill.interfaces import Evaluator
from distill.metrics.timeline import Timeline
from distill.run_log.records import Evaluated
from distill.run_log.run_log import RunLog
from distill.run_log.validation import report_problem
from sync.claims import Claim
from sync.client import Peer
from sync.errors import RemoteError, Unreachable, WireError, WrongServer
from sync.wire import EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version, checks

logger = logging.getLogger(__name__)
Metric = Literal["reverse_kl", "pass_rate"]
STALL_SECONDS = 900.0
"""Without an answer of /health after which the evaluator counts as gone; covers loading its models."""


def score(report: EvalReport, metric: Metric) -> float:
    """A report's figure of merit: higher is better."""
    if metric == "reverse_kl":
        return -report.reverse_kl
    return -math.inf if report.pass_rate is None else report.pass_rate


def best(reports: list[EvalReport], metric: Metric) -> EvalReport | None:
    """The first of the best; None: no report."""
    return max(reports, key=lambda report: score(report, metric), default=None)


def exhausted(reports: list[EvalReport], metric: Metric, patience: int | None) -> bool:
    """Whether the last `patience` reports brought no improvement; patience None: never."""
    top = best(reports, metric)
    return patience is not None and top is not None and len(reports) - 1 - reports.index(top) >= patience


class Evaluations:
    """`run()` lasts as long as the run; `due()` and `now()` work at any time; one evaluation at a time.

    `done` is called with every report and whether it is the best so far; `stop` with a reason when patience
    has run out.
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
        self._pending: Version | None = None
        self._newest: Version | None = None
        """Newest version that was due."""
        self._answered = False
        """The evaluator has evaluated a version of this run before."""
        self._changed = Signal()
        self._turn = asyncio.Lock()

    def due(self, version: Version) -> None:
        """Consider a version that was just published: it is pending if `evaluation.every` asks for it.

        Evaluated versions outside the current lineage's ancestry (rolled back) do not count.
        """
        state, every = self._run_log.state, self._config.every
        known = [report.version for report in state.evaluations]
        known += [] if self._newest is None else [self._newest]
        last = max((one.step for one in known if state.step_of(one) == one.step), default=-1)
        if (version.step == 0 and last < 0) or (
            every and version.step > last and version.step // every > max(last, 0) // every
        ):
            self._pending = self._newest = version
            self._changed.wake()

    async def run(self) -> None:
        while True:
            while self._pending is None:
                await self._changed.wait()
            version, self._pending = self._pending, None
            try:
                await self.now(version)
            except Unreachable as error:
                logger.warning("evaluation of %s is retried: %s", version, error)
                self._pending = self._pending or version
                await asyncio.sleep(self._retry_seconds)
            except (RemoteError, WireError) as error:
                if isinstance(error, WrongServer) and not self._answered:
                    raise  # it served another run from the start
                logger.error("evaluation of %s is skipped: %s", version, error)

    async def now(self, version: Version) -> EvalReport:
        """The report of `version`: a known one, the one under way, or a new one."""
        async with self._turn:
            known = [one for one in self._run_log.state.evaluations if one.version == version]
            return known[0] if known else await self._evaluate(version)

    async def _evaluate(self, version: Version) -> EvalReport:
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
        """A validated report. Raises WireError for one that cannot be recorded."""
        try:
            report = await self._evaluator.evaluate(version)
            if wrong := report_problem(report, version):
                raise RemoteError(wrong)
            if problem := checks.same_version(report, version):
                raise WireError(f"the evaluator's report of {version} cannot be used: {problem}")
        except WireError as error:
            if self._trust is not None:
                self._trust.bad("the evaluator", version, str(error), lambda: False)
            raise
        if self._trust is not None:
            self._trust.good("the evaluator")
        return report


class HttpEvaluator:
    """Client of the evaluator's HTTP service (`distill.evaluation.service`)."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        stall_timeout_seconds: float = STALL_SECONDS,
        claim: Claim | None = None,
    ) -> None:
        self._peer, self._stall_timeout_seconds = Peer(url, token, claim=claim), stall_timeout_seconds

    async def evaluate(self, version: Version) -> EvalReport:
        """Evaluate a published version, however long it takes; retried only when the connection is lost.

        Raises Unreachable (no /health within `stall_timeout_seconds`), RemoteError.
        """
        request = self._peer.call("/v1/evaluate", EvalRequest(version=version), EvalReport, math.inf)
        stalled = until_stalled(self._peer.alive, self._stall_timeout_seconds)
        work, watch = asyncio.create_task(request), asyncio.create_task(stalled)
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Unreachable(
                f"{self._peer.url}/health has not answered for {self._stall_timeout_seconds:.0f} s "
                f"while {version} was evaluated: is the process running?"
            )
        finally:
            await cancel([work, watch])

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply:
        """Reference values of plain forward passes. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/probe", request, ProbeReply, timeout)

    async def aclose(self) -> None:
        await self._peer.aclose()
