"""`distill preflight`: what of a run can be checked here without training."""

from __future__ import annotations

from collections.abc import Callable

from distill.config import RunConfig
from distill.launch.roles import Ports, plan_servers, temporary, token_of
from distill.launch.run import connect, disconnect
from distill.launch.supervise import Supervisor
from distill.preflight_checks import engines as live
from distill.preflight_checks import machine
from distill.preflight_checks.probes import Finding
from distill.prompts.sources import PromptSplit
from distill.run_log.journal import read_all
from distill.run_log.records import Opened
from sync.address import token_from_environment
from sync.claims import Claim
from sync.subscribe import check_local
from sync.wire import RunIdentity

TEMPORARY_GRACE_SECONDS = 10.0


def check_machine(config: RunConfig) -> None:
    """Check ports, devices and tokens of what is started here, and the disks of the run and of mirrors.

    Raises ConfigError with what `distill run` would say.
    """
    machine.check_disk(config.run_dir, config.run.min_free_disk_gib)
    check_local(config.mirrors)
    with temporary(config) as moved, Ports() as ports:
        plan_servers(moved, token_from_environment(), ports)
        if config.controller.port:
            ports.take(config.controller.host, config.controller.port, "controller.port")


async def run_preflight(config: RunConfig, split: PromptSplit, say: Callable[[Finding], None]) -> None:
    """Start every server, check the engines, and stop them; nothing is trained, no file stays.

    The trainer is not started: a plain forward pass of the student stands in for it, and a run compares the
    trainer itself at its first step. Raises ConfigError when a check failed, ChildFailed when a server did.
    """
    token = token_of(config)
    with temporary(config) as moved, Ports() as ports:
        plan = plan_servers(moved, token, ports)
        supervisor = Supervisor(plan.children, moved.run_dir / "logs", restarts=0)
        engines = connect(moved, plan, token, claim_of(config))
        try:
            await supervisor.start()
            await supervisor.ready(moved.run.start_seconds)
            await live.check_engines(moved, split, engines, say)
        finally:
            await disconnect(engines)
            await supervisor.stop(TEMPORARY_GRACE_SECONDS)


def claim_of(config: RunConfig) -> Claim:
    """The run as its servers know it; one that has not begun has no id and claims no server."""
    journal = config.run_dir / "journal"
    _, first = next(read_all(journal), (None, None)) if journal.is_dir() else (None, None)
    return Claim(RunIdentity(config.run.name, first.id if isinstance(first, Opened) else None))
