"""The processes of a run: command line, environment and address of every role.

`plan_servers` plans a whole run; the functions at the end prepare one role that is joined to a controller by
URLs. Files that a role is started with go to roles/ in the run's folder of this machine.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from distill.aio import look_seconds
from distill.config import RunConfig
from distill.launch import replica_command
from distill.launch.run_folder import write_role
from distill.launch.supervise import ChildSpec
from distill.preflight_checks.checks import (
    check_following,
    check_model,
    check_secrets,
    check_transport,
    refuse,
)
from distill.preflight_checks.machine import runs_vllm
from distill.preflight_checks.objective import with_objective
from student_trainer import launch as trainer_launch
from student_trainer.config import TrainerConfig
from sync import secrets as hidden
from sync.client import TOKEN_VARIABLE, is_loopback, token_from_environment
from sync.errors import ConfigError
from sync.own_code import use_folder
from sync.server import NCCL_ON_LOOPBACK, ON_LOOPBACK, bind_alone, check_bind
from sync.settings import ModelSource, Placement, Settings
from teacher_service.engines.gpu_slots import GpuSlotsConfig

TRAINER, EVALUATOR, EVALUATION_REPLICA = "trainer", "evaluator", "evaluation-replica"
CONTROLLER = "controller"
Relay = Callable[[str, str], str]
"""(role, its URL) → the URL through which its clients reach it."""


def direct(role: str, url: str) -> str:
    """No relay."""
    return url


class Ports:
    """Hands out ports, none twice. Use inside `with` for as long as servers are started on them.

    A port is held from its choice on, by a socket that never listens. A server of the same user joins it with
    SO_REUSEPORT (`sync.server.join_port`); for everybody else it is in use, also during a restart.
    """

    def __init__(self, keep_through_exec: bool = False) -> None:
        """`keep_through_exec`: hold them until the program ends that replaces this one."""
        self._held: list[socket.socket] = []
        self._keep = keep_through_exec

    def take(self, host: str, port: int, key: str) -> int:
        """`port`, or any free one for 0. Raises ConfigError, naming setting `key`, when it is in use."""
        try:
            held = bind_alone(host, port)
        except (OSError, OverflowError) as error:
            reason = f"cannot listen on {host} port {port} ({error}): choose an address of this machine"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = f"port {port} of {host} is in use: choose another one, or 0 for any free one"
            raise ConfigError(f"{key}: {reason}") from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        number = int(held.getsockname()[1])
        if self._keep:
            os.set_inheritable(held.detach(), True)
        else:
            self._held.append(held)
        return number

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()


@dataclass
class Plan:
    """Where the servers of a run are, and which processes this launcher starts for them."""

    replicas: dict[str, str] = field(default_factory=dict)
    """Name → URL."""
    teachers: dict[str, list[str]] = field(default_factory=dict)
    """Name → a URL for each of its processes."""
    evaluator: str | None = None
    children: list[ChildSpec] = field(default_factory=list)

    def through(self, relay: Relay) -> Plan:
        """The same servers, those started here behind relays."""
        urls = {child.url: relay(child.name, child.url) for child in self.children if child.url}
        return Plan(
            {name: urls.get(url, url) for name, url in self.replicas.items()},
            {name: [urls.get(url, url) for url in all_] for name, all_ in self.teachers.items()},
            urls.get(self.evaluator or "", self.evaluator),
            self.children,
        )


def plan_servers(config: RunConfig, token: str | None, ports: Ports) -> Plan:
    """Plan replicas, teachers and the evaluator, and write the files that those started here read.

    Raises ConfigError for ports in use and for placements that do not fit.
    """
    plan, place, evaluation = Plan(), config.student, config.evaluation
    students = [] if place.urls else [student_child(config, i, ports) for i in range(place.replicas)]
    plan.replicas = {f"student-{i}": url for i, url in enumerate(place.urls or _urls(students))}
    plan.children += students
    for name, teacher in config.teachers.items():
        here = (
            [] if teacher.urls else [teacher_child(config, name, i, ports) for i in range(teacher.replicas)]
        )
        plan.teachers[name] = teacher.urls or _urls(here)
        plan.children += here
    if evaluation is not None and evaluation.placement.urls:
        plan.evaluator = evaluation.placement.urls[0]
    elif evaluation is not None:
        own = evaluation.replica
        if own is not None and not own.urls:
            plan.children.append(evaluation_replica(config, own, ports))
            own = own.model_copy(update={"urls": [plan.children[-1].url]})
        child = evaluator_child(_with_urls(config, plan.teachers, own), ports)
        plan.evaluator = child.url
        plan.children.append(child)
    plan.children = [_in_run(child, config, token) for child in plan.children]
    return plan


def _with_urls(config: RunConfig, teachers: Mapping[str, list[str]], own: Placement | None) -> RunConfig:
    """What the evaluator is started with: teachers, and its own replica, where they are."""
    assert config.evaluation is not None, "there is an evaluator"
    reached = {name: one.model_copy(update={"urls": teachers[name]}) for name, one in config.teachers.items()}
    evaluation = config.evaluation.model_copy(update={"replica": own})
    return config.model_copy(update={"teachers": reached, "evaluation": evaluation})


def _urls(children: list[ChildSpec]) -> list[str]:
    return [child.url for child in children if child.url]


def token_of(config: RunConfig) -> str | None:
    """The bearer token of a run: the environment's, else a new one when every role is on this machine."""
    return token_from_environment() or (secrets.token_urlsafe(32) if _is_local(config) else None)


def _is_local(config: RunConfig) -> bool:
    placements: list[Placement] = [config.student, *config.teachers.values()]
    if config.evaluation is not None:
        placements += [one for one in (config.evaluation.placement, config.evaluation.replica) if one]
    hosts = [placement.host for placement in placements] + [config.controller.host]
    external = config.controller.trainer == "external" or config.trainer.hostfile is not None
    return not external and not any(p.urls for p in placements) and all(map(is_loopback, hosts))


def _in_run(child: ChildSpec, config: RunConfig, token: str | None) -> ChildSpec:
    """With the run's token, and its sockets on loopback where all of the run is."""
    near = NCCL_ON_LOOPBACK if _is_local(config) else {}
    return replace(child, env={**near, **child.env, **({TOKEN_VARIABLE: token} if token else {})})


# --- one process


def student_child(config: RunConfig, index: int, ports: Ports) -> ChildSpec:
    """Replica `index`."""
    name, place = f"student-{index}", config.student
    port = _port(place, index, "student", ports)
    settings = config.subscriber(name)
    write_role(config.run_dir, name, settings)
    argv, env = replica_command.command(place, settings, index, place.host, port)
    return ChildSpec(name, argv, env, url=url_of(place.host, port))


def evaluation_replica(config: RunConfig, place: Placement, ports: Ports) -> ChildSpec:
    """The replica that generates for evaluations alone: as the student's, in a place of its own."""
    name, update = EVALUATION_REPLICA, {**dict(place), "env": {**config.student.env, **place.env}}
    student_there = config.student.model_copy(update=update)
    port, settings = _port(place, 0, "evaluation.replica", ports), config.subscriber(name)
    write_role(config.run_dir, name, settings)
    argv, env = replica_command.command(student_there, settings, 0, place.host, port)
    return ChildSpec(name, argv, env, url=url_of(place.host, port))


def teacher_child(config: RunConfig, name: str, index: int, ports: Ports) -> ChildSpec:
    """Process `index` of the teacher called `name`."""
    place, run = config.teachers[name], config.run
    label = f"teacher-{name}" if place.replicas == 1 else f"teacher-{name}-{index}"
    kept = place.keep_folder or config.run_dir / "scores" / name
    path = write_role(config.run_dir, f"teacher-{name}", place.model_copy(update={"keep_folder": kept}))
    env: dict[str, str] = {}
    if place.follow_student_every is not None:
        env |= config.subscriber(f"teacher-{name}-{index}").environment()
    if place.idle_unload_seconds is not None and run.max_loaded_teachers is not None:
        env |= GpuSlotsConfig(folder=config.run_dir / "slots", slots=run.max_loaded_teachers).environment()
    child = _server("teacher_service", path, place, index, f"teachers.{name}", label, ports)
    argv = [*child.argv, "--name", name, "--index", str(index)]
    return replace(child, argv=argv, env={**child.env, **_secrets(place), **env})


def evaluator_child(config: RunConfig, ports: Ports) -> ChildSpec:
    """The evaluator."""
    assert config.evaluation is not None, "there is one only with an evaluation"
    path, place = write_role(config.run_dir, EVALUATOR, config), config.evaluation.placement
    child = _server("distill.evaluation.service", path, place, 0, "evaluation.placement", EVALUATOR, ports)
    return replace(child, env={**child.env, **_secrets(config)})


def _server(
    module: str, path: Path, place: Placement, index: int, key: str, label: str, ports: Ports
) -> ChildSpec:
    """A process of ours that serves with the settings in `path`; `key`: the section of `place`."""
    port = _port(place, index, key, ports)
    argv = [sys.executable, "-m", module, "--config", str(path), "--host", place.host, "--port", str(port)]
    env = {
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(ON_LOOPBACK if is_loopback(place.host) else {}),
        **place.env,
        **replica_command.visible_devices(place, index, label),
    }
    return ChildSpec(label, argv, env, url=url_of(place.host, port))


def _secrets(settings: Settings) -> dict[str, str]:
    return hidden.environment(settings.model_dump(mode="json"))


def trainer_child(config: RunConfig, controller_url: str, token: str | None) -> ChildSpec:
    """The trainer of a run that this launcher starts."""
    return _in_run(trainer_process(config, controller_url), config, token)


def trainer_process(config: RunConfig, controller_url: str) -> ChildSpec:
    """The deepspeed launcher of all ranks; exit status 0 is its orderly end."""
    settings = TrainerConfig(
        run=config.run.name,
        run_dir=config.run_dir,
        controller_url=controller_url,
        student=ModelSource(**{name: getattr(config.student, name) for name in ModelSource.model_fields}),
        objective=config.objective,
        trainer=config.trainer,
        weights=config.weights,
        steps=config.run.steps,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        heartbeat_seconds=look_seconds(config.run.health_timeout_seconds),
    )
    argv, env = trainer_launch.command(settings, write_role(config.run_dir, TRAINER, settings))
    return ChildSpec(TRAINER, argv, env, ends=True)


def url_of(host: str, port: int) -> str:
    """How this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def _port(place: Placement, index: int, key: str, ports: Ports) -> int:
    return ports.take(place.host, place.port + index if place.port else 0, f"{key}.port")


# --- a role on its own: `distill student | teacher | evaluator | train`


def replace_process(child: ChildSpec) -> NoReturn:
    """Become this process; never returns."""
    os.execvpe(child.argv[0], list(child.argv), {**os.environ, **child.env})


def serve_student(config: RunConfig, index: int) -> ChildSpec:
    """Replica `index`, listening as [student] says."""
    use_folder(config.run.code_folder)
    check_model(config.student, "student", runs_vllm=True)
    check_secrets(config)
    return student_child(config, index, _ports(config.student))


def serve_teacher(config: RunConfig, name: str, index: int) -> ChildSpec:
    """Process `index` of teacher `name`; "" stands for the only one."""
    if not name and len(config.teachers) == 1:
        (name,) = config.teachers
    if name not in config.teachers:
        raise ConfigError(f"--name {name!r} is no teacher: choose one of {', '.join(config.teachers)}")
    place = config.teachers[name]
    use_folder(config.run.code_folder)
    check_secrets(config)
    check_model(place, f"teachers.{name}", runs_vllm(place))
    if place.follow_student_every is not None:
        check_following(with_objective(config).config, name)
    return teacher_child(config, name, index, _ports(place))


def serve_evaluator(config: RunConfig) -> ChildSpec:
    """The evaluator, listening as [evaluation.placement] says."""
    if config.evaluation is None:
        raise ConfigError("evaluation is off in this configuration: there is nothing to serve")
    use_folder(config.run.code_folder)
    refuse(check_transport(config))
    missing = _unreached_teachers(config)
    if (own := config.evaluation.replica) is not None and not own.urls:
        missing.append("evaluation.replica.urls")
    if missing:
        raise ConfigError(f"the evaluator asks the other servers and starts none: set {', '.join(missing)}")
    return evaluator_child(with_objective(config).config, _ports(config.evaluation.placement))


def _unreached_teachers(config: RunConfig) -> list[str]:
    return [f"teachers.{name}.urls" for name, teacher in config.teachers.items() if not teacher.urls]


def train(config: RunConfig, controller_url: str) -> ChildSpec:
    """The deepspeed launcher of all ranks, talking to the controller at that URL."""
    use_folder(config.run.code_folder)
    check_model(config.student, "student")
    check_secrets(config)
    return trainer_process(with_objective(config).config, controller_url)


def check_all_joined(config: RunConfig) -> None:
    """Raise ConfigError unless every role of the controller's configuration is reached by URL."""
    missing = [] if config.student.urls else ["student.urls"]
    missing += _unreached_teachers(config)
    if config.evaluation is not None and not config.evaluation.placement.urls:
        missing.append("evaluation.placement.urls (or evaluation = false)")
    if config.controller.trainer != "external":
        missing.append('controller.trainer = "external"')
    if missing:
        raise ConfigError(
            f"`distill control` starts no other role: set {', '.join(missing)}, or use `distill run`"
        )


def _ports(place: Placement) -> Ports:
    """Ports that the process which replaces this one goes on holding."""
    check_bind(place.host, token_from_environment())
    return Ports(keep_through_exec=True)
