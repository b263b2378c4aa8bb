"""Forms the next batch as soon as a trainer asks for it; what it waits for, the trainer waits for."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

from distill import waits
from distill.config import WaitForLate
from distill.interfaces import Common
from distill.metrics.timeline import LATE, REPLICAS, TEACHERS
from distill.rollout.life import Lives
from distill.trainer_api.session import TrainerSession
from distill.waits import BATCHER, DISPATCHER, RECORD, SCORING, TRAINER, UNDER_WAY

LATE_POLL_SECONDS = 0.2  # between two looks whether a late rollout that a batch waits for has been lost


class LateWait:
    """How long the batch of a step still waits for late rollouts."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: for one batch; 0: not at all."""
        self._seconds, self._step, self._until = seconds, -1, 0.0
        self.waiting = False  # whether the newest answer was to wait

    def left(self, step: int, expiring: int) -> float:
        """Seconds that the batch of `step` may wait from its first call with any `expiring` on; 0: form it.

        `expiring`: rollouts in flight that no later batch may take.
        """
        if expiring and step != self._step:
            self._step, self._until = step, time.monotonic() + self._seconds
        left = max(0.0, self._until - time.monotonic()) if expiring else 0.0
        self.waiting = left > 0
        return left


class StepBatcher:
    """Buffer in, batches of the run's steps out, each prepared in `session`; `run()` is a task of its own."""

    def __init__(self, common: Common, session: TrainerSession, lives: Lives) -> None:
        self._record, self._session, self._lives = common.record, session, lives
        self._steps, self._changed = common.config.run.steps, common.events.changed
        late = common.config.buffer.late
        self.late = LateWait(late.seconds if isinstance(late, WaitForLate) else 0.0)

    async def run(self) -> None:
        state, session = self._record.state, self._session
        while True:
            while session.live and state.next_step <= session.requested and self._possible():
                if left := self.late.left(state.next_step, state.expiring()):
                    with self._lacking():
                        await self._changed.wait(min(left, LATE_POLL_SECONDS))
                    continue
                step, of = state.next_step, lambda: [RECORD]
                with waits.on(TRAINER, f"batch {step}", lambda: "formed", of=of, cause=RECORD, progress=step):
                    batch = await self._record.form_batch()
                    self._changed.wake()  # the buffer has room
                    if batch is None:
                        break
                    self._lives.episodes.leave_too_old()
                    await session.prepare(batch.version.step)
            with self._lacking():
                await self._changed.wait()

    def _lacking(self) -> waits.Wait:
        """The trainer's wait for the batch that it asked for; else the wait for the trainer."""
        state, session, step = self._record.state, self._session, self._session.requested
        if not session.live or step >= self._steps or (session.ready >= step and not session.withheld):
            begun = "" if session.live else "none has begun"
            return waits.on(BATCHER, TRAINER, lambda: begun, progress=(session.live, step))
        wait = partial(waits.on, TRAINER, f"batch {step}", progress=step)
        if session.ready >= step:
            return wait(lambda: session.withheld, of=lambda: ())
        need = state.rules.batch
        generated = len(state.buffer) + self._lives.scoring.open >= need
        cause = LATE if self.late.waiting else TEACHERS if generated else REPLICAS
        rollouts = lambda: f"{len(state.buffer)} of {need} rollouts"  # noqa: E731
        return wait(rollouts, of=partial(self._makers, cause), cause=cause)

    def _makers(self, cause: str) -> Collection[str]:
        """Who waits for the rollouts that the next batch lacks."""
        if cause == TEACHERS:
            return SCORING, RECORD
        under_way = self._record.state.outstanding - self._lives.dispatcher.unsent
        return UNDER_WAY if under_way >= self._record.state.rules.batch else (DISPATCHER,)

    def _possible(self) -> bool:
        """Whether a batch can be formed, or nothing more comes before the old rollouts are dropped."""
        state = self._record.state
        if state.next_part() and state.reached is not None:  # one at a time
            return state.next_step == state.reached.step < self._steps
        return state.next_step < self._steps and (
            len(state.buffer) >= state.rules.batch or (len(state.buffer) > 0 and not state.pending)
        )
