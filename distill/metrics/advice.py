"""Waste that is no error: completions that never end by themselves, teachers without work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from distill.config import RunConfig
from distill.metrics.summary import LONG_IDLE
from distill.metrics.timeline import REPLICAS, TEACHERS, TRAINER

CUT_OFF_STEPS: Final = 5
"""Consecutive steps without one completion that ended by itself."""
END_STEPS: Final = 3
"""Consecutive steps at which the student ends far less often than its teacher would."""
LITTLE_END: Final = 0.2
"""Share of the teacher's probability of ending a completion that is far less."""
FIRST_STEPS: Final = 20
"""Before which nothing is concluded from a teacher's work."""
LITTLE_WORK: Final = 0.1
"""Share of the time: a teacher's work that is little."""


class Advice:
    """Takes every step of a run in order; gives each warning once, with what to change."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._steps, self._cut_off, self._endless = config, 0, 0, 0
        self._given: dict[str, str] = {}
        self._worked: set[str] = set()  # teachers that had something to score
        self._scored_before: float | None = None  # rollouts, at the first step

    @property
    def given(self) -> list[str]:
        """All warnings so far."""
        return list(self._given.values())

    def look(self, figures: Mapping[str, float]) -> list[str]:
        """What is new at a step; `figures`: of the step and of the run so far (`distill.metrics.names`)."""
        self._steps += 1
        if self._scored_before is None:
            self._scored_before = figures.get("rollout/scored", 0.0)
        self._worked |= {
            name for name in self._config.teachers if figures.get(f"perf/busy_seconds/teacher {name}")
        }
        self._cut_off = self._cut_off + 1 if figures.get("train/truncation_rate", 0.0) >= 1 else 0
        student, teacher = (figures.get(f"train/{who}_end", 0.0) for who in ("student", "teacher"))
        self._endless = self._endless + 1 if student < LITTLE_END * teacher else 0
        new = {about: text for about, text in self._found(figures) if about not in self._given}
        self._given |= new
        return list(new.values())

    def _found(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """What it is about, and the warning."""
        if self._cut_off >= CUT_OFF_STEPS:
            yield (
                "truncation",
                f"every completion of the last {self._cut_off} steps was cut off at rollout.max_tokens = "
                f"{self._config.rollout.max_tokens}, so the student never learns to end one: raise it, or "
                "check the chat template and rollout.stop_token_ids",
            )
        if self._endless >= END_STEPS:
            student, teacher = (f"{figures[f'train/{who}_end']:.1e}" for who in ("student", "teacher"))
            yield (
                "ends",
                "the student forgets how to end a completion: the end has a probability of "
                f"{student} at a token, and for its teacher one of {teacher}; "
                "a reverse divergence does not bring back what is nearly lost: try a lower trainer.lr, "
                "rollout.max_tokens up to where the teacher ends, or completions of the teacher too "
                "(objective.on_policy below 1)",
            )
        if self._steps < FIRST_STEPS:
            return
        waited = _share(figures, TRAINER, "idle")
        cause = f"perf/waited_seconds/{TRAINER}/"
        replicas, teachers = (figures.get(cause + role, 0.0) for role in (REPLICAS, TEACHERS))
        scored = figures.get("rollout/scored", 0.0) - (self._scored_before or 0.0)
        enough = scored >= FIRST_STEPS * self._config.rollout.batch / 2
        for name in self._config.teachers:
            work = _share(figures, f"teacher {name}", "busy")
            if name not in self._worked:  # its own counts have the preflight's sequences in them
                if not enough:  # a resumed trainer makes steps anew, from the journal
                    continue
                yield (
                    name,
                    f"teacher {name} has had nothing to score in {self._steps} steps, no prompt's data "
                    f"source leads to it: change teachers.{name}.route or prompts.weights, or remove it",
                )
            elif work < LITTLE_WORK and waited > LONG_IDLE and replicas > teachers:
                yield (
                    name,
                    f"teacher {name} worked {work:.0%} of the time and the trainer was idle for "
                    f"{waited:.0%}, mostly for replicas: give its devices to more replicas "
                    f"(student.replicas), or let teachers share them (teachers.{name}.idle_unload_seconds)",
                )


def _share(figures: Mapping[str, float], role: str, state: str) -> float:
    """Of the run's time, that in which a role was "busy" or "idle"."""
    seconds = {kind: figures.get(f"perf/{kind}_seconds/{role}", 0.0) for kind in ("busy", "idle")}
    return seconds[state] / max(1e-9, sum(seconds.values()))
