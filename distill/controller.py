"""The controller: constructs the stages of a run, subscribes them to one another, and runs until the end.

    prompts ─▶ Lives: Dispatcher, teachers, environments ─▶ Record ─▶ StepBatcher ─▶ TrainerSession ─▶ trainer
                            ▲                                                                        │
                            └────────── ReplicaPool follows the versions that are published ◀────────┘

Every rollout is a task of its own, and so is every stage behind it; the capacity rule bounds what is between
them. With `max_staleness` 0 the same tasks take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from distill import events, waits
from distill.aio import cancel, unless, until
from distill.batching.batcher import StepBatcher
from distill.batching.packing import Shape
from distill.buffer import Batch
from distill.config import RunConfig
from distill.evaluation.generation import Generation
from distill.evaluation.schedule import Evaluations
from distill.events import ErrorBudget, Events
from distill.interfaces import Common, Components, Hooks
from distill.metrics.samples import Quarantine
from distill.metrics.summary import Advice, digest_of_all, gauges, identity, of_evaluation, of_step, summarise
from distill.metrics.timeline import Timeline
from distill.record.changes import Checkpointed, Concluded, VersionApplied
from distill.record.record import Record
from distill.record.resume import Resume
from distill.registry import Registry, expected_machines
from distill.rollout.broadcasts import Broadcasts
from distill.rollout.dispatcher import Dispatcher, PauseReason
from distill.rollout.life import Lives
from distill.rollout.replica_pool import Phase, Replica, ReplicaPool
from distill.rollout.validation import sampling_of
from distill.scoring import ScoreReleases
from distill.topology import EVALUATION_REPLICA, servers
from distill.trainer_api.guard import Guard, Heartbeats, retreat
from distill.trainer_api.http_api import application, listen, serving
from distill.trainer_api.session import TrainerSession
from distill.waits import TRAINER
from sync.base.errors import DistillError, Unreachable
from sync.wire import EvalReport, FinalDigests, Heartbeat, Published, StepReport, TrainerWelcome, Version

logger = logging.getLogger(__name__)
ROOT_LOOK_SECONDS = 1.0


class Controller:
    """Controls one run, which goes on from `start`: distill.record.resume says from what.

    Construct (binds the port), then `await run()` once. `url` is where the trainer finds it. `request_stop`
    and `trainer_left` may be called at any time.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: Components,
        start: Resume,
        hooks: Hooks = Hooks(),
        token: str | None = None,
    ) -> None:
        self.config, self._parts, self._hooks, run = config, parts, hooks, config.run
        self.events = bus = Events()
        self.timeline = timeline = Timeline(hooks.span, earlier=start.earlier.figures)
        self.waits = waits.Waits(timeline.blocked)
        budget = ErrorBudget(config.guard.bad_answers, bus)
        seconds, topk = config.rollout.completion_timeout_seconds, parts.student_topk
        sampling = replace(sampling_of(config.rollout), student_topk=topk, max_seconds=seconds)
        self.record = record = Record(parts.store, parts.prompts, start, bus)
        common = Common(config, parts, record, sampling, timeline, budget, bus)
        self.pool = ReplicaPool(common)
        for name, engine in parts.replicas.items():
            self.pool.add(name, engine, for_evaluations=name == EVALUATION_REPLICA)
        machines = expected_machines(config)
        self.registry = Registry(run.name, parts.expected, self.pool, parts.connect, machines)
        self.broadcasts = Broadcasts(self.pool, run.start_seconds)
        self.dispatcher = Dispatcher(common, self.pool)
        self.lives = Lives(common, self.dispatcher)
        self.releases = ScoreReleases(parts)
        supervised, group = config.objective.max_supervised_tokens, record.state.rules.group
        padded = config.trainer.packing == "padded"
        shape = Shape(config.trainer.micro_batch_tokens, list(parts.teachers), supervised, group, padded)
        self.session = TrainerSession(common, shape, self.broadcasts)
        self.batcher = StepBatcher(common, self.session, self.lives)
        self.guard, self.advice = Guard(config.guard), Advice(config)
        self.heartbeats = Heartbeats(run.health_timeout_seconds, bus)
        self.evaluations: Evaluations | None = None
        if parts.evaluator is not None and config.evaluation is not None:
            generation = Generation(common, self.pool, self.dispatcher)
            self.evaluations = Evaluations(common, generation, hooks.evaluated, self.session.stop)
        self._step: dict[str, float] = {}
        """Figures of the newest step that this process was told of."""
        self._stepped = time.monotonic()
        self._socket = listen(config.controller.host, config.controller.port, token)
        self._app = application(self.session, self.registry, parts, self.figures, self.why, token)
        self._checkpoint_saved, self._interrupted = asyncio.Event(), asyncio.Event()
        self._left = self._shown = False
        self._failure: str | None = None
        self.root = ""
        self._end, self._starting = Concluded(None, {}, []), True
        parts.claim.run = record.run
        self._subscribe()
        self._roll_back_trainer()

    def _subscribe(self) -> None:
        """Which events are told to whom. events.py names the emitters."""
        on = self.events.on
        on(Quarantine, self._hooks.quarantined)
        on(Batch, self._hooks.batch)
        on(events.ScoresUnneeded, lambda event: self.releases.put(event.rollouts))
        # the trainer: TrainerSession → ReplicaPool, Evaluations, Guard, launcher
        on(TrainerWelcome, self._trainer_opened, self._hooks.opened, lambda _: self.pool.published())
        on(StepReport, self._step_reported)
        on(Published, self._published)
        on(Checkpointed, lambda _: self._checkpoint_saved.set())
        on(Heartbeat, self.heartbeats.heard, lambda beat: self.waits.report(beat.does))
        # replicas and servers
        on(VersionApplied, self._note_update)
        on(events.Membership, lambda event: self._hooks.say(f"replica {event.replica} {event.what}"))
        on(events.Membership, lambda _: self.session.wake())
        on(events.Stranded, lambda _: self.session.wake())
        on(events.Stalled, lambda event: self._hooks.stalled(event.role))
        on(events.NoServerLeft, lambda event: self._fail(event.problem))

    def _tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self.pool.run(),
            self.registry.run(),
            self.lives.run(),
            self.releases.run(),
            self.record.flush(),
            self.batcher.run(),
            self.heartbeats.run(),
            self._tidy(),
            self.waits.watch(self._stands_still),
            self._note_root(),
            *([self.evaluations.run()] if self.evaluations else []),
        ]

    async def run(self) -> dict[str, Any]:
        """Until the trainer has left; the controller's part of summary.json. Errors of a stage are raised."""
        waits.use(self.waits)
        try:
            async with serving(self._app, self._socket):
                tasks = [asyncio.create_task(stage) for stage in self._tasks()]
                try:
                    await until(self._trainer_done(), tasks)
                    self.dispatcher.paused.add("end")
                    await until(self._proof(), tasks)
                    if not self._shown:
                        if self.evaluations:
                            await cancel([tasks.pop()])  # it may hold a replica
                        await until(self._conclude(None), tasks)
                finally:
                    await cancel(tasks)
                    await self.broadcasts.close()
                    if self.evaluations:
                        await self.evaluations.generation.close()
        finally:
            await self.record.store.commit(durable=True)
            self.record.store.close()
        return self.summary()

    async def _trainer_done(self) -> None:
        while self.session.final is None and not self._left:
            await self.events.changed.wait()

    async def _proof(self) -> None:
        """The end of a run, unless an interruption came or cuts it short: a resume makes up for it."""
        if self._interrupted.is_set():
            return
        end = self._conclude(self.config.weights.timeout_seconds)
        with suppress(Unreachable):
            await unless(self._interrupted.wait(), end, "the run was interrupted")
            self._shown = True

    async def _conclude(self, seconds: float | None) -> None:
        """Compare all weights and evaluate the last version.

        Replicas that are absent or catching up get `seconds` to come back. None: the run was interrupted and
        will be resumed; nothing need be proven until then, but weights that differ are wrong all the same.
        """
        final, failure = self.session.final, None
        version = None if final is None else final.version
        weights = {} if final is None else await compare_weights(self.pool, final, seconds or 0.0)
        if seconds is None:
            differing = {name: equal for name, equal in weights.items() if equal is False}
            problems = end_problems(version, differing, None, 0.0) if differing else []
        else:
            if final is not None and self.evaluations is not None:
                try:
                    with waits.on(waits.END, "evaluation", of=lambda: [waits.EVALUATION]):
                        await self.evaluations.now(final.version, last=True)
                except DistillError as error:
                    failure = str(error)
            problems = end_problems(version, weights, failure, seconds)
        self._end = Concluded(version, weights, problems)
        self.record.write(self._end)

    async def evaluated(self, version: Version) -> EvalReport:
        """The report of a version, on every set: instead of `run`, and nothing of it is on record."""
        assert self.evaluations is not None, "it has an evaluator"
        assert self.config.evaluation is not None, "and its configuration an evaluation"
        waits.use(self.waits)
        self.dispatcher.paused.add("end")
        tasks = [asyncio.create_task(stage) for stage in (self.pool.run(), self.lives.run())]
        try:
            report = await until(self.evaluations.report(version, [*self.config.evaluation.sets]), tasks)
            assert report is not None, "no stage ends by itself"
            return report
        finally:
            await cancel(tasks)
            await self.evaluations.generation.close()
            self.close()

    async def _tidy(self) -> None:
        while True:
            await self._checkpoint_saved.wait()
            self._checkpoint_saved.clear()
            await self.record.tidy(self.config.trainer.keep_checkpoints)

    # --- what the launcher calls --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return self.config.controller.url or f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def request_stop(self, reason: str) -> None:
        """End early: the trainer finishes the batches it has, saves a checkpoint and leaves."""
        logger.info("stopping: %s", reason)
        self._interrupted.set()
        self.session.stop(reason)
        if not self.session.live:
            self.trainer_left()

    def trainer_died(self) -> None:
        """The trainer's processes have ended, and are started again."""
        self.session.dismiss()
        self.registry.trainer_died()
        self.heartbeats.forget()
        self.waits.does = {TRAINER: ("its process has ended and is started again", time.monotonic())}

    def trainer_left(self) -> None:
        """The trainer's processes have ended for good."""
        self._left = True
        self.heartbeats.forget()
        self.events.changed.wake()

    def withhold(self, why: str) -> None:
        """Hand out no batch until `allow`: rollouts are made meanwhile."""
        self.session.withheld = why

    def allow(self) -> None:
        self.session.withheld = ""
        self.session.wake()

    def pause(self, reason: PauseReason, detail: str) -> None:
        """Start no further rollouts until there is no reason left."""
        logger.warning("no rollouts are started: %s", detail)
        self._hooks.alert(f"paused: {reason}", detail)
        self.dispatcher.paused.add(reason)

    def resume(self, reason: PauseReason) -> None:
        self.dispatcher.paused.discard(reason)
        self.events.changed.wake()

    def close(self) -> None:
        """Release port and record; for a controller that is not run."""
        self._socket.close()
        self.record.store.close()

    async def _note_root(self) -> None:
        """For the display, which is in a thread: the root of what the trainer waits for."""
        while True:
            self.root = self.waits.root()
            await asyncio.sleep(ROOT_LOOK_SECONDS)

    def _stands_still(self, chain: list[waits.Wait]) -> None:
        """Tell people; start a server of ours again that the root waits for. Replicas and trainer are watched
        by what they generate, and by heartbeats."""
        logger.error("the run stands still:\n%s", "\n".join(self.why()))
        self._hooks.alert("the run stands still", str(chain[-1]))
        for process in servers(self.config):
            if f"{process.role} {process.subject}" in chain[-1].of():  # a teacher's, or an environment's
                self.events.emit(events.Stalled(process.name))

    # --- handlers -----------------------------------------------------------------------------------------

    def _trainer_opened(self, welcome: TrainerWelcome) -> None:
        self.guard.forget()
        self.waits.does = {}  # of the one before
        self.dispatcher.depth.restart()
        self._parts.claim.run = welcome.run
        self.heartbeats.opened()
        if self._starting:
            self.timeline.restart()
            self._starting = False
        if self.evaluations is not None and welcome.version.step == 0:
            self.evaluations.due(welcome.version)

    def _step_reported(self, report: StepReport) -> None:
        self.timeline.step(TRAINER, report)
        self.dispatcher.depth.step(report.seconds.get("wait", 0.0), sum(report.seconds.values()))
        self.events.changed.wake()
        self._step, self._stepped = of_step(self.record.state, report), time.monotonic()
        figures = self._step | self.metrics()
        self._hooks.step(report.version, figures)
        newest = [of_evaluation(evaluation) for evaluation in self.record.state.evaluations[-1:]]
        for warning in self.advice.look(figures | dict(*newest)):
            logger.warning("%s", warning)
            self._hooks.alert("waste", warning)
        if problem := self.guard.look(report.version.step, report.metrics):
            self._bad_steps(problem)

    def _bad_steps(self, problem: str) -> None:
        """Roll back to a checkpoint before them, or pause."""
        state, guard, back = self.record.state, self.config.guard, None
        if guard.action == "rollback" and state.rollbacks < guard.max_rollbacks and self._hooks.set_back:
            back = retreat(state, self.guard.since, self.config.trainer.keep_checkpoints, problem)
        if back is None:
            self.withhold(problem)
            self.pause("guard", f"{problem}; no batch is handed out either: look at it, then stop the run")
            return
        logger.error("%s: back to %s", problem, back.to or "the model folder")
        self._hooks.alert("rolled back", f"{problem}: back to {back.to or 'the model folder'}")
        self.record.write(back)
        self._roll_back_trainer()

    def _roll_back_trainer(self) -> None:
        """Send the trainer back to the last rollback, unless one has begun there; after a restart too."""
        if (back := self.record.state.rolled_back) is not None:
            self.session.dismiss()
            if self._hooks.set_back is not None:
                self._hooks.set_back(back.to)

    def _published(self, event: Published) -> None:
        if event.kind == "broadcast":
            return  # what is evaluated goes to the store next
        if event.note:
            self._hooks.say(event.note)
        encode, start = event.encode_seconds, self.timeline.clock() - event.seconds
        self.timeline.follow(TRAINER, start, {"encode": encode, "write": event.seconds - encode})
        if self.evaluations is not None:
            self.evaluations.due(event.version)
        self.pool.published()

    def _note_update(self, update: VersionApplied) -> None:
        """It stages from the request on; the pause ends with the reply, and loading ends the pause."""
        end = self.timeline.clock()
        start = end - update.seconds
        spans = {
            "update": (start, end),
            "stage": (start, start + update.stage_seconds),
            "pause": (end - update.pause_seconds, end),
            "apply": (end - update.apply_seconds, end),
        }
        for what, (first, last) in spans.items():
            self.timeline.add(update.replica, what, first, last, busy=False)

    def _fail(self, problem: str) -> None:
        """Save a checkpoint and end with an error."""
        self._failure = self._failure or problem
        self.request_stop(problem)

    # --- figures ------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Current gauges of the run, by metric name."""
        values = gauges(self.record.state, self.pool, self.timeline, self._parts.teachers)
        return {**values, "buffer/depth": self.dispatcher.depth.batches}

    def figures(self) -> dict[str, float]:
        """`metrics`, and those of the newest step and of the newest evaluation of each set."""
        values = dict(self._step)
        for report in self.record.state.evaluations:
            values |= of_evaluation(report)
        return values | self.metrics()

    def why(self) -> list[str]:
        """What the run waits for, for people: the newest step, then `Waits.why`."""
        reached, ago = self.record.state.reached, time.monotonic() - self._stepped
        step = "no step yet" if reached is None else f"step {reached.step} of {self.config.run.steps}"
        return [f"{step}, {ago:.0f} s ago" if self._step else step, *self.waits.why()]

    def summary(self) -> dict[str, Any]:
        figures = summarise(self.record.state, self.timeline, self.config.metric)
        reached = self.record.state.reached
        done = reached is not None and reached.step >= self.config.run.steps
        stopping, ended = self.session.stopping, "all steps are done" if done else "the trainer left"
        return {
            **figures,
            "completed": done and self._shown,
            "error": self._failure,
            "stop_reason": stopping.reason if stopping else ended,
            "seconds": {"distill": figures["perf"]["run_seconds"]},
            "version": str(reached) if reached else None,
            "run": msgspec.to_builtins(self.record.run),
            "problems": self._end.problems,
            "warnings": self.advice.standing,
            **identity(self._end.weights),
            "weights_digest": digest_of_all(self.session.final.digests) if self.session.final else None,
            "replica_joins": {name: replica.joined for name, replica in self.pool.replicas.items()},
        }


# --- the end of a run: all weights are compared, the last version is evaluated -----------------------------


async def compare_weights(
    pool: ReplicaPool, final: FinalDigests, seconds: float = 0.0
) -> dict[str, bool | None]:
    """Bring every replica to the last version and compare its weights; name → whether they are equal.

    One that is absent or catching up gets `seconds` to come back. None: it was not compared.
    """
    deadline, members = time.monotonic() + seconds, pool.members()
    compared = await asyncio.gather(*(_compared(pool, member, final, deadline) for member in members))
    pairs = zip(members, compared, strict=True)
    return {member.name: equal for member, equal in pairs if pool.has(member)}


async def _compared(pool: ReplicaPool, replica: Replica, final: FinalDigests, deadline: float) -> bool | None:
    while pool.has(replica):
        if replica.phase is Phase.SERVING:
            try:
                if replica.version != final.version:
                    await pool.update(replica, final.version)
                state = await replica.engine.state(digests=True)
                if state.version == final.version:
                    return state.digests == final.digests
            except DistillError as error:
                logger.warning("replica %s cannot show its weights: %s", replica.name, error)
        left = deadline - time.monotonic()
        if left <= 0 or (replica.version != final.version and not pool.is_stored(final.version)):
            return None
        with waits.on(waits.END, replica.name, progress=replica.joined):
            await pool.changed.wait(min(left, pool.retry_seconds))
    return None


def end_problems(
    version: Version | None, compared: Mapping[str, bool | None], failure: str | None, waited: float
) -> list[str]:
    """In sentences: value, rule, remedy.

    `failure`: why `version` was not evaluated. `waited`: seconds that replicas were given.
    """
    remedy = "mend it and go on with --resume"
    if version is None:
        return [f"the trainer left without its last word, so no replica was compared with it: {remedy}"]
    problems = [
        f"replica {name} holds other weights than the trainer at {version}, and they must be equal bit for "
        "bit: what it generated is in doubt; run `distill sync verify`, and repeat it with a fresh replica"
        for name, equal in compared.items()
        if equal is False
    ]
    missing = [name for name, equal in compared.items() if equal is None]
    if missing or not compared:
        problems.append(
            f"the trainer's weights at {version} were not compared with those of "
            f"{', '.join(missing) or 'any replica'}, which had {waited:.0f} s to show them "
            f"(weights.timeout_seconds): {remedy}"
        )
    if failure is not None:
        problems.append(f'{version} could not be evaluated, so "after" is empty: {failure}; {remedy}')
    return problems
