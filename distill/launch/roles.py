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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from distill.aio import look_seconds
from distill.config import RunConfig
from distill.environments.config import EnvironmentConfig, EnvironmentService
from distill.launch import replica_command
from distill.launch.run_folder import write_role
from distill.launch.supervise import ChildSpec
from distill.topology import TRAINER, Process, command, places, servers
from student_trainer import launch as trainer_launch
from student_trainer.config import TrainerConfig
from sync.base import secrets as hidden
from sync.base.address import TOKEN_VARIABLE, Address, Place, is_loopback, token_from_environment
from sync.base.errors import ConfigError
from sync.base.memory import THREADS, sharing
from sync.base.settings import ModelSource, Placement, Settings
from sync.wire.peers import Role
from sync.wire.server import NCCL_ON_LOOPBACK, ON_LOOPBACK, hold_port
from teacher_service.config import TeacherConfig
from teacher_service.engines.reload import GpuSlotsConfig


class Ports(contextlib.ExitStack):
    """Hands out ports, none twice. Use inside `with` for as long as servers are started on them.

    A port is held from its choice on, by a socket that never listens. A server of the same user joins it with
    SO_REUSEPORT (`sync.wire.server.join_port`); for everybody else it is in use, also during a restart.
    """

    def __init__(self, only: int = 0) -> None:
        """`only`: the one port to take, whatever is asked for; 0: as asked."""
        super().__init__()
        self._only = only

    def take(self, host: str, port: int, key: str) -> int:
        """`port`, or any free one for 0. Raises ConfigError, naming setting `key`, when it is in use."""
        port = self._only or port
        try:
            listener = self.enter_context(hold_port(host, port))
        except (OSError, OverflowError) as error:
            reason = f"cannot listen on {host} port {port} ({error}): choose an address of this machine"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                reason = f"port {port} of {host} is in use: choose another one, or 0 for any free one"
            raise ConfigError(f"{key}: {reason}") from None
        return int(listener.getsockname()[1])


DISTILL: Final = (sys.executable, "-P", "-m", "distill.cli.main")
"""What the words of a command follow; no file of the working folder stands in for a module."""


@dataclass
class Plan:
    """Where the servers of a run are, and which processes this launcher starts for them."""

    where: Mapping[str, Sequence[Place]]
    """Section → of each of its processes, as `topology.places` has them."""
    children: list[ChildSpec] = field(default_factory=list)
    expected: Mapping[str, Address] = field(default_factory=dict)
    """Those of the addresses that register, by the name of their process."""


def plan_servers(config: RunConfig, token: str | None, ports: Ports, role: Role | None = None) -> Plan:
    """Plan the servers that are started here, or those of a `role` alone, and write what they read.

    Raises ConfigError for ports in use and for placements that do not fit.
    """
    children, at = list[ChildSpec](), dict[str, Place]()
    for process in servers(config):
        if role not in (None, process.role):
            continue
        there = with_urls(config, at) if process.role == Role.EVALUATOR else config
        children.append(child := server(there, process, ports))
        at[child.name] = child.url or ""
    return Plan(places(config, at), [_in_run(child, config, token) for child in children])


def with_urls(config: RunConfig, at: Mapping[str, Place]) -> RunConfig:
    """What the evaluator is started with: teachers, environments, and its own replica, where they are."""
    where = places(config, at)

    def reached(section: str, place: Placement) -> Placement:
        if section in ("student", "evaluation.placement"):
            return place
        return place.model_copy(update={"urls": [str(url) for url in where[section]]})

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
        yield config.with_(run={"folder": Path(root)}, student={"mirror_folder": None})


# --- one process


def server(config: RunConfig, process: Process, ports: Ports, controller: str | None = None) -> ChildSpec:
    """The command line of a server; what it reads is written into the run's folder.

    `controller`: tells the evaluator where the servers without `urls` are.
    """
    assert process.role is not None, "the trainer serves nothing"
    child = STARTERS[process.role](config, process, ports)
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(process.devices)} if process.devices is not None else {}
    told = ["--controller", controller] if controller is not None else []
    return replace(child, argv=[*child.argv, *told], env={**gpus, **child.env})


def _replica(config: RunConfig, process: Process, ports: Ports) -> ChildSpec:
    """One that generates for evaluations alone is as the student's, in a place of its own."""
    name, index, place = process.name, process.index, config.student
    if process.section != "student" and process.place:
        there = dict(process.place)
        env = place.env if there["threads"] is None else {**place.env, THREADS: str(there["threads"])}
        there |= {"threads": there["threads"] or place.threads, "env": {**env, **there["env"]}}
        place = place.model_copy(update=there)
    port, settings = _port(place, process, ports), config.subscriber(name)
    write_role(config.run_dir, name, settings)
    argv, env = replica_command.command(place, settings, index, place.host, port)
    return ChildSpec(name, argv, env, url=url_of(place.host, port))


def _teacher(config: RunConfig, process: Process, ports: Ports) -> ChildSpec:
    place, run, name = process.place, config.run, process.subject
    assert isinstance(place, TeacherConfig), "the section of a teacher"
    kept = place.keep_folder or config.run_dir / "scores" / name
    settings = place.model_copy(update={"keep_folder": kept})
    env: dict[str, str] = {}
    if process.follows:
        env |= config.subscriber(f"{process.label}-{process.index}").environment()
    if place.idle_unload_seconds is not None and run.max_loaded_teachers is not None:
        env |= GpuSlotsConfig(folder=config.run_dir / "slots", slots=run.max_loaded_teachers).environment()
    child = _server(config, "teacher_service", settings, process, ports)
    argv = [*child.argv, "--name", name, "--index", str(process.index)]
    return replace(child, argv=argv, env={**child.env, **env})


def _environment(config: RunConfig, process: Process, ports: Ports) -> ChildSpec:
    """By the interpreter that has its packages."""
    place = process.place
    assert isinstance(place, EnvironmentConfig), "the section of an environment"
    settings = EnvironmentService(
        name=process.subject,
        run=config.run.name,
        environment=place,
        student=_model(config.student),
        stop_token_ids=config.rollout.stop_token_ids,
    )
    child = _server(config, "distill.environments.service", settings, process, ports)
    argv, env = [*child.argv, "--index", str(process.index)], {**child.env}
    if place.python is not None:
        packages = str(_packages(config.run_dir / "roles"))
        paths = [packages, env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        argv[0] = str(place.python)
    return replace(child, argv=argv, env=env)


def _evaluator(config: RunConfig, process: Process, ports: Ports) -> ChildSpec:
    return _server(config, "distill.evaluation.service", config, process, ports)


STARTERS: Final = {
    Role.STUDENT: _replica,
    Role.TEACHER: _teacher,
    Role.ENVIRONMENT: _environment,
    Role.EVALUATOR: _evaluator,
}
"""What makes the command line of a server."""


def _packages(folder: Path) -> Path:
    """A folder with links to this project's packages alone, for an interpreter that lacks them."""
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    for name in ("distill", "sync"):
        link = packages / f".{name}.{socket.gethostname()}.{os.getpid()}"  # others make theirs meanwhile
        link.unlink(missing_ok=True)
        link.symlink_to(Path(__file__).parents[2] / name)
        link.replace(packages / name)
    return packages


def _server(config: RunConfig, module: str, settings: Settings, process: Process, ports: Ports) -> ChildSpec:
    """A process of ours that serves with these settings."""
    place = process.place
    assert place is not None, "a server has a place"
    path, port = write_role(config.run_dir, process.label, settings), _port(place, process, ports)
    argv = [sys.executable, "-m", module, "--config", str(path), "--host", place.host, "--port", str(port)]
    env = {
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **sharing(place.threads),
        **(ON_LOOPBACK if is_loopback(place.host) else {}),
        **place.env,
        **hidden.environment(settings.model_dump(mode="json")),
    }
    return ChildSpec(process.name, argv, env, url=url_of(place.host, port))


def trainer_child(config: RunConfig, controller_url: str, token: str | None) -> ChildSpec:
    """The trainer of a run that this launcher starts; of several machines the first, to meet the others."""
    if config.trainer.nodes == 1:
        return _in_run(trainer_process(config, controller_url), config, token)
    words = [*role_words(config, TRAINER), "--controller", controller_url, "--node", "0"]
    env = hidden.environment(config.model_dump(mode="json"))
    return _in_run(ChildSpec(TRAINER, [*DISTILL, *words], env, ends=True), config, token)


def role_words(config: RunConfig, section: str, index: int = 0) -> list[str]:
    """The words of the `distill` command that runs a process, with the run's folder."""
    name, *options = command(section, index)
    return [name, str(config.run_dir), *options]


def trainer_process(
    config: RunConfig, controller_url: str, node: int = 0, meeting: str | None = None
) -> ChildSpec:
    """The deepspeed launcher of the ranks on machine `node`; exit status 0 is its orderly end. `meeting`: URL
    of machine 0, where those of several machines meet."""
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
    file = write_role(config.run_dir, TRAINER, settings)
    argv, env = trainer_launch.command(settings, file, node, meeting)
    return ChildSpec(TRAINER, argv, env, ends=True)


def _model(source: ModelSource) -> ModelSource:
    return ModelSource(**{name: getattr(source, name) for name in ModelSource.model_fields})


def url_of(host: str, port: int) -> str:
    """How this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def _port(place: Placement, process: Process, ports: Ports) -> int:
    return ports.take(place.host, place.port + process.index if place.port else 0, f"{process.section}.port")
