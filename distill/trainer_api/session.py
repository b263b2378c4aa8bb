"""The controller's side of the exchange with the trainer: hello, batches, events. `http_api` serves it.

Order: a TrainerHello opens a lineage; then every rank asks for the batch of each step from the lineage's
start. All ranks get the same answer for a step: once one of them has its share, the others get theirs; once
one was told to stop, all are.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from distill.aio import Signal
from distill.batching.packing import Shape, pack_batch
from distill.interfaces import Common
from distill.record.changes import Checkpointed, HandedOut, Stepped, VersionPublished
from distill.rollout.broadcasts import Broadcasts
from sync import wire
from sync.base.errors import RemoteError, WireError
from sync.wire import CheckpointSaved, FinalDigests, Heartbeat, Published, StepReport, Stop, Version, checks

Event = checks.Event | Heartbeat
logger = logging.getLogger(__name__)


class TrainerSession:
    """Bound to one controller; hands out the batches of the run's steps, cut by `shape`.

    Out: Batch, with its arrays, when it is packed (again after a resume). TrainerWelcome, StepReport,
    Published and Checkpointed, each once, after it is recorded: what was sent twice, or comes from a trainer
    that is over, changes nothing. And Heartbeat.
    """

    poll_seconds = 20.0  # longest wait of a request for a batch

    def __init__(self, common: Common, shape: Shape, broadcasts: Broadcasts) -> None:
        self.broadcasts = broadcasts
        self._record, self._shape, self._steps = common.record, shape, common.config.run.steps
        self._events, self._changed = common.events, Signal()
        self._world_size, self._sharing = 1, 1  # ranks, and how many of them are given the same rows
        self._shares: dict[int, list[bytes]] = {}  # step → encoded shares, of the newest steps
        self._encoding = asyncio.Lock()
        self.stopping: Stop | None = None  # what ranks are told that ask for more
        self.live = False  # a trainer of the current lineage said hello to this controller
        self.ready = -1  # newest step whose batch is safe on disk
        self.requested = -1  # newest step that a rank requested
        self.withheld = ""  # why no batch is handed out; empty: they are
        self.final: FinalDigests | None = None  # the trainer's last message

    @property
    def run(self) -> wire.RunIdentity:
        return self._record.run

    def wake(self) -> None:
        """Wake waiting requests and the batcher after a change of the state."""
        self._changed.wake()
        self._events.changed.wake()

    def stop(self, reason: str) -> None:
        """No batch after the one that a rank already has."""
        if self.stopping is None:
            self.stopping = Stop(reason=reason, checkpoint=True)
            self.wake()

    def dismiss(self) -> None:
        """The trainer's processes have ended, or it is rolled back: what lingers of it is refused, and the
        next one says hello."""
        self.live = False
        self.wake()

    async def hello(self, hello: wire.TrainerHello) -> wire.TrainerWelcome:
        """Open a lineage. Raises RemoteError for another run, model, or checkpoint that is not on record."""
        self._check_hello(hello)
        at, retreat = hello.checkpoint, self._record.state.rolled_back
        for line in hello.altered:
            logger.warning("%s", line)
        if at is None and retreat is None and (saved := self._record.state.checkpoints):
            logger.warning(
                "no checkpoint is left, though %s is on record: training begins again at step 0, from the "
                "model folder", saved[-1],
            )  # fmt: skip
        without = None if retreat is None else retreat.without
        self.live = False  # what the last trainer asked for is no longer formed: this one has its own steps
        opening = await self._record.open_lineage(at, hello.fingerprint, without, hello.world_size)
        self._world_size, self._sharing = hello.world_size, hello.sequence_parallel
        self._shares, self.live = {}, True
        self.ready, self.requested, self.final = opening.branch - 1, opening.start - 1, None
        logger.info(
            "trainer with %d ranks begins lineage %d at step %d; %d batches are handed out again",
            hello.world_size, opening.lineage, opening.start, opening.branch - opening.start,
        )  # fmt: skip
        version, teachers = Version(opening.lineage, opening.start), list(self._shape.teachers)
        welcome = wire.TrainerWelcome(version=version, parent=at, teachers=teachers, run=self.run)
        self._events.emit(welcome)
        self.wake()
        return welcome

    def _check_hello(self, hello: wire.TrainerHello) -> None:
        state, run, at = self._record.state, self.run, hello.checkpoint
        if hello.world_size % hello.sequence_parallel:
            raise RemoteError(
                f"{hello.sequence_parallel} ranks are to share rows and the trainer has {hello.world_size}: "
                "trainer.sequence_parallel must divide the ranks"
            )
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
        if at is not None and (at.lineage not in state.lineages or at.step > state.bisection.furthest):
            raise RemoteError(
                f"checkpoint {at} belongs to no lineage in this run's record: remove the checkpoints, "
                "or restore the record they belong to"
            )
        to = at if state.rolled_back is None else state.rolled_back.to
        if to != at and (to is None or at is None or at > to):  # an older one where that is damaged
            raise RemoteError(
                f"the run was rolled back to {to or 'the model folder'} and the trainer comes "
                f"from {at}: start it again from there"
            )

    def _check(self, version: Version) -> None:
        lineage = self._record.state.lineage
        if not self.live or version.lineage != lineage:
            raise RemoteError(
                f"{version} is not of the current lineage {lineage if self.live else None}: "
                "another trainer has started; this one must leave or say hello again"
            )

    async def batch(self, request: wire.BatchRequest) -> bytes:
        """A rank's share as an encoded TrainBatch, Wait or Stop; waits at most `poll_seconds`.

        Raises RemoteError for another lineage, rank or step than can be requested.
        """
        step = request.version.step
        deadline = asyncio.get_running_loop().time() + self.poll_seconds
        while True:
            self._check(request.version)
            self._check_rank(request)
            is_first = step > self._record.state.bisection.handed_out
            if step > self.requested:
                self.requested = step
                self.wake()
            if is_first and (step >= self._steps or self.stopping):
                return wire.encode(self.stopping or Stop(reason="all steps are done", checkpoint=True))
            if step <= self.ready and not (is_first and self.withheld):
                if step not in self._shares:
                    await self.prepare(step)
                    continue
                share = self._shares[step][request.rank // self._sharing]
                if is_first:
                    self._record.write(HandedOut(request.version))
                    await self._record.store.commit()
                return share
            if self.broadcasts.wanted():
                return wire.encode(wire.Wait(publish=True))
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self._changed.wait(left):
                return wire.encode(wire.Wait())

    def _check_rank(self, request: wire.BatchRequest) -> None:
        state = self._record.state
        start, handed_out = state.lineages[request.version.lineage].start, state.bisection.handed_out
        if request.world_size != self._world_size or not 0 <= request.rank < self._world_size:
            raise RemoteError(
                f"rank {request.rank} of {request.world_size} is not one of the {self._world_size} "
                "ranks that said hello"
            )
        if not start <= request.version.step <= max(handed_out + 1, start):
            raise RemoteError(
                f"step {request.version.step} cannot be requested: the lineage began at {start} and "
                f"has got batches up to step {handed_out}"
            )

    async def prepare(self, step: int) -> None:
        """Encode a batch, as it is on record now, beside the event loop; then it counts as ready.

        Nothing is kept of it when a new lineage was opened meanwhile.
        """
        async with self._encoding:
            state, groups = self._record.state, self._world_size // self._sharing
            # each of the ranks that share rows computes `micro_batch_tokens` of them
            tokens = self._shape.micro_batch_tokens * self._sharing
            shape = replace(self._shape, micro_batch_tokens=tokens)
            formed, lineage = state.batch_of(step), state.lineage
            if formed is None or lineage is None:
                raise RemoteError(
                    f"the batch of step {step} is no longer on record: resume from a newer checkpoint"
                )
            batch = replace(formed, version=Version(lineage, step), rollouts=[*formed.rollouts])
            step_of = partial(state.lineages.step_in, lineage=lineage)

            def encoded() -> list[bytes]:
                batch.rollouts = self._record.rollouts(batch)
                return [wire.encode(share) for share in pack_batch(batch, groups, shape, step_of)]

            if step not in self._shares:
                shares = await asyncio.to_thread(encoded)
                if state.lineage != lineage:
                    return
                self._shares = {old: share for old, share in self._shares.items() if old >= step - 1}
                self._shares[step] = shares
                self._events.emit(batch)
            self.ready = max(self.ready, step)
        self.wake()

    async def event(self, event: Event) -> wire.Ok | wire.Audience:
        """Record what the trainer did. Raises RemoteError for another lineage, WireError for a fault.

        Heartbeats also come from a trainer that this controller, started anew, has not welcomed.
        """
        state, answer = self._record.state, None
        if isinstance(event, Heartbeat):  # never waits for a disk; none is due after the last message
            if state.rolled_back is not None or event.version.lineage != state.lineage:
                self._check(event.version)
            if self.live and self.final is None:
                self._events.emit(event)
            return wire.Ok()
        self._check(event.version)
        assert state.reached is not None, "a trainer of this lineage has said hello"
        start, reached = state.lineages[event.version.lineage].start, state.reached.step
        if problem := checks.event(event, start, reached, max(reached, state.bisection.handed_out + 1)):
            raise WireError(f"the trainer's message cannot be used: {problem}")  # nothing of it is recorded
        if isinstance(event, StepReport):
            if event.version.step > reached:
                self._record.write(Stepped(event.version))
                self._events.emit(event)
        elif isinstance(event, Published):
            answer = self._publish(event)
        elif isinstance(event, CheckpointSaved):
            if event.version not in state.checkpoints[-1:]:
                saved = Checkpointed(event.version, event.path)
                self._record.write(saved)
                self._events.emit(saved)
        else:
            self.final = event
        await self._record.store.commit()
        self.wake()
        return answer or wire.Ok()

    def _publish(self, event: Published) -> wire.Audience | None:
        """Raises Overloaded for a broadcast that no replica would receive yet."""
        answer, known = None, self._record.state.published
        if event.kind == "broadcast":
            answer = self.broadcasts.announce(event, ending=self.stopping is not None)
        if not known or (known[-1].version, known[-1].kind) != (event.version, event.kind):
            self._record.write(
                VersionPublished(event.version, event.kind, event.bytes, event.full_bytes, event.seconds)
            )
        self._events.emit(event)
        return answer
