"""Whether the versions that completions and reports name can be: a server of another run names others."""

from __future__ import annotations

from collections.abc import Iterable

from distill.control.state import RunState
from sync.wire import EvalReport, Version, VersionSpan


def span_problem(spans: Iterable[VersionSpan], state: RunState) -> str | None:
    """Why a token cannot have been sampled from the version that its span names; None: every one can."""
    wrong = next((span for span in spans if not state.may_exist(span.version)), None)
    if wrong is None:
        return None
    return (
        f"tokens {wrong.start} to {wrong.end} are of {wrong.version}, {_published(wrong.version, state)}: "
        "the replica serves another run's weights; start it again, for this run alone"
    )


def report_problem(report: EvalReport, asked: Version) -> str | None:
    """Why a report is not one of the version that was asked for; None: it is."""
    if report.version == asked:
        return None
    return (
        f"the evaluator was asked for {asked} and reports {report.version}: it serves another run; start it "
        "again, for this run alone"
    )


def _published(version: Version, state: RunState) -> str:
    newest = state.newest.get(version.lineage)
    if newest is None:
        return f"and this run published nothing of lineage {version.lineage}"
    first = Version(version.lineage, state.lineages[version.lineage].start)
    return f"and this run published {first} to {Version(version.lineage, newest)} of its lineage"
