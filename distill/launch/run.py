"""Runs a whole configuration: starts every role, joins them, and leaves nothing behind.

    check ─▶ lock the folder ─▶ start all roles at once ─▶ controller runs ─▶ stop roles ─▶ summary, report

A stop signal asks the controller; the trainer finishes its step, saves a checkpoint and leaves; what is still
there when run.grace_seconds are over is killed. A second signal kills at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from rich.console import Console

from distill.config import RunConfig
from distill.controller import Controller
from distill.evaluation.client import HttpEvaluator
from distill.events import Quarantined
from distill.interfaces import Components, Hooks
from distill.launch.ports import Ports
from distill.launch.resume import content
from distill.launch.roles import TRAINER, Plan, plan_servers, token_of, trainer_child
from distill.launch.run_folder import GIB, RunFolder, write_json
from distill.launch.supervise import Supervisor
from distill.metrics.console import ProgressDisplay
from distill.metrics.plot import draw
from distill.metrics.results import complete
from distill.metrics.trackers import JsonLines, Lines, Sink, Spans, Wandb, log_all
from distill.preflight import checks as preflight
from distill.preflight import disk
from distill.preflight import engines as live
from distill.preflight.probes import Finding
from distill.prompts.held_out import PromptSplit
from distill.prompts.stream import PromptStream
from distill.rollout.replica_client import HttpReplica
from distill.run_log.journal import Journal
from student_trainer.objectives.needs import needs, student_topk
from sync.claims import Claim
from sync.errors import Interrupted, RemoteError
from sync.wire import EvalReport, Version
from teacher_service.client import TeacherClient
from teacher_service.router import Router
from teacher_service.transform import load_transforms

log = logging.getLogger(__name__)

STOP_SHARE = 0.7
"""Of the grace period that belongs to the trainer's step and checkpoint; the rest to TERM and KILL."""
DISK_SECONDS = 5.0
"""Between two looks at the free space."""


async def run(
    config: RunConfig,
    *,
    resume: bool = False,
    console: Console | None = None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Run to the end; what is written to summary.json. Raises DistillError; nothing is left running.

    `seconds`: what was done beforehand and how long it took; it is added to the total.
    """
    began, console = time.monotonic(), console or Console(stderr=True)
    split = preflight.check(config)
    if warning := disk.check_room(config, disk.estimate(config)):
        console.print(warning, markup=False, highlight=False, soft_wrap=True)
    token = token_of(config)
    with RunFolder.open(config, resume) as folder, Ports() as ports:
        for line in folder.keep(config, content(config, split)):
            console.print(f"resumed with {line}", markup=False, highlight=False, soft_wrap=True)
        plan = plan_servers(config, folder, token, ports)
        launcher = _Launcher(config, folder, plan, split, token, console)
        figures = await launcher.run()
        summary = complete(config, figures, time.monotonic() - began, seconds or {})
        write_json(folder.path / "summary.json", summary)
        if summary["steps"] or summary["evaluations"]:
            await asyncio.to_thread(draw, folder.path)
    if summary["error"]:
        raise RemoteError(f"{summary['error']}; mend it, then go on with --resume")
    if launcher.stopped_by:
        saved = "holds a checkpoint" if summary["steps"] else "holds no step yet"
        raise Interrupted(
            f"stopped by {launcher.stopped_by} at step {summary['steps']}; "
            + "; ".join([f"{folder.path} {saved}: go on with --resume", *summary["problems"]])
        )
    return summary


class _Launcher:
    """One run of one configuration."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        plan: Plan,
        split: PromptSplit,
        token: str | None,
        console: Console,
    ) -> None:
        self._config, self._folder, self._token = config, folder, token
        self._joined, self.stopped_by, self._split = False, "", split
        self._stop_deadline = float("inf")
        self._back_to: list[Version | None] = []
        """The checkpoint to begin at after a rollback, until a trainer has; else empty."""
        self._first_step: asyncio.Future[list[Finding]] = asyncio.get_running_loop().create_future()
        self._display = ProgressDisplay(config.run.steps, console)
        self._spans = Spans(folder.path / "timeline.jsonl")
        self._quarantine = Lines(folder.path / "quarantine.jsonl")
        self._sinks: list[Sink] = [JsonLines(folder.path / "metrics.jsonl"), self._display]
        self._claim = Claim()
        self._teachers = {
            name: TeacherClient(name, urls, token, claim=self._claim) for name, urls in plan.teachers.items()
        }
        self._parts = self._make_parts(plan, split)
        self._controller = Controller(config, self._parts, self._hooks(), token)
        self._controller.withhold()
        children = list(plan.children)
        if config.controller.trainer == "launch":
            child = trainer_child(config, folder, self._controller.url, token)
            forget = self._controller.heartbeats.forget
            children.append(
                replace(child, joined=lambda: self._joined, prepare=self._before_trainer, died=forget)
            )
        self._supervisor = Supervisor(
            children,
            folder.logs,
            config.run.restarts,
            health_seconds=config.run.health_timeout_seconds,
        )

    async def run(self) -> dict[str, Any]:
        """The controller's figures."""
        try:
            if self._config.tracking.wandb != "disabled":
                self._sinks.append(await asyncio.to_thread(Wandb, self._config))
            with self._signals(asyncio.get_running_loop()):
                return await self._supervised()
        finally:
            await self._supervisor.stop(self._config.run.grace_seconds * (1 - STOP_SHARE))
            for sink in self._sinks:
                sink.close()
            self._spans.close()
            self._quarantine.close()
            await self._close_peers()

    async def _supervised(self) -> dict[str, Any]:
        """Controller, children and their supervision side by side, until the controller is done."""
        controller = asyncio.create_task(self._controller.run(), name="controller")
        await self._supervisor.start()
        others = [
            asyncio.create_task(self._supervise(), name="supervisor"),
            asyncio.create_task(self._preflight(), name="preflight"),
            asyncio.create_task(self._watch_disk(), name="disk"),
        ]
        try:
            pending: set[asyncio.Task[Any]] = {controller, *others}
            while controller in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await self._trainer_end()
            return controller.result()
        finally:
            for task in (controller, *others):
                task.cancel()
            await asyncio.gather(controller, *others, return_exceptions=True)

    async def _supervise(self) -> None:
        seconds = self._config.run.start_seconds
        await self._supervisor.ready(seconds)
        await self._supervisor.watch(seconds, self._left)

    def _left(self, child: str) -> None:
        if child == TRAINER:
            self._controller.trainer_left()

    async def _trainer_end(self) -> None:
        """Give the trainer time to leave by itself, once it has said its last word; none before its first."""
        if self._joined and TRAINER in self._supervisor.children:
            grace = self._config.run.grace_seconds * STOP_SHARE
            left = max(0.0, min(grace, self._stop_deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._supervisor.ended(TRAINER), left)

    async def _preflight(self) -> None:
        """Let training begin when the engines agree, and go on when the first step does too."""
        await live.check_engines(self._config, self._split, self._engines(), self._say)
        self._controller.allow()
        findings = await self._first_step
        for finding in findings:
            self._say(finding)
        live.refuse(findings)

    def _say(self, finding: Finding) -> None:
        self._display.say(finding.line)

    def _engines(self) -> live.Engines:
        evaluator = self._parts.evaluator
        return live.Engines(
            self._teachers,
            evaluator if isinstance(evaluator, HttpEvaluator) else None,
            transforms=self._parts.transforms,
        )

    async def _watch_disk(self) -> None:
        """Start no rollouts while a disk of the run is nearly full."""
        held, least = False, self._config.run.min_free_disk_gib
        while True:
            await asyncio.sleep(DISK_SECONDS)
            where, free = self._folder.fullest()
            full = free / GIB < least
            if full and not held:
                self._controller.pause(
                    "disk", f"{where} has less than run.min_free_disk_gib = {least:g} GiB free"
                )
            elif held and not full:
                self._controller.resume("disk")
            held = full

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """The first stop signal asks, the second one kills."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        this = asyncio.current_task()

        def force() -> None:
            self._supervisor.kill()
            if this is not None:
                this.cancel()

        def stop(number: signal.Signals) -> None:
            if self.stopped_by:
                force()
                return
            self.stopped_by = number.name
            self._display.say(f"{number.name}: finishing the step, saving a checkpoint (again: stop at once)")
            self._controller.request_stop(number.name)
            seconds = self._config.run.grace_seconds * STOP_SHARE
            self._stop_deadline = time.monotonic() + seconds
            loop.call_later(seconds, self._controller.trainer_left)

        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _make_parts(self, plan: Plan, split: PromptSplit) -> Components:
        config = self._config
        return Components(
            replicas={name: self._replica(url) for name, url in plan.replicas.items()},
            teachers=dict(self._teachers),
            route=Router(config.teachers).route,
            prompts=PromptStream(split.train, config.run.seed, config.rollout.per_prompt),
            journal=Journal(self._folder.path / "journal", config.buffer.fsync),
            want=needs(config.objective, config.rollout.temperature),
            connect=self._replica,
            student_topk=student_topk(config.objective),
            vocab_size=split.vocab_size,
            evaluator=HttpEvaluator(plan.evaluator, self._token, claim=self._claim)
            if plan.evaluator
            else None,
            reward_fn=split.reward_fn,
            transforms=load_transforms(config.teachers),
            claim=self._claim,
        )

    def _replica(self, url: str) -> HttpReplica:
        return HttpReplica(url, self._token, self._claim)

    def _hooks(self) -> Hooks:
        config = self._config

        def opened(_: object) -> None:
            self._joined = True
            self._back_to.clear()

        def quarantined(one: Quarantined) -> None:
            self._quarantine.write(msgspec.json.encode(one).decode())

        def step(version: Version, figures: dict[str, float]) -> None:
            log_all(self._sinks, version.step, figures)
            if not self._first_step.done() and (findings := live.first_step(config, figures)):
                self._first_step.set_result(findings)

        def evaluated(report: EvalReport, best: bool) -> None:
            found = {
                "reverse_kl": report.reverse_kl,
                "pass_rate": report.pass_rate,
                "truncated": report.truncated,
                "best": best,
            }
            log_all(
                self._sinks, report.version.step, {f"eval/{name}": value for name, value in found.items()}
            )

        return Hooks(
            step=step,
            evaluated=evaluated,
            opened=opened,
            quarantined=quarantined,
            set_back=self._back_to.append if config.controller.trainer == "launch" else None,
            stuck=lambda name: self._supervisor.kill_child(name),
            span=self._spans.write,
        )

    def _before_trainer(self) -> None:
        self._joined = False
        for version in self._back_to:
            self._folder.set_back(version)

    async def _close_peers(self) -> None:
        closing = [peer.aclose() for peer in self._teachers.values()]
        closing += [one.engine.aclose() for one in self._controller.pool.replicas.values()]
        if isinstance(self._parts.evaluator, HttpEvaluator):
            closing.append(self._parts.evaluator.aclose())
        await asyncio.gather(*closing, return_exceptions=True)
