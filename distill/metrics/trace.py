"""trace.json of a run, for ui.perfetto.dev or chrome://tracing: every role on one clock.

A process per role, a thread per kind of work, from timeline.jsonl; an update of a replica is divided as the
journal has it (stage, pause, apply); counters of each step come from metrics.jsonl. Times are microseconds
since the first span. Source: the Trace Event Format, events "X" (complete), "C" (counter) and "M" (names).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from distill.run_log.journal import read_all
from distill.run_log.records import VersionApplied
from sync.errors import DataError
from sync.jsonl import read_lines

COUNTERS: Final = ("reverse_kl", "staleness/mean", "buffer/size", "rollouts/in_flight", "tokens/trained")
MICRO: Final = 1e6
Event = dict[str, Any]


def write_trace(run_dir: Path, target: Path | None = None) -> Path:
    """Write the trace of a run, finished or not; its path. Raises DataError when the run has no timeline."""
    spans = read_lines(run_dir / "timeline.jsonl")
    if not spans:
        raise DataError(
            f"{run_dir} holds no timeline.jsonl with spans: name the folder of a run that trained"
        )
    updates: dict[str, list[VersionApplied]] = defaultdict(list)
    for _, record in read_all(run_dir / "journal"):
        if isinstance(record, VersionApplied):
            updates[record.replica].append(record)
    events = [*_spans(spans, updates), *_counters(read_lines(run_dir / "metrics.jsonl"), _began(spans))]
    path = target or run_dir / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _began(spans: Sequence[Event]) -> float:
    return min(float(span["start"]) for span in spans)


def _spans(spans: Sequence[Event], updates: dict[str, list[VersionApplied]]) -> Iterator[Event]:
    began = _began(spans)
    roles = {role: number for number, role in enumerate(sorted({span["role"] for span in spans}), 1)}
    kinds = {what: number for number, what in enumerate(sorted({span["what"] for span in spans}), 1)}
    for role, process in roles.items():
        yield _name("process_name", role, process)
        for what in sorted({span["what"] for span in spans if span["role"] == role}):
            yield _name("thread_name", what, process, kinds[what])
    applied = {replica: iter(records) for replica, records in updates.items()}
    for span in spans:
        process, thread = roles[span["role"]], kinds[span["what"]]
        start, end = float(span["start"]) - began, float(span["end"]) - began
        yield _complete(span["what"], start, end, process, thread)
        if span["what"] == "update" and (record := next(applied.get(span["role"], iter(())), None)):
            yield from _parts(record, start, process, thread)


def _parts(record: VersionApplied, start: float, process: int, thread: int) -> Iterator[Event]:
    """Stage and pause of an update, one after the other, and the loading at the end of the pause."""
    paused = start + record.stage_seconds
    resumed = paused + record.pause_seconds
    yield _complete("stage", start, paused, process, thread, version=str(record.version), bytes=record.bytes)
    yield _complete("pause", paused, resumed, process, thread)
    yield _complete("apply", resumed - record.apply_seconds, resumed, process, thread)


def _counters(lines: Sequence[Event], began: float) -> Iterator[Event]:
    for line in lines:
        for name in COUNTERS:
            if line.get(name) is not None:
                at = MICRO * (line["time"] - began)
                yield {"ph": "C", "name": name, "pid": 0, "ts": at, "args": {"value": line[name]}}


def _complete(name: str, start: float, end: float, process: int, thread: int, **args: Any) -> Event:
    times = {"ts": MICRO * start, "dur": MICRO * (end - start)}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _name(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
