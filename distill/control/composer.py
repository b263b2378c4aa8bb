"""The composer makes the next batch as soon as a trainer asks for it, and says for whom the trainer waits."""

from __future__ import annotations

from collections.abc import Callable

from distill.control.books import Books
from distill.control.desk import Desk
from distill.control.lateness import LATE_POLL_SECONDS, Hold
from distill.control.signals import Signal
from distill.control.timeline import LATE, REPLICAS, TEACHERS, TRAINER, Timeline


class Composer:
    """Composes the batches of `steps`; `run()` is a task of its own, which `changed` wakes."""

    def __init__(
        self,
        books: Books,
        desk: Desk,
        hold: Hold,
        steps: int,
        *,
        changed: Signal,
        composed: Signal,
        in_scoring: Callable[[], int],
        timeline: Timeline,
    ) -> None:
        """`composed`: woken when the buffer has room. `in_scoring`: rollouts that are being marked."""
        self._books, self._desk, self._hold, self._steps = books, desk, hold, steps
        self._changed, self._composed = changed, composed
        self._in_scoring, self._timeline = in_scoring, timeline

    @property
    def holding(self) -> bool:
        """Whether the next batch is held for late rollouts."""
        return self._hold.holding

    async def run(self) -> None:
        """Until it is cancelled."""
        state, desk = self._books.state, self._desk
        while True:
            while desk.live and state.next_step <= desk.asked and self._possible():
                if left := self._hold.left(state.next_step, state.expiring()):
                    self.note_waiting()
                    await self._changed.wait(min(left, LATE_POLL_SECONDS))
                    continue
                batch = await self._books.compose()
                self._composed.wake()
                if batch is None:
                    break
                desk.prepare(batch.version.step)
            self.note_waiting()
            await self._changed.wait()

    def note_waiting(self) -> None:
        """For whom the trainer waits, if it does."""
        state, desk = self._books.state, self._desk
        waits = desk.live and desk.ready < desk.asked < self._steps
        written = len(state.buffer) + self._in_scoring() >= state.rules.batch
        whom = LATE if self.holding else TEACHERS if written else REPLICAS
        self._timeline.waits(TRAINER, whom if waits else None)

    def _possible(self) -> bool:
        """Whether it is worth looking: there is a batch, or nothing comes before the old is dropped."""
        state = self._books.state
        return state.next_step < self._steps and (
            len(state.buffer) >= state.rules.batch or (len(state.buffer) > 0 and not state.asked)
        )
