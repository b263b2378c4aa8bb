"""The processes of a run, computed from its configuration alone.

Whoever starts, places, measures, asks or expects a process reads it here. A further kind of server is an
entry of KINDS, a section with a `Placement`, which `RunConfig.places` finds, a `Role`, what starts one
(`distill.launch.roles.STARTERS`) and its command (`distill.cli.roles`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from distill.config import RunConfig, flags_of
from sync.base.address import Place
from sync.base.errors import ConfigError
from sync.base.settings import Placement
from sync.wire.peers import Role

STUDENT: Final = "student"
TRAINER: Final = "trainer"
EVALUATOR: Final = "evaluator"
EVALUATION_REPLICA: Final = "evaluation-replica"
CONTROLLER: Final = "controller"
HERE: Final = "here"
EACH_NODE: Final = "each trainer node"
Keeps = Literal["nothing", "state", "weights"]
"""What of its run a server keeps; one that keeps nothing serves many runs, the others one alone."""


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
    keeps: Keeps = "nothing"

    @property
    def follows(self) -> bool:
        """Whether it reads published weights."""
        return self.keeps == "weights"

    @property
    def subject(self) -> str:
        """NAME of teachers.NAME; empty: its section has no name."""
        return self.section.partition(".")[2]


def _engine_gpus(config: RunConfig, _: Any) -> int:
    return prod(parallel(config.student.engine_args))


def _teacher_gpus(_: RunConfig, teacher: Any) -> int:
    without = teacher.engine_url is not None or teacher.device == "cpu"
    return 0 if without else prod(parallel(teacher.engine_args))


def _evaluator_gpus(config: RunConfig, _: Any) -> int:
    compares = config.evaluation is not None and bool(config.teachers)  # else it computes nothing
    return int(compares and config.evaluation is not None and config.evaluation.device != "cpu")


class Kind(NamedTuple):
    """The processes of a section, or of every section of a table."""

    role: Role
    label: str
    """Name of its processes without their number; {name}: of the section in its table."""
    command: str
    """The words after `distill` that run one; {name}, {index}."""
    keeps: Keeps | Callable[[Any], Keeps]
    """Of its run; by its section, where that decides."""
    number: str | None = None
    """Key of the section that says how many there are; None: one."""
    gpus: Callable[[RunConfig, Any], int] = lambda config, place: 0
    """Of each, unless its section says."""


KINDS: Final = {
    "student": Kind(Role.STUDENT, "student", "student --index {index}", "weights", "replicas", _engine_gpus),
    "teachers": Kind(
        Role.TEACHER,
        "teacher-{name}",
        "teacher --name {name} --index {index}",
        lambda teacher: "nothing" if teacher.follow_student_every is None else "weights",
        "replicas",
        _teacher_gpus,
    ),
    "environments": Kind(
        Role.ENVIRONMENT,
        "environment-{name}",
        "environment --name {name} --index {index}",
        "state",
        "processes",
    ),
    "evaluation.replica": Kind(
        Role.STUDENT, EVALUATION_REPLICA, "student --evaluation", "weights", gpus=_engine_gpus
    ),
    "evaluation.placement": Kind(Role.EVALUATOR, EVALUATOR, "evaluator", "weights", gpus=_evaluator_gpus),
}
"""Section, or table of sections → its processes, as far as they are servers."""


def kind_of(section: str) -> Kind:
    """The kind of server that a section describes."""
    return KINDS.get(section) or KINDS[section.partition(".")[0]]


def processes(config: RunConfig, gpus: bool = True) -> list[Process]:
    """Every process of a run but its controller, the trainer last.

    `gpus`: whether its machines have any; else a process has those that its section names or counts alone.
    Raises ConfigError for a process that `devices` of its section leave out.
    """
    servers = list[Process]()
    for section, place in config.places().items():
        kind = kind_of(section)
        label, number = kind.label.format(name=section.partition(".")[2]), len(place.urls)
        number = number or (getattr(place, kind.number) if kind.number else 1)
        taken = kind.gpus(config, place) * gpus if place.gpus is None else place.gpus
        for index in range(number):
            url = place.urls[index] if place.urls else None
            devices = devices_of(section, place, index)
            servers.append(
                Process(
                    f"{label}-{index}" if section == "student" or number > 1 else label,
                    taken if devices is None else len(devices),
                    section=section,
                    label=label,
                    index=index,
                    place=place,
                    role=kind.role,
                    url=url,
                    host=str(urlsplit(url).hostname) if url else HERE,
                    devices=devices,
                    keeps=kind.keeps(place) if callable(kind.keeps) else kind.keeps,
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
    devices = devices_of(section, config.places()[section], index)
    return replace(last, name=f"{last.label}-{index}", index=index, devices=devices)


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
    if section == TRAINER:
        return ["train"]
    name = section.partition(".")[2]
    return [word.format(name=name, index=index) for word in kind_of(section).command.split()]


def parallel(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline parallel size of an engine with these arguments; their product is its GPUs."""
    flags = flags_of(arguments)
    tensor, pipeline = (int(str(flags.get(f"{kind}-parallel-size", 1))) for kind in ("tensor", "pipeline"))
    return tensor, pipeline


def devices_of(section: str, place: Placement, index: int) -> tuple[str, ...] | None:
    """The GPUs that a section names for its process `index`; None: it names none.

    Those that run already may all have the same. Raises ConfigError when it has no entry.
    """
    if not place.devices:
        return None
    if not place.urls and index >= len(place.devices):
        raise ConfigError(
            f"{section}.devices has {len(place.devices)} entries, and there is process {index}: give an "
            "entry for each"
        )
    return named(place.devices[index % len(place.devices)])


def named(devices: str) -> tuple[str, ...]:
    """The GPUs of a CUDA_VISIBLE_DEVICES."""
    return tuple(name.strip() for name in devices.split(",") if name.strip())
