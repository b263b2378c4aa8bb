"""Busy and idle seconds by a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest

from distill.interfaces import Hooks
from distill.metrics.timeline import Span, Timeline
from sync.wire import Published, StepReport, Version


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_work_of_one_role_counts_once() -> None:
    clock, spans = Clock(), []
    timeline = Timeline(spans.append, clock)
    timeline.level("student", "generate", 1)
    clock.now = 102.0
    timeline.level("student", "generate", 3)
    timeline.level("student", "update", 1)
    clock.now = 105.0
    timeline.level("student", "generate", 0)
    clock.now = 106.0
    timeline.level("student", "update", 0)
    clock.now = 110.0
    assert timeline.busy_seconds() == {"student": 6.0}
    assert timeline.idle_seconds() == {"student": 4.0}
    assert spans == [Span("student", "generate", 100.0, 105.0), Span("student", "update", 102.0, 106.0)]


def test_work_that_still_goes_on_counts_up_to_now() -> None:
    clock, spans = Clock(), []
    timeline = Timeline(spans.append, clock)
    timeline.level("teacher", "score", 2)
    clock.now = 103.0
    assert timeline.busy_seconds() == {"teacher": 3.0}
    assert timeline.idle_seconds() == {"teacher": 0.0}
    timeline.cut()
    assert spans == [Span("teacher", "score", 100.0, 103.0)]


def test_what_another_process_measured_is_added() -> None:
    clock, spans = Clock(), []
    timeline = Timeline(spans.append, clock)
    clock.now = 110.0
    timeline.add("trainer", "wait", 101.0, 104.0, busy=False)
    timeline.add("trainer", "train", 104.0, 109.0, busy=True)
    timeline.add("trainer", "publish", 109.0, 109.0, busy=True)
    assert timeline.busy_seconds() == {"trainer": 5.0}
    assert timeline.idle_seconds() == {"trainer": 5.0}
    assert [span.what for span in spans] == ["wait", "train"]


def test_parts_of_a_step_lie_within_it_and_are_not_counted_twice() -> None:
    clock, spans = Clock(), []
    timeline = Timeline(spans.append, clock)
    clock.now = 110.0
    seconds = {"wait": 2.0, "train": 5.0, "publish": 1.0, "checkpoint": 0.0}
    parts = {"forward": 1.0, "backward": 2.0, "optimizer": 1.5}
    timeline.step("trainer", StepReport(Version(0, 1), {}, seconds, parts))
    assert timeline.busy_seconds() == {"trainer": 6.0}
    assert sorted(spans, key=lambda span: (span.start, -span.end)) == [
        Span("trainer", "wait", 102.0, 104.0),
        Span("trainer", "train", 104.0, 109.0),
        Span("trainer", "forward", 104.0, 105.0),
        Span("trainer", "backward", 105.0, 107.0),
        Span("trainer", "optimizer", 107.0, 108.5),
        Span("trainer", "publish", 109.0, 110.0),
    ]


async def test_a_publication_is_encoded_and_then_written(controller: Any) -> None:
    spans: list[Span] = []
    run = controller(None, Hooks(span=spans.append))
    for kind, encode_seconds in (("delta", 0.5), ("full", 0.0)):
        event = Published(Version(0, 1), kind, 5, 20, seconds=2.0, encode_seconds=encode_seconds)
        run.events.emit(event)
    run.close()
    lengths = [(span.role, span.what, pytest.approx(span.end - span.start)) for span in spans]
    assert lengths == [("trainer", "encode", 0.5), ("trainer", "write", 1.5), ("trainer", "write", 2.0)]
    assert spans[0].end == spans[1].start


def test_start_up_can_be_left_out() -> None:
    clock = Clock()
    timeline = Timeline(None, clock)
    timeline.level("student", "generate", 1)
    clock.now = 150.0
    timeline.restart()
    clock.now = 152.0
    assert timeline.busy_seconds() == {"student": 2.0}
    assert timeline.idle_seconds() == {"student": 0.0}
    timeline.level("student", "generate", 0)
    assert timeline.busy_seconds() == {"student": 2.0}


def test_blocked_time_is_summed_until_now() -> None:
    now, spans = [100.0], list[Span]()
    timeline = Timeline(spans.append, clock=lambda: now[0])
    for seconds, whom in [
        (2.0, "replicas"),
        (3.0, "teachers"),
        (0.0, "teachers"),
        (4.0, None),
        (5.0, "replicas"),
    ]:
        timeline.waits("trainer", whom)
        now[0] += seconds
    timeline.waits("r0", "trainer")
    now[0] += 1.0
    assert timeline.waited_seconds() == {
        "trainer": {"replicas": 2.0 + 5.0 + 1.0, "teachers": 3.0},
        "r0": {"trainer": 1.0},
    }
    assert spans == [
        Span("trainer", "wait for replicas", 100.0, 102.0),
        Span("trainer", "wait for teachers", 102.0, 105.0),
    ]
    timeline.restart()
    now[0] += 0.5
    assert timeline.waited_seconds() == {"trainer": {"replicas": 0.5}, "r0": {"trainer": 0.5}}
