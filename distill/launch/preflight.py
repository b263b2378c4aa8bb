"""`distill preflight`: what of a run can be checked here without training; servers of a command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from distill import translation
from distill.config import RunConfig
from distill.environments.client import EnvironmentClient
from distill.evaluation.schedule import HttpEvaluator
from distill.interfaces import Components
from distill.launch import replica_command
from distill.launch.roles import Plan, Ports, plan_servers, temporary, token_of
from distill.launch.supervise import ChildSpec, Supervisor
from distill.planning.threads import decide_threads
from distill.preflight_checks import engines as live
from distill.preflight_checks import machine
from distill.preflight_checks.checks import (
    Checked,
    check,
    check_environment,
    check_following,
    check_keys,
    check_parts,
    refuse,
)
from distill.preflight_checks.objective import with_objective
from distill.preflight_checks.probes import Finding
from distill.prompts.sources import PromptSplit, longest_sequence
from distill.published import check_store
from distill.record.store import RECORD, open_read_only
from distill.rollout.replica_client import HttpReplica, ReplicaEngine
from distill.topology import EVALUATION_REPLICA, Process, servers
from student_trainer.objectives.config import needs
from sync.base import secrets
from sync.base.address import token_from_environment
from sync.base.errors import ConfigError
from sync.weights.subscribe import check_local
from sync.wire import RunIdentity
from sync.wire.claims import Claim
from sync.wire.peers import Role
from sync.wire.server import check_bind
from teacher_service.router import Router

GRACE_SECONDS = 10.0


def prepare(config: RunConfig, say: Callable[[str], None], trains: bool = True) -> Checked:
    """Every check that starts nothing, in order; `say` gets what was chosen and computed.

    `trains`: it writes checkpoints and versions too. Raises ConfigError, DataError or StoreError.
    """
    checked = check(config)
    config, lines = decide_threads(checked.config) if trains else (checked.config, [])
    checked = checked._replace(config=config, lines=[*checked.lines, *lines])
    for line in checked.lines:
        say(line)
    if trains:
        disk = machine.estimate(config)
        machine.check_room(config, disk)
        if config.cluster.type != "external":  # else all that follow are elsewhere, and look for themselves
            check_local(config.mirrors)
        check_store(config)
        return checked._replace(machines=[*checked.machines, *machine.lines(config, disk)])
    return checked


def prepare_role(config: RunConfig, process: Process, registers: bool) -> RunConfig:
    """Of `prepare` what concerns one process, whose machine may lack the others' files; the configuration
    that it is started with. `registers`: the controller tells it where the other servers are.

    Raises ConfigError.
    """
    section, filled = process.section, [process.section]
    check_parts(config, [section])
    check_keys(config)
    computes = process.role != Role.ENVIRONMENT
    if config.run.precision == "fastest" and config.cluster.type == "local" and computes:
        raise ConfigError(
            'run.precision is "fastest", which a run decides before it starts its processes: name the run\'s '
            'folder in place of the file, or set run.precision = "as_set" and, for the run too, dtype of the '
            "models and bf16.enabled of DeepSpeed's file"
        )
    match process.role:
        case Role.EVALUATOR:
            others = {other.section for other in servers(config)} - {"student", "evaluation.placement"}
            if (missing := [f"{key}.urls" for key in config.places() if key in others]) and not registers:
                raise ConfigError(
                    f"the evaluator asks the other servers and starts none: set {', '.join(missing)}, or say "
                    "where the controller is, with which they register (--controller, or the run's folder)"
                )
            filled = ["prompts", "evaluation", *(f"{key}.urls" for key in config.places())]
        case Role.STUDENT:
            filled = []
        case None:
            filled = ["trainer", "objective"]
    refuse(
        f"{key} holds a secret, which the run's folder does not: name the run's file in its place, with "
        "--controller"
        for key in secrets.unfilled(config.model_dump(mode="json"))
        if f"{key}.".startswith(tuple(f"{part}." for part in filled))
    )
    if process.role in (Role.EVALUATOR, None) or (process.role == Role.TEACHER and process.follows):
        config = with_objective(config).config
    if process.role == Role.TEACHER:
        check_following(config, process.subject)
    if process.role == Role.ENVIRONMENT:
        refuse(check_environment(config, process.subject))
    if process.place is not None:
        check_bind(process.place.host, token_from_environment())
    return config


def check_machine(config: RunConfig) -> None:
    """Check ports, devices and tokens of what is started here. Raises ConfigError with what `distill run`
    would say."""
    with temporary(config) as moved, Ports() as ports:
        if config.cluster.type == "local":
            plan_servers(moved, token_from_environment(), ports)
        if config.controller.port:
            ports.take(config.controller.host, config.controller.port, "controller.port")


def check_here(config: RunConfig, command: str) -> None:
    """Raise ConfigError when the servers that `command` starts belong on other machines."""
    sections = dict.fromkeys(process.section for process in servers(config))
    if config.cluster.type != "local" and sections:
        raise ConfigError(
            f"cluster.type is {config.cluster.type!r}, and {command} starts servers on this machine alone "
            f"({', '.join(sections)}): give --set cluster.type=local when they fit here"
        )


def check_arguments(config: RunConfig) -> None:
    """Have vLLM read the arguments of replicas and teachers that are started here: seconds, to import it.

    Raises ConfigError with those that it does not take.
    """
    here, student = {process.section for process in servers(config)}, config.student
    flags, env = list[str](), dict[str, str]()
    if "student" in here:
        replica = config.subscriber("student-0")
        words, env = replica_command.command(student, replica, 0, student.host, student.port)
        flags = words[words.index("sync.vllm.plugin") + 1 :]
    engines = {
        f"teachers.{name}.engine_args": [*teacher.engine_args]
        for name, teacher in config.teachers.items()
        if teacher.runs_vllm and teacher.engine_args and f"teachers.{name}" in here
    }
    if not flags and not engines:
        return
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sync.vllm.arguments"],
        input=json.dumps({"flags": flags, "engines": engines}),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"vLLM cannot be asked about its arguments: {done.stderr.strip()[-2000:]}")
    refuse(line for line in done.stdout.splitlines() if ".engine_args: " in line)


async def run_preflight(config: RunConfig, split: PromptSplit, say: Callable[[Finding], None]) -> None:
    """Start every server, check the engines, and stop them; nothing is trained, no file stays.

    The trainer is not started: a plain forward pass of the student stands in for it, and a run compares the
    trainer itself at its first step. Raises ConfigError when a check failed, or for servers of a cluster,
    ChildFailed when a server failed.
    """
    check_here(config, "preflight --engines")
    with temporary(config) as moved:
        async with connected(moved, token_of(config), claim_of(config)) as engines:
            await live.check_engines(moved, split, engines, say)


def connect(config: RunConfig, plan: Plan, token: str | None, claim: Claim) -> live.Engines:
    """Clients of the servers of a plan."""
    where = plan.where
    replicas = {f"student-{i}": place for i, place in enumerate(where["student"])}
    if dedicated := where.get("evaluation.replica"):
        replicas[EVALUATION_REPLICA] = dedicated[0]
    teachers, transforms = translation.clients(config, where, token, claim)
    evaluator = next(iter(where.get("evaluation.placement", ())), None)
    return live.Engines(
        teachers,
        HttpEvaluator(evaluator, token, claim=claim) if evaluator else None,
        {name: HttpReplica(place, token, claim=claim) for name, place in replicas.items()},
        transforms,
        {
            name: EnvironmentClient(
                name, where[f"environments.{name}"], token, claim, section.call_timeout_seconds
            )
            for name, section in config.environments.items()
        },
    )


def components(
    config: RunConfig, clients: live.Engines, split: PromptSplit, claim: Claim, **more: Any
) -> Components:
    """What a controller works with; `more`: fields that a run and an evaluation have each in its own way."""
    return Components(
        replicas=dict(clients.replicas),
        teachers=dict(clients.teachers),
        route=Router(config.teachers).route,
        want=needs(config.objective, config.rollout.temperature),
        vocab_size=split.vocab_size,
        evaluator=clients.evaluator,
        transforms=dict(clients.transforms),
        environments=dict(clients.environments),
        context=longest_sequence(config),
        claim=claim,
        **more,
    )


async def disconnect(clients: live.Engines, *others: ReplicaEngine) -> None:
    """Close them, and `others`."""
    closing = [client.aclose() for client in (*clients.clients(), *others)]
    await asyncio.gather(*closing, return_exceptions=True)


@asynccontextmanager
async def connected(
    config: RunConfig, token: str | None, claim: Claim, say: Callable[[str], None] = lambda line: None
) -> AsyncIterator[live.Engines]:
    """Clients of a run's servers; those without `urls` are started here, and run meanwhile. `say` gets their
    names."""
    with Ports() as ports:
        plan = plan_servers(config, token, ports)
        say(f"starting {', '.join(child.name for child in plan.children)}")
        async with serving(plan.children, config.run_dir / "logs", config.run.start_seconds):
            engines = connect(config, plan, token, claim)
            try:
                yield engines
            finally:
                await disconnect(engines)


@asynccontextmanager
async def serving(children: Sequence[ChildSpec], logs: Path, seconds: float) -> AsyncIterator[Supervisor]:
    """Servers that answer /health, meanwhile. Raises ChildFailed when one does not within `seconds`."""
    supervisor = Supervisor(children, logs, restarts=0, start_seconds=seconds)
    try:
        await supervisor.start()
        await supervisor.ready()
        yield supervisor
    finally:
        await supervisor.stop(GRACE_SECONDS)


def claim_of(config: RunConfig) -> Claim:
    """The run as its servers know it; one that has not begun has no id and claims no server."""
    path, run_id = config.run_dir / RECORD, None
    if path.is_file():
        with closing(open_read_only(path)) as connection:
            run_id = connection.execute("SELECT max(id) FROM opening").fetchone()[0]
    return Claim(RunIdentity(config.run.name, run_id))
