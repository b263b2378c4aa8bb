"""The processes of a run, computed from its configuration alone.

Whoever starts, places, measures, asks or expects a process reads it here. A further kind of server is an
entry of `_kinds`, a place in `RunConfig.places` and a command line in `distill.launch.roles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from distill.config import RunConfig, flags_of
from sync.base.address import Place
from sync.base.settings import Placement
from sync.wire.peers import Role

TRAINER: Final = "trainer"
EVALUATOR, EVALUATION_REPLICA = "evaluator", "evaluation-replica"
CONTROLLER: Final = "controller"
HERE: Final = "here"
EACH_NODE: Final = "each trainer node"


@dataclass(frozen=True)
class Process:
    """One process of a run; the trainer is one on all of its machines."""

    name: str
    """Such as "student-0"."""
    gpus: int = 0
    """That it takes on each of its machines."""
    nodes: int = 1
    """Machines: above 1 for the trainer alone."""
    section: str = TRAINER
    """Its section of the configuration: student, teachers.NAME, environments.NAME, evaluation.replica,
    evaluation.placement or trainer."""
    label: str = TRAINER
    """Its name without the number."""
    index: int = 0
    """Among those of its section."""
    place: Placement | None = None
    """Its section, which says where it runs; None: the trainer's."""
    role: Role | None = None
    """What its URL leads to; None: it serves nothing."""
    url: str | None = None
    """Where it runs already; None: it is started, or registers."""
    host: str = HERE
    """Its machine: of its URL, of a cluster, EACH_NODE of the trainer's, else HERE."""
    devices: tuple[str, ...] | None = None
    """GPUs that its section names, or that its cluster gives it; None: it has those of its machine."""
    follows: bool = False
    """Whether it reads published weights."""

    @property
    def subject(self) -> str:
        """NAME of teachers.NAME; empty: its section has no name."""
        return self.section.partition(".")[2]


class _Kind(NamedTuple):
    """The processes of one section that are started or register."""

    label: str
    number: int
    gpus: int
    """Of each, unless its section says."""
    role: Role
    follows: bool = False


def _kinds(config: RunConfig) -> dict[str, _Kind]:
    student, evaluation = config.student, config.evaluation
    engine = prod(parallel(student.engine_args))
    kinds = {"student": _Kind("student", student.replicas, engine, Role.STUDENT, True)}
    for name, teacher in config.teachers.items():
        without = teacher.engine_url is not None or teacher.device == "cpu"
        gpus = 0 if without else prod(parallel(teacher.engine_args))
        follows = teacher.follow_student_every is not None
        kinds[f"teachers.{name}"] = _Kind(f"teacher-{name}", teacher.replicas, gpus, Role.TEACHER, follows)
    for name, environment in config.environments.items():
        label, number = f"environment-{name}", environment.processes
        kinds[f"environments.{name}"] = _Kind(label, number, 0, Role.ENVIRONMENT)
    if evaluation is not None:
        gpus = int(evaluation.device != "cpu")
        kinds["evaluation.replica"] = _Kind(EVALUATION_REPLICA, 1, engine, Role.STUDENT, True)
        kinds["evaluation.placement"] = _Kind(EVALUATOR, 1, gpus, Role.EVALUATOR, True)
    return kinds


def processes(config: RunConfig, gpus: bool = True) -> list[Process]:
    """Every process of a run but its controller, the trainer last.

    `gpus`: whether its machines have any; else a process has those that its section names or counts alone.
    """
    kinds, servers = _kinds(config), list[Process]()
    for section, place in config.places().items():
        label, number, usual, role, follows = kinds[section]
        several = section == "student" or (len(place.urls) or number) > 1
        taken = usual * gpus if place.gpus is None else place.gpus
        for index in range(len(place.urls) or number):
            url = place.urls[index] if place.urls else None
            devices = named(place.devices[index % len(place.devices)]) if place.devices else None
            servers.append(
                Process(
                    f"{label}-{index}" if several else label,
                    taken if devices is None else len(devices),
                    section=section,
                    label=label,
                    index=index,
                    place=place,
                    role=role,
                    url=url,
                    host=str(urlsplit(url).hostname) if url else HERE,
                    devices=devices,
                    follows=follows,
                )
            )
    trainer = config.trainer
    devices = None if trainer.devices is None else named(trainer.devices)
    elsewhere = config.controller.trainer == "external" or trainer.hostfile is not None or trainer.nodes > 1
    host = EACH_NODE if elsewhere else HERE
    return [*servers, Process(TRAINER, trainer.ranks * gpus, trainer.nodes, host=host, devices=devices)]


def process_of(config: RunConfig, section: str, index: int = 0) -> Process:
    """Process `index` of a section; beyond its last one, a further one of the kind."""
    *_, last = group = [process for process in processes(config) if process.section == section]
    if index < len(group):
        return group[index]
    return replace(last, name=f"{last.label}-{index}", index=index, devices=None)


def servers(config: RunConfig) -> list[Process]:
    """The servers that a run starts, or that register with it."""
    return [process for process in processes(config) if process.role and process.url is None]


def places(config: RunConfig, at: Mapping[str, Place]) -> dict[str, list[Place]]:
    """Section → where its servers are: their URLs, else `at` their names; one in neither is left out."""
    where: dict[str, list[Place]] = {section: [] for section in config.places()}
    for process in processes(config)[:-1]:
        if place := process.url or at.get(process.name):
            where[process.section].append(place)
    return where


def command(section: str, index: int | str) -> list[str]:
    """The words of the `distill` command that runs process `index` of a section, and its options."""
    kind, _, name = section.partition(".")
    match kind:
        case "trainer":
            return ["train"]
        case "student":
            return ["student", "--index", str(index)]
        case "teachers" | "environments":
            return [kind.removesuffix("s"), "--name", name, "--index", str(index)]
    return ["student", "--evaluation"] if name == "replica" else ["evaluator"]


def parallel(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline parallel size of an engine with these arguments; their product is its GPUs."""
    flags = flags_of(arguments)
    tensor, pipeline = (int(str(flags.get(f"{kind}-parallel-size", 1))) for kind in ("tensor", "pipeline"))
    return tensor, pipeline


def named(devices: str) -> tuple[str, ...]:
    """The GPUs of a CUDA_VISIBLE_DEVICES."""
    return tuple(name.strip() for name in devices.split(",") if name.strip())
