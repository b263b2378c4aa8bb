"""The processes of a run: command line, environment and address of every role.

`plan_servers` plans a whole run. Files that a role is started with go to roles/ in the run's folder of this
machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from distill.aio import look_seconds
from distill.config import RunConfig, StudentConfig, places_of
from distill.environments.config import EnvironmentService
from distill.launch import replica_command
from distill.launch.placement import TRAINER
from distill.launch.run_folder import write_role
from distill.launch.supervise import ChildSpec
from student_trainer import launch as trainer_launch
from student_trainer.config import TrainerConfig
from sync.base import secrets as hidden
from sync.base.address import TOKEN_VARIABLE, Address, Place, is_loopback, token_from_environment
from sync.base.errors import ConfigError
from sync.base.memory import allocator
from sync.base.settings import ModelSource, Placement, Settings
from sync.wire.server import NCCL_ON_LOOPBACK, ON_LOOPBACK, bind_alone
from teacher_service.engines.reload import GpuSlotsConfig

EVALUATOR, EVALUATION_REPLICA = "evaluator", "evaluation-replica"
CONTROLLER = "controller"
Relay = Callable[[str, str], str]
"""(role, its URL) → the URL through which its clients reach it."""


def direct(role: str, url: str) -> str:
    """Return the URL itself: there is no relay."""
    return url


class Ports:
    """Hands out ports, none twice. Use inside `with` for as long as servers are started on them.

    A port is held from its choice on, by a socket that never listens. A server of the same user joins it with
    SO_REUSEPORT (`sync.wire.server.join_port`); for everybody else it is in use, also during a restart.
    """

    def __init__(self, keep_through_exec: bool = False, only: int = 0) -> None:
        """`keep_through_exec`: hold them until the program ends that replaces this one. `only`: the one port
        to take, whatever is asked for; 0: as asked."""
        self._held: list[socket.socket] = []
        self._keep, self._only = keep_through_exec, only

    def take(self, host: str, port: int, key: str) -> int:
        """`port`, or any free one for 0. Raises ConfigError, naming setting `key`, when it is in use."""
        port = self._only or port
        try:
            listener = bind_alone(host, port)
        except (OSError, OverflowError) as error:
            reason = f"cannot listen on {host} port {port} ({error}): choose an address of this machine"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = f"port {port} of {host} is in use: choose another one, or 0 for any free one"
            raise ConfigError(f"{key}: {reason}") from None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        number = int(listener.getsockname()[1])
        if self._keep:
            os.set_inheritable(listener.detach(), True)
        else:
            self._held.append(listener)
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._held:
            listener.close()


@dataclass
class Plan:
    """Where the servers of a run are, and which processes this launcher starts for them."""

    replicas: dict[str, Place] = field(default_factory=dict)
    teachers: dict[str, list[Place]] = field(default_factory=dict)
    """Name → of each of its processes."""
    environments: dict[str, list[Place]] = field(default_factory=dict)
    """As `teachers`."""
    evaluator: Place | None = None
    children: list[ChildSpec] = field(default_factory=list)
    expected: Mapping[str, Address] = field(default_factory=dict)
    """Those of the addresses that register, by the name of their process."""


def plan_of(config: RunConfig, places: Mapping[str, Place]) -> Plan:
    """Where all servers are: by `urls`, else at `places`, by the names of their processes."""
    names = config.processes()

    def of(section: str, urls: Sequence[str]) -> list[Place]:
        return places_of(names.get(section, ()), urls, places)

    evaluation = config.evaluation
    return Plan(
        {f"student-{i}": place for i, place in enumerate(of("student", config.student.urls))},
        {name: of(f"teachers.{name}", teacher.urls) for name, teacher in config.teachers.items()},
        {
            name: of(f"environments.{name}", environment.urls)
            for name, environment in config.environments.items()
        },
        next(iter(of("evaluation.placement", evaluation.placement.urls)), None) if evaluation else None,
    )


def plan_servers(config: RunConfig, token: str | None, ports: Ports, relay: Relay = direct) -> Plan:
    """Plan replicas, teachers, environments and the evaluator, and write what those started here read.

    `relay`: what the controller reaches those through. Raises ConfigError for ports in use and for placements
    that do not fit.
    """
    here = config.processes()
    children = [student_child(config, i, ports) for i in range(len(here.get("student", ())))]
    for name in config.teachers:
        names = here.get(f"teachers.{name}", ())
        children += [teacher_child(config, name, i, ports) for i in range(len(names))]
    for name in config.environments:
        names = here.get(f"environments.{name}", ())
        children += [environment_child(config, name, i, ports) for i in range(len(names))]
    if "evaluation.replica" in here:
        children.append(evaluation_replica(config, ports))
    places: dict[str, Place] = {child.name: child.url for child in children if child.url}
    if "evaluation.placement" in here:
        children.append(evaluator_child(with_urls(config, places), ports))
        places[EVALUATOR] = children[-1].url or ""
    plan = plan_of(config, {name: relay(name, str(place)) for name, place in places.items()})
    plan.children = [_in_run(child, config, token) for child in children]
    return plan


def with_urls(config: RunConfig, places: Mapping[str, Place]) -> RunConfig:
    """What the evaluator is started with: teachers, environments, and its own replica, where they are."""
    names = config.processes()

    def reached(section: str, place: Placement) -> Placement:
        if section in ("student", "evaluation.placement"):
            return place
        urls = [str(url) for url in places_of(names.get(section, ()), place.urls, places)]
        return place.model_copy(update={"urls": urls})

    return config.with_places(reached)


def token_of(config: RunConfig) -> str | None:
    """The bearer token of a run: the environment's, else a new one when every role is started by it."""
    makes_token = _is_local(config) or config.cluster.type in ("slurm", "ray")
    return token_from_environment() or (secrets.token_urlsafe(32) if makes_token else None)


def _is_local(config: RunConfig) -> bool:
    placements = config.places().values()
    hosts = [placement.host for placement in placements] + [config.controller.host]
    external = config.controller.trainer == "external" or config.trainer.hostfile is not None
    external |= config.cluster.type != "local"
    return not external and not any(p.urls for p in placements) and all(map(is_loopback, hosts))


def _in_run(child: ChildSpec, config: RunConfig, token: str | None) -> ChildSpec:
    """With the run's token, and its sockets on loopback where all of the run is."""
    near = NCCL_ON_LOOPBACK if _is_local(config) else {}
    return replace(child, env={**near, **child.env, **({TOKEN_VARIABLE: token} if token else {})})


@contextlib.contextmanager
def temporary(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with a run folder that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="distill-") as root:
        moved = config.run.model_copy(update={"folder": Path(root)})
        student = config.student.model_copy(update={"mirror_folder": None})
        yield config.model_copy(update={"run": moved, "student": student})


# --- one process


def role_words(section: str, index: str) -> list[str]:
    """The `distill` command that serves process `index` of a section, and its options."""
    kind, _, name = section.partition(".")
    match kind:
        case "student":
            return ["student", "--index", index]
        case "teachers" | "environments":
            return [kind.removesuffix("s"), "--name", name, "--index", index]
    return ["student", "--evaluation"] if name == "replica" else ["evaluator"]


def student_child(config: RunConfig, index: int, ports: Ports) -> ChildSpec:
    """Replica `index`."""
    return _replica(config, config.student, f"student-{index}", index, "student", ports)


def evaluation_replica(config: RunConfig, ports: Ports) -> ChildSpec:
    """The replica that generates for evaluations alone: as the student's, in a place of its own."""
    place = config.evaluation.replica if config.evaluation else None
    assert place is not None, "it is configured"
    update = {**dict(place), "env": {**config.student.env, **place.env}}
    there = config.student.model_copy(update=update)
    return _replica(config, there, EVALUATION_REPLICA, 0, "evaluation.replica", ports)


def _replica(
    config: RunConfig, place: StudentConfig, name: str, index: int, key: str, ports: Ports
) -> ChildSpec:
    """`key`: the section of `place`."""
    port, settings = _port(place, index, key, ports), config.subscriber(name)
    write_role(config.run_dir, name, settings)
    argv, env = replica_command.command(place, settings, index, place.host, port)
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


def environment_child(config: RunConfig, name: str, index: int, ports: Ports) -> ChildSpec:
    """Process `index` of the environment called `name`, by the interpreter that has its packages."""
    place, label = config.environments[name], f"environment-{name}"
    settings = EnvironmentService(
        name=name,
        run=config.run.name,
        environment=place,
        student=_model(config.student),
        stop_token_ids=config.rollout.stop_token_ids,
    )
    path = write_role(config.run_dir, label, settings)
    label = label if place.processes == 1 else f"{label}-{index}"
    child = _server("distill.environments.service", path, place, index, f"environments.{name}", label, ports)
    env = {"OMP_NUM_THREADS": str(place.threads), **child.env, **_secrets(settings)}
    argv = [*child.argv, "--index", str(index)]
    if place.python is not None:
        paths = [str(_packages(path.parent)), env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        argv[0] = str(place.python)
    return replace(child, argv=argv, env=env)


def _packages(folder: Path) -> Path:
    """A folder with links to this project's packages alone, for an interpreter that lacks them."""
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    for name in ("distill", "sync"):
        link, target = packages / name, Path(__file__).parents[2] / name
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return packages


def evaluator_child(config: RunConfig, ports: Ports, controller: str | None = None) -> ChildSpec:
    """The evaluator; `controller`: says where the servers without `urls` are."""
    assert config.evaluation is not None, "there is one only with an evaluation"
    path, place = write_role(config.run_dir, EVALUATOR, config), config.evaluation.placement
    child = _server("distill.evaluation.service", path, place, 0, "evaluation.placement", EVALUATOR, ports)
    argv = child.argv if controller is None else [*child.argv, "--controller", controller]
    return replace(child, argv=argv, env={**child.env, **_secrets(config)})


def _server(
    module: str, path: Path, place: Placement, index: int, key: str, label: str, ports: Ports
) -> ChildSpec:
    """A process of ours that serves with the settings in `path`; `key`: the section of `place`."""
    port = _port(place, index, key, ports)
    argv = [sys.executable, "-m", module, "--config", str(path), "--host", place.host, "--port", str(port)]
    env = {
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **allocator(),
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


def trainer_process(config: RunConfig, controller_url: str, node: int = 0) -> ChildSpec:
    """The deepspeed launcher of the ranks on machine `node`; exit status 0 is its orderly end."""
    by_broadcast = config.weights.transport == "broadcast"
    settings = TrainerConfig(
        run=config.run.name,
        run_dir=config.run_dir,
        controller_url=controller_url,
        student=_model(config.student),
        objective=config.objective,
        trainer=config.trainer,
        weights=config.weights,
        keep_every=config.evaluation.every if by_broadcast and config.evaluation else None,
        steps=config.run.steps,
        temperature=config.rollout.temperature,
        stop_token_ids=config.rollout.stop_token_ids,
        seed=config.run.seed,
        heartbeat_seconds=look_seconds(config.run.health_timeout_seconds),
    )
    argv, env = trainer_launch.command(settings, write_role(config.run_dir, TRAINER, settings), node)
    return ChildSpec(TRAINER, argv, env, ends=True)


def _model(source: ModelSource) -> ModelSource:
    return ModelSource(**{name: getattr(source, name) for name in ModelSource.model_fields})


def url_of(host: str, port: int) -> str:
    """How this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def _port(place: Placement, index: int, key: str, ports: Ports) -> int:
    return ports.take(place.host, place.port + index if place.port else 0, f"{key}.port")
