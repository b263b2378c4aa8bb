"""What each role of a run is started with, and where it is then found."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from distill.aio import look_seconds
from distill.config import RunConfig
from distill.launch import student
from distill.launch.ports import Ports
from distill.launch.run_folder import RunFolder
from distill.launch.supervise import ChildSpec
from student_trainer import launch as trainer_launch
from student_trainer.config import TrainerConfig
from sync import secrets as hidden
from sync.errors import ConfigError
from sync.listening import NCCL_ON_LOOPBACK, ON_LOOPBACK
from sync.replica.config import ReplicaConfig
from sync.settings import ModelSource, Placement
from sync.transport import TOKEN_VARIABLE, is_loopback, token_from_environment
from teacher_service.engines.gpu_slots import GpuSlotsConfig

TRAINER, EVALUATOR = "trainer", "evaluator"


@dataclass
class Plan:
    """Where the servers of a run are, and which processes this launcher starts for them."""

    replicas: dict[str, str] = field(default_factory=dict)
    """Name → URL."""
    teachers: dict[str, list[str]] = field(default_factory=dict)
    """Name → a URL for each of its processes."""
    evaluator: str | None = None
    children: list[ChildSpec] = field(default_factory=list)


def plan_servers(config: RunConfig, folder: RunFolder, token: str | None, ports: Ports) -> Plan:
    """Replicas, teachers and the evaluator; files for those that are started here are written.

    Raises ConfigError for ports in use and for placements that do not fit.
    """
    plan = Plan()
    for name, url, child in _students(config, folder, ports):
        plan.replicas[name] = url
        plan.children += child
    for name, url, child in _teachers(config, folder, ports):
        plan.teachers.setdefault(name, []).append(url)
        plan.children += child
    for url, child in _evaluator(config, folder, ports):
        plan.evaluator = url
        plan.children += child
    plan.children = [_in_run(child, config, token) for child in plan.children]
    return plan


def token_of(config: RunConfig) -> str | None:
    """The bearer token of a run: the environment's, else one that is made for it when all of it is here."""
    return token_from_environment() or (secrets.token_urlsafe(32) if _is_local(config) else None)


def _is_local(config: RunConfig) -> bool:
    """Whether every role is started by this launcher and listens on loopback."""
    placements: list[Placement] = [config.student, *config.teachers.values()]
    if config.evaluation is not None:
        placements.append(config.evaluation.placement)
    hosts = [placement.host for placement in placements] + [config.controller.host]
    external = config.controller.trainer == "external" or config.trainer.hostfile is not None
    return not external and not any(p.urls for p in placements) and all(map(is_loopback, hosts))


def trainer_config(config: RunConfig, controller_url: str) -> TrainerConfig:
    """What the trainer's ranks are started with."""
    source = {name: getattr(config.student, name) for name in ModelSource.model_fields}
    return TrainerConfig(
        run=config.run.name,
        run_dir=config.run_dir,
        controller_url=controller_url,
        student=ModelSource(**source),
        objective=config.objective,
        trainer=config.trainer,
        weights=config.weights,
        steps=config.run.steps,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        heartbeat_seconds=look_seconds(config.run.health_timeout_seconds),
    )


def trainer_child(config: RunConfig, folder: RunFolder, controller_url: str, token: str | None) -> ChildSpec:
    """The deepspeed launcher of all ranks; its exit status 0 is an orderly end."""
    settings = trainer_config(config, controller_url)
    argv, env = trainer_launch.command(settings, folder.write_role(TRAINER, settings))
    return _in_run(ChildSpec(TRAINER, argv, env, ends=True), config, token)


def replica_config(config: RunConfig, index: int) -> ReplicaConfig:
    """What replica `index` must know besides vLLM's arguments."""
    return followed(config, f"student-{index}")


def followed(config: RunConfig, mirror: str) -> ReplicaConfig:
    """The run's weights for one process that follows them into a mirror of its own."""
    return ReplicaConfig(
        run=config.run.name,
        store=config.weights.store,
        store_path=config.run_dir / "store",
        mirror=config.run_dir / "mirrors" / mirror,
        lora_rank=config.trainer.lora.rank if config.trainer.lora else None,
        timeout_seconds=config.weights.timeout_seconds,
    )


def student_child(config: RunConfig, index: int, host: str, port: int) -> ChildSpec:
    """Replica `index` on host:port."""
    argv, env = student.command(config.student, replica_config(config, index), index, host, port)
    return ChildSpec(f"student-{index}", argv, env, url=url_of(host, port))


def teacher_child(config: RunConfig, name: str, index: int, path: Path, host: str, port: int) -> ChildSpec:
    """Process `index` of the teacher called `name`, whose TeacherConfig is at `path`."""
    place = config.teachers[name]
    argv = _module("teacher_service", path, host, port) + ["--name", name, "--index", str(index)]
    label = f"teacher-{name}" if place.replicas == 1 else f"teacher-{name}-{index}"
    environment = _environment(place, index, label) | hidden.environment(place.model_dump(mode="json"))
    if place.follow_student_every is not None:
        environment |= followed(config, f"teacher-{name}-{index}").environment()
    if place.idle_unload_seconds is not None and config.run.max_loaded_teachers is not None:
        slots = GpuSlotsConfig(folder=config.run_dir / "seats", slots=config.run.max_loaded_teachers)
        environment |= slots.environment()
    return ChildSpec(label, argv, environment, url=url_of(host, port))


def evaluator_child(config: RunConfig, path: Path, host: str, port: int) -> ChildSpec:
    """The evaluator whose RunConfig, this one, is at `path`."""
    assert config.evaluation is not None, "there is one only with an evaluation"
    argv = _module("distill.evaluation.service", path, host, port)
    env = _environment(config.evaluation.placement, 0, EVALUATOR)
    env |= hidden.environment(config.model_dump(mode="json"))
    return ChildSpec(EVALUATOR, argv, env, url=url_of(host, port))


def url_of(host: str, port: int) -> str:
    """How this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


Started = tuple[str, str, list[ChildSpec]]
"""Name, URL, and the process to start for it (none: it runs already)."""


def _students(config: RunConfig, folder: RunFolder, ports: Ports) -> Iterator[Started]:
    place = config.student
    for index, url in enumerate(place.urls):
        yield f"student-{index}", url, []
    for index in range(0 if place.urls else place.replicas):
        port = ports.take(place.host, place.port + index if place.port else 0, "student.port")
        child = student_child(config, index, place.host, port)
        folder.write_role(child.name, replica_config(config, index))
        yield child.name, str(child.url), [child]


def _teachers(config: RunConfig, folder: RunFolder, ports: Ports) -> Iterator[Started]:
    for name, place in config.teachers.items():
        for url in place.urls:
            yield name, url, []
        if place.urls:
            continue
        path = folder.write_role(f"teacher-{name}", place)
        for index in range(place.replicas):
            port = ports.take(place.host, place.port + index if place.port else 0, f"teachers.{name}.port")
            child = teacher_child(config, name, index, path, place.host, port)
            yield name, str(child.url), [child]


def _evaluator(config: RunConfig, folder: RunFolder, ports: Ports) -> Iterator[tuple[str, list[ChildSpec]]]:
    if config.evaluation is None:
        return
    place = config.evaluation.placement
    if place.urls:
        yield place.urls[0], []
        return
    path = folder.write_role(EVALUATOR, config)
    port = ports.take(place.host, place.port, "evaluation.placement.port")
    child = evaluator_child(config, path, place.host, port)
    yield str(child.url), [child]


def _module(module: str, path: Path, host: str, port: int) -> list[str]:
    return [sys.executable, "-m", module, "--config", str(path), "--host", host, "--port", str(port)]


def _environment(place: Placement, index: int, label: str) -> dict[str, str]:
    near = ON_LOOPBACK if is_loopback(place.host) else {}
    environment = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false", **near, **place.env}
    if place.devices:
        if index >= len(place.devices):
            raise ConfigError(
                f"{label}: devices has {len(place.devices)} entries and this is process {index}: "
                "give one entry for each"
            )
        environment["CUDA_VISIBLE_DEVICES"] = place.devices[index]
    return environment


def _in_run(child: ChildSpec, config: RunConfig, token: str | None) -> ChildSpec:
    """With the run's token, and its sockets on loopback where all of the run is."""
    near = NCCL_ON_LOOPBACK if _is_local(config) else {}
    return replace(child, env={**near, **child.env, **({TOKEN_VARIABLE: token} if token else {})})
