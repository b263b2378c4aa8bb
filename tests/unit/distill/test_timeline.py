"""Busy and idle seconds by a clock of our own."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from in_memory import MemoryTrainer
from started import killed_after, to_the_end

from distill.interfaces import Hooks
from distill.metrics.results import earlier_starts
from distill.metrics.timeline import Span, Timeline
from distill.metrics.trackers import MetricsFile, log_all
from distill.waits import Wait, Waits
from sync.wire import Published, StepReport, Version


class Recorded(Timeline):
    """A timeline with a clock of its own and its spans."""

    def __init__(self, earlier: dict[str, Any] | None = None) -> None:
        self.now, self.spans = 100.0, list[Span]()
        super().__init__(self.spans.append, lambda: self.now, earlier or {})

    def seconds(self, kind: str) -> dict[str, Any]:
        return self.figures()[f"{kind}_seconds"]

    def at(self, now: float, *level: Any) -> Any:
        """Busy and idle seconds at this time, from which on a role does one thing so many times at once."""
        self.now = now
        if level:
            self.level(*level)
        return self.seconds("busy"), self.seconds("idle")


@pytest.fixture
def timeline() -> Recorded:
    return Recorded()


def test_overlapping_work_of_one_role_counts_once_and_what_goes_on_up_to_now(
    timeline: Recorded,
) -> None:
    timeline.at(100.0, "student", "generate", 1)
    timeline.at(102.0, "student", "generate", 3)
    timeline.at(102.0, "student", "update", 1)
    timeline.at(105.0, "student", "generate", 0)
    timeline.at(106.0, "student", "update", 0)
    timeline.at(109.0, "student", "generate", 2)
    assert timeline.at(110.0) == ({"student": 7.0}, {"student": 3.0})
    timeline.cut()
    generated = [Span("student", "generate", *ends) for ends in ((100.0, 105.0), (109.0, 110.0))]
    assert timeline.spans == [generated[0], Span("student", "update", 102.0, 106.0), generated[1]]


def test_parts_of_a_step_lie_within_it_and_are_not_counted_twice(timeline: Recorded) -> None:
    timeline.now = 110.0
    seconds = {"wait": 2.0, "train": 5.0, "publish": 1.0, "checkpoint": 0.0}
    parts = {"forward": 1.0, "backward": 2.0, "optimizer": 1.5}
    timeline.step("trainer", StepReport(Version(0, 1), {}, seconds, parts))
    assert timeline.at(110.0) == ({"trainer": 6.0}, {"trainer": 4.0})
    assert sorted(timeline.spans, key=lambda span: (span.start, -span.end)) == [
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


def test_a_system_clock_that_is_set_back_takes_no_seconds_away(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, time_of_day = list[Span](), time.time
    timeline = Timeline(spans.append)
    timeline.level("student", "generate", 1)
    monkeypatch.setattr(time, "time", lambda: time_of_day() - 3600.0)
    timeline.level("student", "generate", 0)
    assert timeline.figures()["run_seconds"] >= timeline.figures()["busy_seconds"]["student"] > 0
    assert spans[0].start == pytest.approx(time_of_day(), abs=60)


def test_start_up_can_be_left_out(timeline: Recorded) -> None:
    timeline.at(100.0, "student", "generate", 1)
    timeline.at(150.0)
    timeline.restart()
    assert timeline.at(152.0) == ({"student": 2.0}, {"student": 0.0})
    assert timeline.at(152.0, "student", "generate", 0) == ({"student": 2.0}, {"student": 0.0})


def test_blocked_time_is_summed_until_now_and_a_wait_that_goes_on_after_a_wake_is_one_span(
    timeline: Recorded,
) -> None:
    on = partial(Wait, Waits(timeline.blocked))
    waits = [(0.5, "replicas"), (1.5, "replicas"), (3.0, "teachers"), (0.0, "teachers"), (4.0, None)]
    for seconds, cause in waits:
        with on("trainer", "batch 1", cause=cause):
            timeline.now += seconds
    with on("trainer", "batch 1", cause="replicas"), on("trainer", "batch 1", cause="replicas"):
        timeline.now += 5.0
        with on("r0", "room", cause="trainer"):
            timeline.now += 1.0
        of_trainer = {"replicas": 2.0 + 5.0 + 1.0, "teachers": 3.0}
        assert timeline.seconds("waited") == {"trainer": of_trainer, "r0": {"trainer": 1.0}}
        timeline.cut()
        assert timeline.spans == [
            Span("trainer", "wait for replicas", 100.0, 102.0),
            Span("trainer", "wait for teachers", 102.0, 105.0),
            Span("r0", "wait for trainer", 114.0, 115.0),
        ]
        timeline.restart()
        timeline.now += 0.5
    assert timeline.seconds("waited") == {"trainer": {"replicas": 0.5}}


def test_seconds_of_earlier_starts_are_added_name_by_name() -> None:
    earlier = {
        "run_seconds": 50.0,
        "busy_seconds": {"trainer": 20.0, "student-3": 9.0},
        "idle_seconds": {"trainer": 30.0, "student-3": 41.0},
        "waited_seconds": {"trainer": {"replicas": 5.0}},
    }
    timeline = Recorded(earlier)
    timeline.add("trainer", "train", 100.0, 104.0, busy=True)
    with Wait(Waits(timeline.blocked), "trainer", "batch 1", cause="teachers"):
        timeline.now = 110.0
    assert timeline.figures() == {
        "run_seconds": 60.0,
        "busy_seconds": {"trainer": 24.0, "student-3": 9.0},
        "idle_seconds": {"trainer": 36.0, "student-3": 41.0},
        "waited_seconds": {"trainer": {"replicas": 5.0, "teachers": 10.0}},
    }


async def test_a_run_that_was_killed_and_resumed_counts_the_time_of_both_starts(controller, tmp_path) -> None:
    assert earlier_starts(tmp_path).figures == {}
    lines = MetricsFile(tmp_path / "metrics.jsonl")
    first = controller(None, Hooks(step=lambda version, figures: log_all([lines], version, figures)))
    trainer = MemoryTrainer(first.session, step_seconds=0.05, checkpoint_every=1)
    await killed_after(4, first, trainer)
    lines.close()
    earlier = earlier_starts(tmp_path).figures
    assert earlier["busy_seconds"]["trainer"] >= 0.149
    assert earlier.keys() == {"run_seconds", "busy_seconds", "idle_seconds", "waited_seconds"}

    second = controller()
    trainer.session = second.session
    summary = await to_the_end(second, trainer)
    assert summary["perf"]["busy_seconds"]["trainer"] >= earlier["busy_seconds"]["trainer"] + 0.149
    assert summary["seconds"]["distill"] >= earlier["run_seconds"] + 0.149
    shares = (summary["perf"][f"{kind}_seconds"]["trainer"] for kind in ("busy", "idle"))
    assert sum(shares) == pytest.approx(summary["seconds"]["distill"], abs=0.01)
