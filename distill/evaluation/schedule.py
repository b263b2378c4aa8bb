"""Schedules evaluations of published versions, picks the best one, and stops early when patience runs out.

    due ─▶ completions (generation.py) ─▶ the evaluator's forward pass (evaluator.py) ─▶ report (report.py)
        ─▶ the best so far is kept ─▶ on record

Training goes on beside an evaluation; only the end of the run waits for one. When an evaluation takes longer
than the steps between two, the older pending version is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from distill import waits
from distill.aio import Signal, unless, until_stalled
from distill.config.evaluation import HELD_OUT, EvaluationConfig, Metric
from distill.evaluation.completions import remove_old
from distill.evaluation.generation import Generation
from distill.evaluation.report import Comparison, report_of
from distill.events import NoServerLeft
from distill.interfaces import Common
from distill.record.changes import Evaluated
from distill.waits import EVALUATION
from sync import wire
from sync.base.errors import DataError, RemoteError, Unreachable, WireError, WrongServer
from sync.wire import checks
from sync.wire.client import MAX_ANSWER, Peer

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=wire.Message)
STALL_SECONDS = 900.0
"""Without an answer of /health after which the evaluator counts as gone; covers reading its prompts."""


def score(report: wire.EvalReport, metric: Metric) -> float:
    """A report's figure of merit: higher is better."""
    value: float | None = getattr(report, metric)
    return -math.inf if value is None else -value if metric == "reverse_kl" else value


def best(reports: list[wire.EvalReport], metric: Metric) -> wire.EvalReport | None:
    """The first of the best; None: no report."""
    return max(reports, key=lambda report: score(report, metric), default=None)


def unbettered(
    reports: list[wire.EvalReport], metric: Metric, patience: int | None
) -> wire.EvalReport | None:
    """The best of a lineage's reports, once `patience` of them in a row brought none better; None: go on, as
    always where patience is None."""
    top = best(reports, metric)
    late = patience is not None and top is not None and len(reports) - 1 - reports.index(top) >= patience
    return top if late else None


def due_sets(config: EvaluationConfig, reports: list[wire.EvalReport], step: int, last: bool) -> list[str]:
    """Named sets of an evaluation at `step`; `last`: the run's last one. `reports`: of its lineage so far."""

    def due(name: str, every: int | None) -> bool:
        if step == 0 or last or every is None:
            return True
        before = max((report.version.step for report in reports if name in report.sets), default=0)
        return every > 0 and step // every > before // every

    return [name for name, evaluation_set in config.sets.items() if due(name, evaluation_set.every)]


class Evaluations:
    """`run()` lasts as long as the run; `due()` and `now()` work at any time; one evaluation at a time.

    `done` is called with every report and whether it is the best so far; `stop` with a reason when patience
    has run out.
    """

    retry_seconds = 5.0  # before an evaluation that something was lost for is tried again

    def __init__(
        self,
        common: Common,
        generation: Generation,
        done: Callable[[wire.EvalReport, bool], None],
        stop: Callable[[str], None],
    ) -> None:
        parts, config = common.parts, common.config
        assert config.evaluation is not None, "there is one only with an evaluation"
        assert parts.evaluator is not None, "and with an evaluator"
        self._parts, self._evaluator, self.generation = parts, parts.evaluator, generation
        self._shown = {name: parts.transforms[name] for name in config.by_text}
        self._config, self._steps, self._run_dir = config.evaluation, config.run.steps, config.run_dir
        self._metric = config.metric
        self._record, self._timeline, self._budget = common.record, common.timeline, common.budget
        self._events = common.events
        self._done, self._stop = done, stop
        self._pending: wire.Version | None = None
        self._newest: wire.Version | None = None
        """Newest version that was due."""
        self._answered = False
        """The evaluator has evaluated a version of this run before."""
        self._changed = Signal()
        self._turn = asyncio.Lock()

    def due(self, version: wire.Version) -> None:
        """Consider a version that was just published: it is pending if `evaluation.every` asks for it.

        Evaluated versions outside the current lineage's ancestry (rolled back) do not count.
        """
        every, newest = self._config.every, self._newest
        known = [report.version.step for report in self._of_lineage()]
        known += [newest.step] if newest and self._record.state.step_of(newest) == newest.step else []
        last = max(known, default=-1)
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
                await asyncio.sleep(self.retry_seconds)
            except (RemoteError, WireError) as error:
                if isinstance(error, WrongServer) and not self._answered:
                    raise  # it served another run from the start
                logger.error("evaluation of %s is skipped: %s", version, error)
            except DataError as error:  # a function or an environment of the user's fails
                self._events.emit(NoServerLeft(str(error)))

    async def now(self, version: wire.Version, last: bool = False) -> wire.EvalReport:
        """The report of `version`: a known one, the one under way, or a new one.

        `last`: it is the run's last one, with every named set; a known report stays as it is.
        """
        async with self._turn:
            known = [report for report in self._record.state.evaluations if report.version == version]
            return known[0] if known else await self._evaluate(version, last or version.step >= self._steps)

    async def _evaluate(self, version: wire.Version, last: bool) -> wire.EvalReport:
        metric, state = self._metric, self._record.state
        sets = due_sets(self._config, self._of_lineage(), version.step, last)
        self._timeline.level("evaluator", "evaluate", 1)
        try:
            report = await self.report(version, sets)
            is_best = best([*state.evaluations, report], metric) is report
            if is_best:
                await self._evaluator.keep(report)
        finally:
            self._timeline.level("evaluator", "evaluate", 0)
        self._answered = True
        self._record.write(Evaluated(report))
        await self._record.store.commit()
        await asyncio.to_thread(remove_old, self._run_dir)
        self._done(report, is_best)
        if top := unbettered(self._of_lineage(), metric, self._config.patience):
            self._stop(
                f"{self._config.patience} evaluations brought no better {metric} than "
                f"{getattr(top, metric):.4g} of {top.version}"
            )
        return report

    def _of_lineage(self) -> list[wire.EvalReport]:
        """The reports of the current lineage's ancestry: without what was rolled back."""
        state = self._record.state
        return [
            report for report in state.evaluations if state.step_of(report.version) == report.version.step
        ]

    async def report(self, version: wire.Version, names: Sequence[str]) -> wire.EvalReport:
        """Of a version, on the held-out prompts and these named sets.

        Raises WireError for what cannot be recorded, and what `Generation` and `Evaluator` raise.
        """
        began, route, sets = time.monotonic(), self._parts.route, self._parts.sets
        completions = await self.generation.completions(version, [HELD_OUT, *names])
        generated = time.monotonic()
        comparison = await asyncio.to_thread(
            Comparison, version, completions[HELD_OUT], sets[HELD_OUT], route, self._shown
        )
        try:
            with waits.on(EVALUATION, "evaluator", lambda: f"the divergences of {version}"):
                reply = await self._evaluator.evaluate(comparison.request)
            compared = time.monotonic()
            if reply.version != version:
                raise RemoteError(
                    f"the evaluator was asked for {version} and reports {reply.version}: it serves another "
                    "run; start it again, for this run alone"
                )
            if problem := checks.divergences(reply, comparison.request):
                raise WireError(f"the evaluator's answer about {version} cannot be used: {problem}")
            reference, sums = await self.generation.reference(), comparison.sums(reply)
            seconds = time.monotonic() - began
            report = await asyncio.to_thread(
                report_of, version, sets, completions, sums, reference, route, seconds
            )
            if problem := checks.evaluation(report, version):
                raise WireError(f"the evaluator's divergences of {version} cannot be used: {problem}")
        except WireError as error:
            self._budget.bad("the evaluator", version, str(error), lambda: False)
            raise
        self._budget.good("the evaluator")
        parts_of = generated - began, compared - generated
        logger.info("%s: completions and rewards %.1f s, reverse KL %.1f s", version, *parts_of)
        return report


class HttpEvaluator(Peer):
    """Client of the evaluator's HTTP service (`distill.evaluation.service`)."""

    stall_timeout_seconds = STALL_SECONDS

    async def evaluate(self, request: wire.EvalRequest) -> wire.EvalReply:
        """Compare a version with the teachers, however long it takes; retried only when the connection is
        lost.

        Raises Unreachable (no /health within `stall_timeout_seconds`), RemoteError.
        """
        return await self._long("/v1/evaluate", request, wire.EvalReply, request.version)

    async def keep(self, report: wire.EvalReport) -> None:
        """Keep a version as the best; otherwise as `evaluate`."""
        await self._long("/v1/best", report, wire.Ok, report.version)

    async def _long(self, path: str, body: wire.Message, kind: type[M], version: wire.Version) -> M:
        limit = self.stall_timeout_seconds
        told = (
            f"{self.url}/health has not answered for {limit:.0f} s while {version} was evaluated: is the "
            "process running?"
        )
        return await unless(until_stalled(self.alive, limit), self.call(path, body, kind, math.inf), told)

    async def probe(self, request: wire.ProbeRequest, timeout: float) -> wire.ProbeReply:
        """Reference values of plain forward passes. Raises Unreachable, RemoteError."""
        return await self.call("/v1/probe", request, wire.ProbeReply, timeout, MAX_ANSWER)
