"""trace.json of a run, for ui.perfetto.dev or chrome://tracing: every role on one clock.

A process per role and a thread per kind of work, from timeline.jsonl; counters of each step, from
metrics.jsonl. Times are whole microseconds since the first span. Perfetto drops what overlaps on a thread, as
spans do that a late report dated: they are cut where the one before ends. Source: the Trace Event Format,
events "X" (complete), "C" (counter) and "M" (names).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from distill.metrics.results import MetricsRow
from distill.metrics.timeline import Span
from sync.base.errors import DataError
from sync.base.jsonl import read_lines

COUNTERS: Final = (
    "train/reverse_kl",
    "buffer/age_mean",
    "buffer/size",
    "rollout/in_flight",
    "train/tokens_total",
)
MICRO: Final = 1e6
Event = dict[str, Any]


def write_trace(run_dir: Path) -> Path:
    """Write the trace of a run, finished or not; its path. Raises DataError when the run has no timeline."""
    spans = read_lines(run_dir / "timeline.jsonl", Span)
    if not spans:
        raise DataError(f"{run_dir} holds no timeline.jsonl with spans: name the folder of a run")
    began = min(float(span["start"]) for span in spans)
    events = [*_spans(spans, began)]
    for line in read_lines(run_dir / "metrics.jsonl", MetricsRow):
        counted = {"ph": "C", "pid": 0, "ts": MICRO * (line["time"] - began)}
        figures = {name: line[name] for name in COUNTERS if line.get(name) is not None}
        events += [{**counted, "name": name, "args": {"value": value}} for name, value in figures.items()]
    path = run_dir / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _spans(spans: Sequence[Event], began: float) -> Iterator[Event]:
    tracks = sorted({(span["role"], span["what"]) for span in spans})
    roles = {role: number for number, role in enumerate(dict(tracks), 1)}
    threads = {track: number for number, track in enumerate(tracks, 1)}
    for role, process in roles.items():
        yield _name("process_name", role, process, 0)
    for (role, what), thread in threads.items():
        yield _name("thread_name", what, roles[role], thread)
    ends: dict[int, int] = defaultdict(int)
    for span in sorted(spans, key=itemgetter("start")):
        thread = threads[span["role"], span["what"]]
        start, end = (round(MICRO * (float(span[edge]) - began)) for edge in ("start", "end"))
        start = max(start, ends[thread])
        ends[thread] = end = max(start, end)
        place = {"pid": roles[span["role"]], "tid": thread}
        yield {"ph": "X", "name": span["what"], **place, "ts": start, "dur": end - start}


def _name(kind: str, name: str, process: int, thread: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
