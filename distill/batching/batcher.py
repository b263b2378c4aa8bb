"""Forms the next batch as soon as a trainer asks for it, and tracks what the trainer is blocked on."""

from __future__ import annotations

import time
from collections.abc import Callable

from distill.config import RunConfig, WaitForLate
from distill.events import Events
from distill.metrics.timeline import LATE, REPLICAS, TEACHERS, TRAINER, Timeline
from distill.record.record import Record
from distill.rollout.life import Lives
from distill.trainer_api.session import TrainerSession

LATE_POLL_SECONDS = 0.2  # between two looks whether a late rollout that a batch waits for has been lost


class LateWait:
    """How long the batch of a step still waits for late rollouts."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: for one batch; 0: not at all."""
        self._seconds, self._clock = seconds, clock
        self._step, self._until = -1, 0.0
        self.waiting = False  # whether the newest answer was to wait

    def left(self, step: int, expiring: int) -> float:
        """Seconds that the batch of `step` may wait from its first call with any `expiring` on; 0: form it.

        `expiring`: rollouts in flight that no later batch may take.
        """
        if expiring and step != self._step:
            self._step, self._until = step, self._clock() + self._seconds
        left = max(0.0, self._until - self._clock()) if expiring else 0.0
        self.waiting = left > 0
        return left


class StepBatcher:
    """Buffer in, batches of the run's steps out, each prepared in `session`; `run()` is a task of its own."""

    def __init__(
        self,
        record: Record,
        session: TrainerSession,
        lives: Lives,
        config: RunConfig,
        timeline: Timeline,
        events: Events,
    ) -> None:
        self._record, self._session, self._lives = record, session, lives
        self._steps, self._timeline, self._changed = config.run.steps, timeline, events.changed
        late = config.buffer.late
        self.late = LateWait(late.seconds if isinstance(late, WaitForLate) else 0.0)

    async def run(self) -> None:
        state, session = self._record.state, self._session
        while True:
            while session.live and state.next_step <= session.requested and self._possible():
                if left := self.late.left(state.next_step, state.expiring()):
                    self._note_blocked()
                    await self._changed.wait(min(left, LATE_POLL_SECONDS))
                    continue
                batch = await self._record.form_batch()
                self._changed.wake()  # the buffer has room
                if batch is None:
                    break
                self._lives.episodes.leave_too_old()
                await session.prepare(batch.version.step)
            self._note_blocked()
            await self._changed.wait()

    def _note_blocked(self) -> None:
        """What the trainer is blocked on, if it is."""
        state, session = self._record.state, self._session
        blocked = session.live and session.ready < session.requested < self._steps
        generated = len(state.buffer) + self._lives.scoring.open >= state.rules.batch
        cause = LATE if self.late.waiting else TEACHERS if generated else REPLICAS
        self._timeline.waits(TRAINER, cause if blocked else None)

    def _possible(self) -> bool:
        """Whether a batch can be formed, or nothing more comes before the old rollouts are dropped."""
        state = self._record.state
        if state.next_part() and state.reached is not None:  # one at a time
            return state.next_step == state.reached.step < self._steps
        return state.next_step < self._steps and (
            len(state.buffer) >= state.rules.batch or (len(state.buffer) > 0 and not state.pending)
        )
