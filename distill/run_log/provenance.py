"""Whether the versions that completions and reports name can be: servers of other runs name others. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from distill.run_log.records import AnyRecord, Concluded, Rollout
from distill.run_log.state import RunState
from sync.wire import EvalReport, Version, VersionSpan


def may_exist(version: Version, state: RunState) -> bool:
    """Whether a replica can hold `version`: the folder it was started with, or one that was published."""
    lineage, step = version
    if version == Version(0, 0):
        return True
    return lineage in state.newest and state.lineages[lineage].start <= step <= state.newest[lineage]


def span_problem(spans: Iterable[VersionSpan], state: RunState) -> str | None:
    """Why a token cannot have been sampled from the version that its span names; None: every one can."""
    wrong = next((span for span in spans if not may_exist(span.version, state)), None)
    if wrong is None:
        return None
    return (
        f"tokens {wrong.start} to {wrong.end} are of {wrong.version}, {_published(wrong.version, state)}: "
        "the replica serves another run's weights; start it again, for this run alone"
    )


def _published(version: Version, state: RunState) -> str:
    newest = state.newest.get(version.lineage)
    if newest is None:
        return f"and this run published nothing of lineage {version.lineage}"
    first = Version(version.lineage, state.lineages[version.lineage].start)
    return f"and this run published {first} to {Version(version.lineage, newest)} of its lineage"


def report_problem(report: EvalReport, asked: Version) -> str | None:
    """Why a report is not one of the version that was asked for; None: it is."""
    if report.version == asked:
        return None
    return (
        f"the evaluator was asked for {asked} and reports {report.version}: it serves another run; start it "
        "again, for this run alone"
    )


class Provenance:
    """The audit of it: `note` every record, in order, with the state after it."""

    def __init__(self) -> None:
        self.impossible: list[str] = []
        """Rollouts of versions that had not been published when they were recorded."""
        self._concluded: list[Concluded] = []

    def note(self, record: AnyRecord, state: RunState) -> None:
        """Look at one record."""
        if isinstance(record, Rollout) and span_problem(record.spans, state):
            self.impossible.append(record.id)
        elif isinstance(record, Concluded):
            self._concluded.append(record)

    def unproven(self) -> list[str]:
        """Problems of the last end; of those that the run went on from, those with weights that differed."""
        *before, last = [Concluded(None, {}, []), *self._concluded]
        counted = [one for one in before if False in one.weights.values()] + [last]
        return [problem for one in counted for problem in one.problems]
