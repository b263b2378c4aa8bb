"""The controller: joins prompts, replicas, teachers, buffer and trainer, and runs until the trainer has left.

    prompts ─▶ Feeder ─▶ replicas ─▶ Scoring ─▶ Books (journal, buffer) ─▶ composer ─▶ Desk ─▶ trainer
                 ▲  └─▶ Writing (prompts that teachers complete) ─▶ Scoring                  │
                 └──────────────────── Fleet follows the versions that are published ◀────────┘

Every arrow is a task of its own; what bounds them all is the capacity rule. With `max_staleness` 0 the same
tasks take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from distill.aio import Signal, cancel, until
from distill.batching.batcher import Hold, StepBatcher
from distill.batching.packing import Shape
from distill.buffer.late import rules, seconds_of_waiting
from distill.conclusion import conclude
from distill.config import RunConfig
from distill.evaluation.schedule import Evaluations
from distill.interfaces import Components, Hooks, Quarantined
from distill.metrics.summary import digest_of_all, gauges, identity, of_step, summarise
from distill.metrics.timeline import TRAINER, Timeline
from distill.prompts.stream import Prompt
from distill.rollout.bad_answers import Trust
from distill.rollout.broadcasts import Broadcasts
from distill.rollout.dispatcher import Dispatcher, Holder
from distill.rollout.membership import Members
from distill.rollout.replica_pool import Heartbeats, ReplicaPool
from distill.run_log.records import Concluded, DropReason, Rollout, VersionApplied
from distill.run_log.run_log import RunLog
from distill.run_log.validation import may_exist, validator
from distill.scoring.on_policy_mix import Writing, authors
from distill.scoring.scorer import PendingScore, Scoring
from distill.trainer_api.guard import Guard, retreat, unusable
from distill.trainer_api.http_api import application, listen, serving
from distill.trainer_api.session import Listener, TrainerSession
from sync.errors import Overloaded
from sync.wire import Audience, Published, StepReport, TrainerWelcome, unpack

logger = logging.getLogger(__name__)

BROADCAST_RETRY_SECONDS = 0.5


class Controller:
    """One run, or one stretch of it: with a journal that is not empty it goes on where that ends.

    Construct (reads the journal, binds the port), then `await run()` once. `url` is where the trainer finds
    it. `request_stop` and `trainer_left` may be called at any time.
    """

    def __init__(
        self, config: RunConfig, parts: Components, hooks: Hooks = Hooks(), token: str | None = None
    ) -> None:
        self.config = config
        self.timeline = Timeline(hooks.span)
        self.trust = Trust(config.guard.bad_answers, self._fail)
        self.validator = validator(config.rollout, parts, lambda: self.run_log.state)
        self.run_log = RunLog.open(
            parts.journal,
            parts.prompts,
            run=config.run.name,
            seed=config.run.seed,
            rules=rules(config),
            author=authors(config.run.seed, config.rollout.batch, config.objective.on_policy),
            sift=self.validator.journaled,
            quarantine=lambda id, *why: hooks.quarantined(Quarantined(Prompt(id, []), *why)),
        )
        self._hooks = hooks
        self._teachers = parts.teachers
        self._changed, self._tidy = Signal(), Signal()
        self._left = self._interrupted = False
        self._stop_reason: str | None = None
        self._failure: str | None = None
        self._claim, self._end = parts.claim, Concluded(None, {}, [])
        self._claim.run = self.run_log.run
        self._began = time.monotonic()
        self.pool = self._make_pool(parts)
        self.broadcasts = Broadcasts(self.pool, config.run.start_seconds)
        self.scoring = self._make_scoring(parts)
        given = (self._quarantine, self.timeline, self.validator, self.trust)
        self.writing = Writing(parts, config, lambda one: self.dispatcher.take(one), *given)
        self.dispatcher = Dispatcher(
            self.run_log,
            self.pool,
            config.rollout,
            config.run.steps,
            self._finished,
            self.timeline,
            self.validator,
            unusable=lambda answer: unusable(answer, config.guard),
            quarantine=self._quarantine,
            write=self.writing.put,
            quarantined=hooks.quarantined,
        )
        self._guard = Guard(config.guard)
        self.heartbeats = Heartbeats(config.run.health_timeout_seconds, self._hung)
        self.session = self._make_session(parts)
        self.batcher = self._make_batcher()
        self._set_back()
        self.evaluations = self._make_evaluations(parts)
        self._socket = listen(config.controller.host, config.controller.port, token)
        self._app = application(
            self.session, parts.teachers, self.metrics, token, Members(self.pool, parts.connect), parts.claim
        )

    # --- what the launcher calls --------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the trainer reaches this controller."""
        host, port = self._socket.getsockname()[:2]
        return self.config.controller.url or f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def request_stop(self, reason: str, *, checkpoint: bool = True) -> None:
        """End early: the trainer finishes the batches it has, saves a checkpoint and leaves."""
        logger.info("stopping: %s", reason)
        self._interrupted = True
        self._stop(reason, checkpoint)
        if not self.session.live:
            self.trainer_left()

    def trainer_left(self) -> None:
        """The trainer's processes have ended for good."""
        self._left = True
        self.heartbeats.forget()
        self._changed.wake()

    def withhold(self) -> None:
        """Hand out no batch until `allow`: rollouts are made meanwhile."""
        self.session.withheld = True

    def allow(self) -> None:
        """Training may begin."""
        self.session.withheld = False
        self._changed.wake()

    def hold(self, who: Holder, reason: str) -> None:
        """Start no further rollouts until everybody who holds them has let go."""
        logger.warning("no rollouts are started: %s", reason)
        self.dispatcher.holders.add(who)

    def release(self, who: Holder) -> None:
        """`who` no longer holds them."""
        self.dispatcher.holders.discard(who)
        self.pool.wake.wake()

    # --- the run ------------------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """Until the trainer has left; the controller's part of summary.json. Errors of a part are raised."""
        try:
            async with serving(self._app, self._socket):
                workers = [asyncio.create_task(part) for part in self._parts()]
                try:
                    await until(self._watch_end(), workers)
                    self.dispatcher.holders.add("end")
                    await self._conclude()
                finally:
                    await cancel(workers)
                    await self.broadcasts.close()
        finally:
            await self.run_log.journal.commit(durable=True)
            self.run_log.journal.close()
        return self.summary()

    def close(self) -> None:
        """Let go of port and journal; for a controller that is not run."""
        self._socket.close()
        self.run_log.journal.close()

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        parts = [self.pool.run(), self.dispatcher.run(), self.writing.run(), self.scoring.run()]
        parts += [self.evaluations.run()] if self.evaluations else []
        return [*parts, self.batcher.run(), self._keep_tidy(), self.heartbeats.run()]

    async def _watch_end(self) -> None:
        """Until the trainer said its last word, or has left without one."""
        while self.session.final is None and not self._left:
            await self._changed.wait()

    async def _keep_tidy(self) -> None:
        while True:
            await self._tidy.wait()
            await self.run_log.tidy(self.config.trainer.keep_checkpoints)

    async def _conclude(self) -> None:
        seconds = None if self._interrupted else self.config.weights.timeout_seconds
        self._end = await conclude(self.session.final, self.pool, self.evaluations, seconds)
        self.run_log.write(self._end)

    # --- what the parts call ------------------------------------------------------------------------------

    def _stop(self, reason: str, checkpoint: bool = True) -> None:
        self._stop_reason = self._stop_reason or reason
        self.session.stop(reason, checkpoint)

    def _finished(self, finished: PendingScore) -> None:
        self.scoring.put(finished)
        self.batcher.note_waiting()

    async def _scored(self, rollouts: list[Rollout]) -> None:
        await self.run_log.admit(rollouts)
        self._changed.wake()

    def _fail(self, problem: str) -> None:
        """No server of a kind is left: save a checkpoint and end with an error."""
        self._failure = self._failure or problem
        self.request_stop(problem)

    def _quarantine(self, finished: PendingScore, reason: DropReason, detail: str) -> None:
        prompt, tokens = finished.asked.prompt, finished.answer.token_ids
        logger.warning("rollout %s is put aside, %s: %s", prompt.id, reason, detail)
        self.run_log.drop([prompt.id], reason, detail, tokens.shape[0])
        self._hooks.quarantined(Quarantined(prompt, reason, detail, unpack(tokens).tolist()))
        self.pool.wake.wake()
        self._changed.wake()

    def _distrust(self, problem: str) -> None:
        """Too many bad steps: go back to a checkpoint before them, or hold."""
        state, guard, back = self.run_log.state, self.config.guard, None
        if guard.action == "rollback" and state.rollbacks < guard.max_rollbacks and self._hooks.set_back:
            back = retreat(state, self._guard.since, self.config.trainer.keep_checkpoints, problem)
        if back is None:
            self.withhold()
            self.hold("guard", f"{problem}; no batch is handed out either: look at it, then stop the run")
            return
        logger.error("%s: back to %s", problem, back.to or "the model folder")
        self.run_log.write(back)
        self._set_back()

    def _set_back(self) -> None:
        """Have the next trainer begin where the guard said last, unless one has; after a restart too."""
        if (back := self.run_log.state.rolled_back) is not None:
            self.session.roll_back(back)
            if self._hooks.set_back is not None:
                self._hooks.set_back(back.to)

    def _hung(self, ranks: list[int]) -> None:
        text = "no heartbeat of trainer rank %s for run.health_timeout_seconds = %g s: the trainer is hung"
        logger.error(text, ", ".join(map(str, ranks)), self.config.run.health_timeout_seconds)
        self._hooks.stuck(TRAINER)

    def _applied(self, record: VersionApplied) -> None:
        self.run_log.write(record)
        end = time.time()
        self.timeline.add(record.replica, "update", end - record.seconds, end, busy=False)

    def _opened(self, welcome: TrainerWelcome) -> None:
        self._guard.forget()
        self._claim.run = welcome.run
        self.heartbeats.forget()
        if self.run_log.state.lineages[welcome.version.lineage].origin is None:
            self.timeline.restart()
            self._began = time.monotonic()
        self._hooks.opened(welcome)
        self.pool.published()
        if self.evaluations is not None and welcome.version.step == 0:
            self.evaluations.due(welcome.version)

    def _reported(self, report: StepReport) -> None:
        self.timeline.step(TRAINER, report.seconds, ("wait", "train", "publish", "checkpoint"))
        figures = of_step(self.run_log.state, report)
        self._hooks.step(report.version, {**report.metrics, **figures, **self.metrics()})
        if problem := self._guard.look(report.version.step, report.metrics):
            self._distrust(problem)

    def _published(self, event: Published) -> Audience | None:
        """Raises Overloaded for a broadcast that nobody would hear yet, unless the run is about to end."""
        if event.kind == "broadcast" and not self.broadcasts.listening() and self._stop_reason is None:
            raise Overloaded("no replica listens to a broadcast yet: ask again", BROADCAST_RETRY_SECONDS)
        if self.evaluations is not None:
            self.evaluations.due(event.version)
        if event.kind == "broadcast":
            return self.broadcasts.seat(event)
        self.pool.published()
        return None

    # --- figures ------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Where the run stands, by name."""
        return gauges(self.run_log.state, self.pool, self.timeline, self._teachers)

    def summary(self) -> dict[str, Any]:
        """The controller's part of summary.json."""
        metric = self.config.evaluation.metric if self.config.evaluation else "reverse_kl"
        reached = self.run_log.state.reached
        done = reached is not None and reached.step >= self.config.run.steps
        return {
            **summarise(self.run_log.state, self.timeline, metric),
            "completed": done,
            "error": self._failure,
            "stop_reason": self._stop_reason or ("all steps are done" if done else "the trainer left"),
            "seconds": {"distill": time.monotonic() - self._began},
            "version": str(reached) if reached else None,
            "run": msgspec.to_builtins(self.run_log.run),
            "problems": self._end.problems,
            **identity(self._end.weights),
            "weights_digest": digest_of_all(self.session.final.digests) if self.session.final else None,
            "replica_joins": {name: one.joined for name, one in self.pool.replicas.items()},
        }

    # --- putting together ---------------------------------------------------------------------------------

    def _make_pool(self, parts: Components) -> ReplicaPool:
        state = self.run_log.state
        pool = ReplicaPool(
            target=lambda: state.target.version if state.target else None,
            step_of=state.step_of,
            may_exist=partial(may_exist, state=state),
            applied=self._applied,
            wake=Signal(),
            kv_on_swap=self.config.weights.kv_on_swap,
            update_seconds=self.config.weights.timeout_seconds,
            stranded=self._changed.wake,
            stall_timeout_seconds=self.config.rollout.stall_timeout_seconds,
            stuck=self._hooks.stuck,
            trust=self.trust,
        )
        for name, engine in parts.replicas.items():
            pool.add(name, engine)
        return pool

    def _make_scoring(self, parts: Components) -> Scoring:
        return Scoring(
            parts.teachers,
            parts.route,
            self.validator,
            self.config.buffer.score_batch,
            scored=self._scored,
            refused=self._quarantine,
            timeline=self.timeline,
            trust=self.trust,
            attempts=self.config.rollout.max_attempts,
            transforms=parts.transforms,
            reward_fn=parts.reward_fn,
        )

    def _make_session(self, parts: Components) -> TrainerSession:
        config = self.config
        return TrainerSession(
            self.run_log,
            Shape(
                config.trainer.micro_batch_tokens,
                list(parts.teachers),
                config.objective.max_supervised_tokens,
            ),
            Listener(
                opened=self._opened,
                reported=self._reported,
                published=self._published,
                saved=self._tidy.wake,
                heard=self.heartbeats.heard,
                wants_broadcast=self.broadcasts.wanted,
                lost_members=self.broadcasts.lost_members,
            ),
            steps=config.run.steps,
            changed=self._changed,
        )

    def _make_batcher(self) -> StepBatcher:
        return StepBatcher(
            self.run_log,
            self.session,
            Hold(seconds_of_waiting(self.config)),
            self.config.run.steps,
            changed=self._changed,
            composed=self.pool.wake,
            in_scoring=lambda: self.scoring.open,
            timeline=self.timeline,
        )

    def _make_evaluations(self, parts: Components) -> Evaluations | None:
        if parts.evaluator is None or self.config.evaluation is None:
            return None
        return Evaluations(
            parts.evaluator,
            self.config.evaluation,
            self.run_log,
            self.timeline,
            self._hooks.evaluated,
            self._stop,
            trust=self.trust,
        )
