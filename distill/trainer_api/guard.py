"""Health of the training: bad steps, and ranks without a heartbeat.

step's metrics ─▶ Guard.look ─▶ None | what is wrong, after `patience` consecutive bad steps
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping

from distill.aio import look_seconds
from distill.config import GuardConfig
from distill.events import Events, Stalled
from distill.record.changes import RolledBack
from distill.record.state import RunState
from distill.waits import TRAINER
from sync.wire import Heartbeat

logger = logging.getLogger(__name__)


class Guard:
    """Takes every step in order."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._bad: list[int] = []

    @property
    def since(self) -> int:
        """First of the present consecutive bad steps; there must be one."""
        return self._bad[0]

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What is wrong, when `step` was the last of too many bad ones."""
        problem = trouble(metrics, self._config)
        if problem is None:
            self.forget()
            return None
        self._bad.append(step)
        if len(self._bad) < self._config.patience:
            return None
        return f"step {step}: {problem}; bad steps since {self._bad[0]}"

    def forget(self) -> None:
        self._bad = []


def retreat(state: RunState, since: int, kept: int, problem: str) -> RolledBack | None:
    """Back to before the weights that step `since` found bad; without the batches from that step on.

    `kept`: newest checkpoints on the path of the current lineage that are still there; with none, back to the
    model folder. None: all of them may be bad.
    """
    there = state.kept(kept)
    good = [version for version in there if version.step < since - 1]
    if there and not good:
        return None
    batches = [state.batch_of(step - 1) for step in range(since, state.next_step + 1)]
    bad = {id for batch in batches if batch is not None for id in batch.ids}
    return RolledBack(good[-1] if good else None, sorted(bad), problem)


def trouble(metrics: Mapping[str, float], config: GuardConfig) -> str | None:
    """What is wrong with a step by itself; a metric that an objective does not have is not checked."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics.get(name, 0.0)):
            return f"{name} is {metrics[name]}, the update was left out"
    for name in ("reverse_kl", "grad_norm", "truncation_rate"):
        limit = getattr(config, f"max_{name}")
        if limit is not None and metrics.get(name, -math.inf) > limit:
            return f"{name} is {metrics[name]:.4g}, above guard.max_{name} = {limit:g}"
    entropy = metrics.get("student_entropy", math.inf)
    if config.min_entropy is not None and entropy < config.min_entropy:
        return f"student_entropy is {entropy:.4g}, below guard.min_entropy = {config.min_entropy:g}"
    student, teacher = metrics.get("student_end", math.inf), metrics.get("teacher_end", 0.0)
    if config.min_end_share is not None and student < config.min_end_share * teacher:
        return (
            f"student_end is {student:.2g} and teacher_end {teacher:.2g}, its share below "
            f"guard.min_end_share = {config.min_end_share:g}"
        )
    return None


class Heartbeats:
    """Those of the trainer's ranks, each watched from its first one on. `run()` for the length of the run.

    Order, for every start of the trainer: `opened` → (`heard`)* → `forget`.
    Out: Stalled, once for all ranks that sent none for `seconds` (0: never), which are watched no longer.
    """

    def __init__(self, seconds: float, events: Events) -> None:
        self._seconds, self._events = seconds, events
        self.since: dict[int, float] = {}  # rank whose next one is due → seconds since its last
        self._open = False

    def opened(self) -> None:
        """A trainer was welcomed: its ranks are watched once they are heard."""
        self.since, self._open = {}, True

    def heard(self, beat: Heartbeat) -> None:
        if self._open:
            self.since[beat.rank] = 0.0

    def forget(self) -> None:
        """The trainer has ended: ranks of it that linger on other machines are not watched."""
        self.since, self._open = {}, False

    async def run(self) -> None:
        if self._seconds == 0:
            await asyncio.Event().wait()
        pause = look_seconds(self._seconds)
        while True:
            await asyncio.sleep(pause)
            self.since = {rank: seconds + pause for rank, seconds in self.since.items()}
            late = sorted(rank for rank, seconds in self.since.items() if seconds >= self._seconds)
            if late:
                self.since.clear()
                logger.error(
                    "no heartbeat of trainer rank %s for run.health_timeout_seconds = %g s: it is stalled",
                    ", ".join(map(str, late)),
                    self._seconds,
                )
                self._events.emit(Stalled(TRAINER))
