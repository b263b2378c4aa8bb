"""The controller's side of the exchange with the trainer: hello, batches, events. `http_api` serves it.

Order: a TrainerHello opens a lineage; then every rank asks for the batch of each step from the lineage's
start. All ranks get the same answer for a step: once one of them has its share, the others get theirs; once
one was told to stop, all are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from distill.aio import Signal
from distill.batching.packing import Shape, pack_batch
from distill.events import Events
from distill.rollout.broadcasts import Broadcasts
from distill.run_log.records import Checkpointed, HandedOut, RolledBack, Stepped, VersionPublished
from distill.run_log.run_log import RunLog
from sync.errors import RemoteError, WireError
from sync.wire import (
    Audience,
    BatchRequest,
    CheckpointSaved,
    FinalDigests,
    Heartbeat,
    Ok,
    Published,
    RunIdentity,
    StepReport,
    Stop,
    TrainerHello,
    TrainerWelcome,
    Version,
    Wait,
    checks,
    encode,
)
from sync.wire.checks import Problem

Event = StepReport | Published | CheckpointSaved | FinalDigests | Heartbeat
logger = logging.getLogger(__name__)


class TrainerSession:
    """Bound to one controller; hands out the batches of `steps`, cut as `shape` says.

    Out: TrainerWelcome, StepReport, Published, Checkpointed, each once, after it is recorded: what was sent
    twice, or comes from a trainer that is over, changes nothing. And Heartbeat.
    """

    poll_seconds = 20.0
    """Longest wait of a request for a batch."""

    def __init__(
        self, run_log: RunLog, shape: Shape, broadcasts: Broadcasts, steps: int, events: Events
    ) -> None:
        self.broadcasts = broadcasts
        self._run_log, self._shape, self._steps = run_log, shape, steps
        self._events, self._changed = events, Signal()
        self._world_size = 1
        self._shares: dict[int, list[bytes]] = {}
        """Encoded shares of the newest steps, by step."""
        self._stop: Stop | None = None
        self._handed_out = -1
        """Newest step of this lineage whose batch a rank has."""
        self.live = False
        """A trainer of the current lineage said hello to this controller."""
        self.ready = -1
        """Newest step whose batch is safe on disk."""
        self.requested = -1
        """Newest step that a rank requested."""
        self.withheld = False
        """No batch is handed out while set."""
        self.final: FinalDigests | None = None
        """The trainer's last message."""
        self._retreat: RolledBack | None = None
        """What the next trainer must begin with."""

    @property
    def run(self) -> RunIdentity:
        """The run whose batches are handed out."""
        return self._run_log.run

    def wake(self) -> None:
        """Have waiting requests, and the batcher, look at the state again."""
        self._changed.wake()
        self._events.changed.wake()

    def stop(self, reason: str, checkpoint: bool = True) -> None:
        """No batch after the one that a rank already has."""
        if self._stop is None:
            self._stop = Stop(reason=reason, checkpoint=checkpoint)
            self.wake()

    def roll_back(self, retreat: RolledBack) -> None:
        """Send the present trainer away; the next one must begin as `retreat` says."""
        self.live, self._retreat = False, retreat
        self.wake()

    async def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """Open a lineage. Raises RemoteError for another run, model, or checkpoint that it does not know."""
        state, run = self._run_log.state, self.run
        if hello.run != run.name or hello.run_id not in (None, run.id):
            raise RemoteError(
                f"this controller serves {run}, the trainer is of run {hello.run!r} and its checkpoint of id "
                f"{hello.run_id or '(none)'}: start it with the run's own configuration and folder"
            )
        if state.fingerprint not in (None, hello.fingerprint):
            raise RemoteError(
                f"the trainer's model {hello.fingerprint} is not the run's {state.fingerprint}: "
                "use another run name for another model"
            )
        at = hello.checkpoint
        if at is not None and (at.lineage not in state.lineages or at.step > state.bisection.furthest):
            raise RemoteError(
                f"checkpoint {at} belongs to no lineage in this run's journal: remove the checkpoints, "
                "or restore the journal they belong to"
            )
        if self._retreat is not None and self._retreat.to != at:
            raise RemoteError(
                f"the run was rolled back to {self._retreat.to or 'the model folder'} and the trainer comes "
                f"from {at}: start it again from there"
            )
        without = None if self._retreat is None else self._retreat.without
        record = await self._run_log.open_lineage(at, hello.fingerprint, without, hello.world_size)
        self._retreat = None
        self._world_size, self._shares, self._handed_out, self.live = hello.world_size, {}, -1, True
        self.ready, self.requested, self.final = record.branch - 1, record.start - 1, None
        version = Version(record.lineage, record.start)
        logger.info(
            "trainer with %d ranks begins lineage %d at step %d; %d batches are handed out again",
            hello.world_size, record.lineage, record.start, record.branch - record.start,
        )  # fmt: skip
        welcome = TrainerWelcome(
            version=version, parent=at, teachers=list(self._shape.teachers), run=self.run
        )
        self._events.emit(welcome)
        self.wake()
        return welcome

    def _check(self, version: Version) -> None:
        lineage = self._run_log.state.lineage
        if not self.live or version.lineage != lineage:
            raise RemoteError(
                f"{version} is not of the current lineage {lineage if self.live else None}: "
                "another trainer has started; this one must leave or say hello again"
            )

    async def batch(self, request: BatchRequest) -> bytes:
        """A rank's share as an encoded TrainBatch, Wait or Stop; waits at most `poll_seconds`.

        Raises RemoteError for another lineage, rank or step than can be requested.
        """
        step = request.version.step
        deadline = asyncio.get_running_loop().time() + self.poll_seconds
        while True:
            self._check(request.version)
            self._check_rank(request)
            if step > self.requested:
                self.requested = step
                self.wake()
            if step > self._handed_out and (step >= self._steps or self._stop):
                return encode(self._stop or Stop(reason="all steps are done", checkpoint=True))
            if step <= self.ready and (step <= self._handed_out or not self.withheld):
                share = self._share(step)[request.rank]
                if step > self._handed_out:
                    self._handed_out = step
                    self._run_log.write(HandedOut(request.version))
                    await self._run_log.journal.commit()
                return share
            if self.broadcasts.wanted():
                return encode(Wait(publish=True))
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self._changed.wait(left):
                return encode(Wait())

    def _check_rank(self, request: BatchRequest) -> None:
        start = self._run_log.state.lineages[request.version.lineage].start
        if request.world_size != self._world_size or not 0 <= request.rank < self._world_size:
            raise RemoteError(
                f"rank {request.rank} of {request.world_size} is not one of the {self._world_size} "
                "ranks that said hello"
            )
        if not start <= request.version.step <= max(self._handed_out + 1, start):
            raise RemoteError(
                f"step {request.version.step} cannot be requested: the lineage began at {start} and "
                f"has got batches up to step {self._handed_out}"
            )

    async def prepare(self, step: int) -> None:
        """Encode a batch before it is requested, beside the event loop; then it counts as ready.

        Nothing is kept of it when a new lineage was opened meanwhile.
        """
        lineage, encoded = self._run_log.state.lineage, self._encoding(step)
        shares = await asyncio.to_thread(encoded)
        if self._run_log.state.lineage != lineage:
            return
        self._keep(step, shares)
        self.ready = max(self.ready, step)
        self.wake()

    def _share(self, step: int) -> list[bytes]:
        if step not in self._shares:
            self._keep(step, self._encoding(step)())
        return self._shares[step]

    def _keep(self, step: int, shares: list[bytes]) -> None:
        self._shares = {old: found for old, found in self._shares.items() if old >= step - 1} | {step: shares}

    def _encoding(self, step: int) -> Callable[[], list[bytes]]:
        """What encodes a batch as it is on record now."""
        state = self._run_log.state
        formed = state.batch_of(step)
        if formed is None or state.lineage is None:
            raise RemoteError(
                f"the batch of step {step} is no longer on record: resume from a newer checkpoint"
            )
        batch = replace(formed, version=Version(state.lineage, step))
        step_of, world_size = partial(state.lineages.step_in, lineage=state.lineage), self._world_size

        def encoded() -> list[bytes]:
            whole = replace(batch, rollouts=self._run_log.rollouts(batch))
            return [encode(share) for share in pack_batch(whole, world_size, self._shape, step_of)]

        return encoded

    async def event(self, event: Event) -> Ok | Audience:
        """Record what the trainer did. Raises RemoteError for another lineage."""
        self._check(event.version)
        if isinstance(event, Heartbeat):  # never waits for a disk; none is due after the last message
            if self.final is None:
                self._events.emit(event)
            return Ok()
        _refuse(self._problem(event))
        answer: Audience | None = None
        if isinstance(event, StepReport):
            self._step(event)
        elif isinstance(event, Published):
            answer = self._publish(event)
        elif isinstance(event, CheckpointSaved):
            if event.version not in self._run_log.state.checkpoints[-1:]:
                saved = Checkpointed(event.version, event.path)
                self._run_log.write(saved)
                self._events.emit(saved)
        else:
            self.final = event
        await self._run_log.journal.commit()
        self.wake()
        return answer or Ok()

    def _problem(self, event: checks.Event) -> Problem | None:
        state = self._run_log.state
        assert state.reached is not None, "a trainer of this lineage has said hello"
        start, newest = state.lineages[event.version.lineage].start, self._handed_out + 1
        return checks.event(event, start, state.reached.step, max(state.reached.step, newest))

    def _step(self, report: StepReport) -> None:
        reached = self._run_log.state.reached
        if reached is None or report.version.step > reached.step:
            self._run_log.write(Stepped(report.version))
            self._events.emit(report)

    def _publish(self, event: Published) -> Audience | None:
        """Raises Overloaded for a broadcast that no replica would receive yet."""
        answer, known = None, self._run_log.state.published
        if event.kind == "broadcast":
            answer = self.broadcasts.announce(event, ending=self._stop is not None)
        if event.kind == "broadcast" or not known or known[-1].version != event.version:
            self._run_log.write(
                VersionPublished(event.version, event.kind, event.bytes, event.full_bytes, event.seconds)
            )
        self._events.emit(event)
        return answer


def _refuse(problem: Problem | None) -> None:
    """Raise WireError for a message of the trainer's that cannot be used: nothing of it is recorded."""
    if problem is not None:
        raise WireError(f"the trainer's message cannot be used: {problem}")
