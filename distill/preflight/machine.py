"""`distill preflight`: whether this machine has room for a run, and with --engines whether its servers agree.

With engines every server is started, asked, and stopped; nothing is trained. What it leaves is in a temporary
folder that goes with it. The trainer is not started: a plain forward pass of the student stands in for it,
and a run compares the trainer itself at its first step.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from distill.config import RunConfig
from distill.evaluation.client import HttpEvaluator
from distill.launch.ports import Ports
from distill.launch.roles import Plan, plan_servers, token_of
from distill.launch.run_folder import RunFolder, check_disk
from distill.launch.supervise import Supervisor
from distill.preflight import engines as live
from distill.preflight.probes import Finding
from distill.prompts.held_out import PromptSplit
from distill.rollout.replica_client import HttpReplica
from distill.run_log.records import Opened
from distill.run_log.segments import read_all
from sync.claims import Claim
from sync.transport import token_from_environment
from sync.wire import RunIdentity
from teacher_service.client import TeacherClient
from teacher_service.router import load_transforms

GRACE_SECONDS = 10.0
"""For the servers to end by themselves."""


def check_machine(config: RunConfig) -> None:
    """Ports, devices and tokens of what is started here, and the disk of the run's folder.

    Raises ConfigError with what `distill run` would say.
    """
    path = config.run_dir
    check_disk(next(one for one in (path, *path.parents) if one.is_dir()), config.run.min_free_disk_gib)
    with _elsewhere(config) as (moved, folder), Ports() as ports:
        plan_servers(moved, folder, token_from_environment(), ports)
        if config.controller.port:
            ports.take(config.controller.host, config.controller.port, "controller.port")


@contextlib.contextmanager
def _elsewhere(config: RunConfig) -> Iterator[tuple[RunConfig, RunFolder]]:
    """The configuration in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="distill-preflight-") as root:
        run = config.run.model_copy(update={"folder": Path(root), "min_free_disk_gib": 0.0})
        config = config.model_copy(update={"run": run})
        with RunFolder.open(config, resume=False) as folder:
            yield config, folder


async def rehearse(config: RunConfig, split: PromptSplit, say: Callable[[Finding], None]) -> None:
    """Check with live engines. Raises ConfigError when a check failed, ChildFailed when a server did."""
    token = token_of(config)
    with _elsewhere(config) as (moved, folder), Ports() as ports:
        plan = plan_servers(moved, folder, token, ports)
        supervisor = Supervisor(plan.children, folder.logs, restarts=0)
        try:
            await supervisor.start()
            await supervisor.ready(moved.run.start_seconds)
            await _ask(moved, split, plan, token, say, claim_of(config))
        finally:
            await supervisor.stop(GRACE_SECONDS)


def claim_of(config: RunConfig) -> Claim:
    """The run as its servers know it.

    One that has not begun has no id: it claims no server, and those of any other run refuse it.
    """
    journal = config.run_dir / "journal"
    _, _, first = next(read_all(journal), (0, 0, None)) if journal.is_dir() else (0, 0, None)
    return Claim(RunIdentity(config.run.name, first.id if isinstance(first, Opened) else None))


async def _ask(
    config: RunConfig,
    split: PromptSplit,
    plan: Plan,
    token: str | None,
    say: Callable[[Finding], None],
    claim: Claim,
) -> None:
    teachers = {name: TeacherClient(name, urls, token, claim=claim) for name, urls in plan.teachers.items()}
    replicas = {name: HttpReplica(url, token, claim) for name, url in plan.replicas.items()}
    evaluator = HttpEvaluator(plan.evaluator, token, claim=claim) if plan.evaluator else None
    engines = live.Engines(teachers, evaluator, replicas, load_transforms(config.teachers))
    try:
        await live.check_engines(config, split, engines, say)
    finally:
        closing = [teacher.aclose() for teacher in teachers.values()]
        closing += [replica.aclose() for replica in replicas.values()]
        await asyncio.gather(*closing, *([evaluator.aclose()] if evaluator else []))
