"""The composer makes the next batch as soon as a trainer asks for it, and says for whom the trainer waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from distill.aio import Signal
from distill.metrics.timeline import LATE, REPLICAS, TEACHERS, TRAINER, Timeline
from distill.run_log.run_log import RunLog
from distill.trainer_api.session import TrainerSession

LATE_POLL_SECONDS = 0.2
"""Between two looks whether a late rollout that a batch waits for has come to nothing."""


class Hold:
    """How long the batch of a step is still held for late rollouts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: for one batch; 0: never held."""
        self._seconds = seconds
        self._clock = clock
        self._step = -1
        self._until = 0.0
        self.holding = False
        """Whether the newest answer was to wait."""

    def left(self, step: int, expiring: int) -> float:
        """Seconds that the batch of `step` may wait from now on; 0: compose it.

        `expiring`: rollouts under way that no later batch may take. The time of a step runs from its first
        question with any.
        """
        if expiring and step != self._step:
            self._step, self._until = step, self._clock() + self._seconds
        left = max(0.0, self._until - self._clock()) if expiring else 0.0
        self.holding = left > 0
        return left


class StepBatcher:
    """Composes the batches of `steps`; `run()` is a task of its own, which `changed` wakes."""

    def __init__(
        self,
        run_log: RunLog,
        session: TrainerSession,
        hold: Hold,
        steps: int,
        *,
        changed: Signal,
        composed: Signal,
        in_scoring: Callable[[], int],
        timeline: Timeline,
    ) -> None:
        """`composed`: woken when the buffer has room. `in_scoring`: rollouts that are being marked."""
        self._run_log, self._session, self._hold, self._steps = run_log, session, hold, steps
        self._changed, self._batch_formed = changed, composed
        self._in_scoring, self._timeline = in_scoring, timeline

    @property
    def holding(self) -> bool:
        """Whether the next batch is held for late rollouts."""
        return self._hold.holding

    async def run(self) -> None:
        """Until it is cancelled."""
        state, session = self._run_log.state, self._session
        while True:
            while session.live and state.next_step <= session.asked and self._possible():
                if left := self._hold.left(state.next_step, state.expiring()):
                    self.note_waiting()
                    await self._changed.wait(min(left, LATE_POLL_SECONDS))
                    continue
                batch = await self._run_log.compose()
                self._batch_formed.wake()
                if batch is None:
                    break
                await session.prepare(batch.version.step)
            self.note_waiting()
            await self._changed.wait()

    def note_waiting(self) -> None:
        """For whom the trainer waits, if it does."""
        state, session = self._run_log.state, self._session
        waits = session.live and session.ready < session.asked < self._steps
        written = len(state.buffer) + self._in_scoring() >= state.rules.batch
        whom = LATE if self.holding else TEACHERS if written else REPLICAS
        self._timeline.waits(TRAINER, whom if waits else None)

    def _possible(self) -> bool:
        """Whether it is worth looking: there is a batch, or nothing comes before the old is dropped."""
        state = self._run_log.state
        if state.trials.next_part(state.buffer) and state.reached is not None:  # one at a time
            return state.next_step == state.reached.step < self._steps
        return state.next_step < self._steps and (
            len(state.buffer) >= state.rules.batch or (len(state.buffer) > 0 and not state.asked)
        )
