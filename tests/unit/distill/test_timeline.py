"""Busy and idle seconds by a clock of our own."""

from __future__ import annotations

from distill.metrics.timeline import Span, Timeline


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


def test_start_up_can_be_left_out() -> None:
    clock = Clock()
    timeline = Timeline(None, clock)
    timeline.level("student", "generate", 1)
    clock.now = 150.0
    timeline.restart()
    clock.now = 152.0
    assert timeline.seconds() == 2.0
    assert timeline.busy_seconds() == {"student": 2.0}
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
