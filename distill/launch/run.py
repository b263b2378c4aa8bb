"""Run a configuration: start every role, connect them, and leave nothing behind.

    check ─▶ lock the folder ─▶ start all roles at once ─▶ controller runs ─▶ stop roles ─▶ summary, report
                                                                                              ─▶ close wandb

On a stop signal the trainer finishes its step, saves a checkpoint and leaves; roles that are still there when
run.grace_seconds are over are killed. A second signal kills at once. wandb has FINISH_SECONDS of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from distill import garbage
from distill.aio import cancel, in_daemon
from distill.buffer import Batch, rules
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Hooks
from distill.launch import cluster
from distill.launch.preflight import components, connect, disconnect, prepare
from distill.launch.roles import Plan, Ports, token_of, trainer_child
from distill.launch.run_folder import RunFolder
from distill.launch.supervise import ChildSpec, Supervisor
from distill.metrics.card import write_card
from distill.metrics.console import ProgressDisplay
from distill.metrics.page import REPORT, write_page
from distill.metrics.results import read_summary
from distill.metrics.samples import QUARANTINE, SAMPLES, Quarantine, SampleFile
from distill.metrics.summary import complete, of_evaluation
from distill.metrics.trackers import MetricsFile, Sink, TensorBoard, Wandb, log_all
from distill.preflight_checks import engines as live
from distill.preflight_checks import machine
from distill.preflight_checks.checks import Checked
from distill.preflight_checks.machine import routing_of
from distill.preflight_checks.probes import Finding
from distill.prompts.reward_pool import RewardPool
from distill.prompts.sources import keep_position
from distill.prompts.stream import PromptStream
from distill.record.journal import import_journal
from distill.record.resume import Resume, Start
from distill.record.resume import resume as goes_on_from
from distill.record.store import Store
from distill.rollout.replica_client import HttpReplica
from distill.topology import TRAINER
from student_trainer.checkpoint_files import CHECKPOINTS, choose
from student_trainer.objectives.config import student_topk
from sync.base.durable import write_json
from sync.base.errors import DataError, DistillError, Interrupted, RemoteError
from sync.base.jsonl import JsonLines
from sync.wire import EvalReport, Version
from sync.wire.claims import Claim

log = logging.getLogger(__name__)

STOP_SHARE = 0.7
"""Share of the grace period for the trainer's step and checkpoint; the rest is for TERM and KILL."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DISK_POLL_SECONDS = 5.0


async def run(
    config: RunConfig,
    *,
    resume: bool = False,
    console: Console | None = None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """See `distill.api.run`."""
    began, console = time.monotonic(), console or Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if resume and (done := finished(config)):
        say(f"{config.run_dir} is already complete: {done['steps']} steps; raise run.steps to train on")
        return done
    with contextlib.ExitStack() as opened:
        ready = prepare(config, say)
        config, split, token = ready.config, ready.split, token_of(ready.config)
        engine = opened.enter_context(cluster.opened(config))
        folder = opened.enter_context(RunFolder.open(config, resume))
        ports = opened.enter_context(Ports())
        await import_journal(folder.path, rules(config), config.trainer.keep_checkpoints)
        prompts = PromptStream(split.train, config.run.seed, config.rollout.per_prompt)
        start = goes_on_from(folder.path, Start.of(config, prompts, split))
        for line in start.notes:
            say(line)
        folder.keep(start.config)
        keep_position(split.train, folder.path, start.streams)
        config, plan = cluster.planned(config, engine, folder, token, ports, say)
        launcher = _Launcher(ready._replace(config=config), folder, plan, prompts, start, token, console)
        try:
            figures = await launcher.run(opened)
            stopped_by = "" if figures["completed"] else launcher.stopped_by
            taken = start.earlier.seconds + time.monotonic() - began
            summary = complete(config, figures, taken, seconds or {})
            write_json(folder.path / "summary.json", summary)
            await asyncio.to_thread(describe, config, summary, stopped_by, say)
        finally:
            await launcher.close()
    check_end(config, summary, stopped_by)
    return summary


class _Launcher:
    """One run of one configuration."""

    def __init__(
        self,
        ready: Checked,
        folder: RunFolder,
        plan: Plan,
        prompts: PromptStream,
        start: Resume,
        token: str | None,
        console: Console,
    ) -> None:
        config, split = self._config, self._split = ready.config, ready.split
        self._folder = folder
        self._joined, self._over, self.stopped_by = False, False, ""
        self._stop_deadline = float("inf")
        self._roll_back_to: list[Version | None] = []
        """Checkpoint at which the next trainer begins, after a rollback and until it has; else empty."""
        self._first_step: asyncio.Future[list[Finding]] = asyncio.get_running_loop().create_future()
        earlier = start.earlier.figures.get("run_seconds", 0.0)
        self._display = ProgressDisplay(config, console, earlier)
        self._spans = JsonLines(folder.path / "timeline.jsonl")
        self._quarantine = JsonLines(folder.path / QUARANTINE)
        every, count = config.tracking.samples_every, config.tracking.samples
        self._samples = SampleFile(folder.path / SAMPLES, every, count)
        self._sinks: list[Sink] = [MetricsFile(folder.path / "metrics.jsonl"), self._display]
        self._wandb: Wandb | None = None
        if config.tracking.tensorboard:
            self._sinks.append(TensorBoard(folder.path / "tensorboard"))
        self._rewards = RewardPool(split.rewards) if split.rewards else None
        claim = Claim()
        self._clients = connect(config, plan, token, claim)
        parts = components(
            config,
            self._clients,
            split,
            claim,
            prompts=prompts,
            store=Store(folder.path, config.buffer.fsync),
            connect=lambda address: HttpReplica(address, token, claim=claim),
            expected=plan.expected,
            student_topk=student_topk(config.objective),
            routing=routing_of(config),
            sets=ready.sets,
            rewards=self._rewards,
        )
        self._controller = Controller(config, parts, start, self._hooks(), token)
        self._controller.withhold("the engines are compared (run.preflight)")
        folder.keep_url(config.controller, self._controller.url)
        self._supervisor = self._supervised_children(plan, token)

    def _supervised_children(self, plan: Plan, token: str | None) -> Supervisor:
        """The servers that are started here, and the trainer where it is."""
        config, children = self._config, {child.name: child for child in plan.children}
        if config.controller.trainer == "launch":
            children[TRAINER] = replace(
                children.get(TRAINER) or trainer_child(config, self._controller.url, token),
                joined=lambda: self._joined,
                prepare=self._before_trainer,
                died=self._controller.trainer_died,
                left=self._controller.trainer_left,
            )
        specs = [replace(child, died=partial(self._died, child)) for child in children.values()]
        return Supervisor(
            specs,
            self._folder.logs,
            config.run.restarts,
            start_seconds=config.run.start_seconds,
            health_seconds=config.run.health_timeout_seconds,
        )

    async def run(self, signals: contextlib.ExitStack) -> dict[str, Any]:
        """The controller's figures. `signals`: until it is left, a signal does not end the process."""
        self._display.start(self._supervisor.status, lambda: self._controller.root)
        try:
            if self._config.tracking.wandb != "disabled":
                run = self._controller.record.run
                self._wandb = await asyncio.to_thread(Wandb, self._config, run)
                self._sinks.append(self._wandb)
            garbage.begin()
            signals.enter_context(self._signals(asyncio.get_running_loop()))
            return await self._supervised()
        finally:
            self._over = True
            await self._supervisor.stop(self._config.run.grace_seconds * (1 - STOP_SHARE))
            for sink in self._sinks:
                if sink is not self._wandb:
                    sink.close()
            if self._rewards is not None:
                await self._rewards.close()
            self._controller.timeline.cut()
            self._spans.close()
            self._quarantine.close()
            self._samples.close()
            joined_later = [replica.engine for replica in self._controller.pool.replicas.values()]
            await disconnect(self._clients, *joined_later)

    async def close(self) -> None:
        """Have wandb take the last figures; called once the run's folder holds all of them."""
        if self._wandb is not None:
            await in_daemon(self._wandb.close)

    async def _supervised(self) -> dict[str, Any]:
        """Controller, children and their supervision side by side, until the controller is done."""
        self._folder.begin()
        controller = asyncio.create_task(self._controller.run(), name="controller")
        await self._supervisor.start()
        others = [
            asyncio.create_task(self._supervisor.watch(), name="supervisor"),
            asyncio.create_task(self._preflight(), name="preflight"),
            asyncio.create_task(self._watch_disk(), name="disk"),
        ]
        try:
            pending: set[asyncio.Task[Any]] = {controller, *others}
            while controller in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if self._joined and TRAINER in self._supervisor.children:
                left = self._stop_deadline - time.monotonic()
                left = max(0.0, min(self._config.run.grace_seconds * STOP_SHARE, left))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._supervisor.children[TRAINER].exit(), left)
            figures = controller.result()
            for problem in figures["problems"]:
                self._alert("the end shows less than it should", problem)
            return figures
        except asyncio.CancelledError:  # a second signal, or the end of a probe: nothing is to be saved
            self._supervisor.kill()
            raise
        finally:
            await cancel([controller, *others])

    def _alert(self, title: str, text: str) -> None:
        if self._wandb is not None:
            self._wandb.alert(title, text)

    def _died(self, child: ChildSpec) -> None:
        child.died()
        self._alert(f"{child.name} is restarted", f"it ended; {self._folder.logs / child.name}.log has why")

    async def _preflight(self) -> None:
        """Let training begin when the engines agree, and go on when the first step does too.

        The replicas are compared with the trainer itself, at its first step.
        """
        engines = replace(self._clients, replicas={})
        await live.check_engines(self._config, self._split, engines, self._say)
        self._controller.allow()
        findings = await self._first_step
        for finding in findings:
            self._say(finding)
        live.refuse(findings)

    def _say(self, finding: Finding) -> None:
        self._display.say(finding.line)

    async def _watch_disk(self) -> None:
        paused, least = False, self._config.run.min_free_disk_gib
        while True:
            await asyncio.sleep(DISK_POLL_SECONDS)
            where, free = self._folder.fullest()
            full = free / machine.GIB < least
            if full and not paused:
                reason = f"{where} has less than run.min_free_disk_gib = {least:g} GiB free"
                self._controller.pause("disk", reason)
            elif paused and not full:
                self._controller.resume("disk")
            paused = full

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
            yield
            return
        this = asyncio.current_task()
        assert this is not None, "runs in a task"
        came: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            came.append(number)
            if len(came) > 1:
                this.cancel()
                return
            if self._over:
                log.warning("%s: the run is over and writes its figures (again: stop at once)", number.name)
                return
            self.stopped_by = number.name
            doing = "finishing the step, saving a checkpoint"
            if self._controller.session.final is not None:
                doing = "what is not shown of the last version is shown with --resume"
            self._display.say(f"{number.name}: {doing} (again: stop at once)")
            self._controller.request_stop(number.name)
            seconds = self._config.run.grace_seconds * STOP_SHARE
            self._stop_deadline = time.monotonic() + seconds
            loop.call_later(seconds, self._controller.trainer_left)

        heard = [*STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
            heard.remove(signal.SIGHUP)
        for number in heard:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def _hooks(self) -> Hooks:
        config = self._config

        def opened(_: object) -> None:
            self._joined = True
            self._roll_back_to.clear()

        def step(version: Version, figures: dict[str, float]) -> None:
            log_all(self._sinks, version, figures)
            if not self._first_step.done() and (findings := live.first_step(config, figures)):
                self._first_step.set_result(findings)

        def batch(batch: Batch) -> None:
            self._samples.write(batch)
            garbage.batch_made(batch.version.step)

        def evaluated(report: EvalReport, best: bool) -> None:
            log_all(self._sinks, report.version, of_evaluation(report, best))

        def quarantined(completion: Quarantine) -> None:
            self._quarantine.write(completion)
            self._alert(f"quarantined: {completion.reason}", completion.detail)

        return Hooks(
            step=step,
            evaluated=evaluated,
            opened=opened,
            batch=batch,
            quarantined=quarantined,
            alert=self._alert,
            say=self._display.say,
            set_back=self._roll_back_to.append if config.controller.trainer == "launch" else None,
            stalled=lambda name: self._supervisor.kill_child(name),  # made after the controller
            span=self._spans.write,
        )

    def _before_trainer(self) -> None:
        again, self._joined = self._joined, False
        for version in self._roll_back_to:
            self._folder.set_back(version)
        if again and (line := choose(self._folder.path / CHECKPOINTS).line):  # at first `run` has said it
            log.warning("%s", line)


# --- how a run has ended


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a run that made all its steps and ended well; None: there is something left to do."""
    with suppress(OSError, DistillError, KeyError, TypeError):
        summary = read_summary(config.run_dir)
        ended_well = summary["completed"] and not summary["error"] and not summary["problems"]
        exported = config.controller.trainer != "launch" or (config.run_dir / "final").is_dir()
        if ended_well and exported and summary["steps"] >= config.run.steps:
            return summary
    return None


def describe(config: RunConfig, summary: dict[str, Any], stopped_by: str, say: Callable[[str], None]) -> None:
    """Write the card of the exported model, and the page; what cannot be written is said: the run is over."""
    folder, final = config.run_dir, config.run_dir / "final"
    try:
        if not stopped_by and final.is_dir():
            write_card(final, config, summary, summary["version"])
    except (OSError, DistillError) as error:
        say(f"no card in {final}: {error}")
    try:
        if summary["steps"] or summary["evaluations"]:
            write_page([folder], folder / REPORT)
    except (OSError, DistillError) as error:  # such as figures from before a resume, of an earlier version
        say(f"no {REPORT}: {error}")


def check_end(config: RunConfig, summary: dict[str, Any], stopped_by: str) -> None:
    """Raises RemoteError for a run that failed, Interrupted for one that was stopped."""
    if summary["error"]:
        raise RemoteError(f"{summary['error']}; fix it, then go on with --resume")
    if stopped_by:
        saved = _saved(config, summary["steps"])
        raise Interrupted(
            f"stopped by {stopped_by} at step {summary['steps']}; "
            + "; ".join([f"{saved}: go on with --resume", *summary["problems"]])
        )


def _saved(config: RunConfig, steps: int) -> str:
    """What a resume goes on from, and which steps a trainer that was killed makes again."""
    if config.controller.trainer != "launch" or not steps:
        return f"{config.run_dir} holds {'the run' if steps else 'no step yet'}"
    try:
        path = choose(config.run_dir / CHECKPOINTS).path
    except DataError as error:
        return str(error)
    step = Version.parse(path.name).step if path else 0
    again = f"step{'s' * (steps - step > 1)} {step + 1}" + f" to {steps}" * (steps - step > 1)
    rest = f", {again} of the trainer, which outlasted run.grace_seconds, will be made again" * (step < steps)
    return f"{path or 'no checkpoint'} is saved{rest}"
