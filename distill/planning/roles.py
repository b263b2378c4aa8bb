"""Which role computes on how many devices, from the preflight's placement."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distill.config import RunConfig
from distill.metrics.summary import threads
from distill.planning.hardware import CPU, Device
from distill.preflight_checks.devices import EACH_NODE, HERE, Use
from distill.preflight_checks.machine import runs_vllm
from student_trainer.launch import machines
from sync.base.errors import ConfigError

Place = tuple[str, str]
"""(host, GPU); all cores of this machine are one place."""
REPLICAS, TRAINER = "replicas", "trainer"


@dataclass(frozen=True)
class Role:
    """All processes of a role."""

    name: str
    processes: int
    devices: float
    """That compute at the same time, of all processes together."""
    load: Mapping[Place, float]
    """Place → share of it that is taken while the role works."""


def find_roles(config: RunConfig, device: Device, uses: Sequence[Use]) -> dict[str, Role]:
    """Replicas, `teacher NAME` of each and trainer, by name; a teacher behind `engine_url` is left out.

    Raises ConfigError for a role whose GPUs are not known.
    """
    roles = (_on_cores if device.name == CPU else _on_gpus)(config, uses)
    return {role.name: role for role in roles}


def gpus(config: RunConfig, uses: Sequence[Use]) -> int:
    """GPUs of the run, each counted once; those of every trainer node."""
    places = {(use.host, gpu) for use in uses for gpu in use.gpus}
    there = sum(host == EACH_NODE for host, _ in places)
    return len(places) + there * (machines(config.trainer) - 1)


def _on_gpus(config: RunConfig, uses: Sequence[Use]) -> list[Role]:
    keys = {REPLICAS: "student.devices", TRAINER: "trainer.devices"}
    one_at_a_time = set()
    for name, teacher in config.teachers.items():
        if teacher.engine_url is None:
            keys[f"teacher {name}"] = f"teachers.{name}.devices"
        if not runs_vllm(teacher):  # engine transformers: one layer after the other, on one GPU at a time
            one_at_a_time.add(f"teacher {name}")
    roles = []
    for role, key in keys.items():
        used = [use for use in uses if use.key == key]
        if not used:
            raise ConfigError(
                f"{key} is not set, and no GPU of this machine is seen that {role} would inherit: name the "
                f"GPUs in {key}, or plan for cores with --device {CPU}"
            )
        count = sum(len(use.gpus) for use in used) * (machines(config.trainer) if role == TRAINER else 1)
        serial = role in one_at_a_time
        load = {(use.host, gpu): 1 / len(use.gpus) if serial else 1.0 for use in used for gpu in use.gpus}
        roles.append(Role(role, len(used), len(used) if serial else count, load))
    return roles


def _on_cores(config: RunConfig, _: Sequence[Use]) -> list[Role]:
    """Threads as configured; a replica has one by default, every other process takes all cores."""
    cores, threads_by_role = len(os.sched_getaffinity(0)), threads(config)
    counts = {REPLICAS: len(config.student.urls) or config.student.replicas}
    cores_of = {REPLICAS: threads_by_role["student"] or 1, TRAINER: threads_by_role[TRAINER] or cores}
    for name, teacher in config.teachers.items():
        if teacher.engine_url is None:
            counts[f"teacher {name}"] = len(teacher.urls) or teacher.replicas
            cores_of[f"teacher {name}"] = threads_by_role[f"teacher {name}"] or cores
    counts[TRAINER] = config.trainer.ranks * machines(config.trainer)
    roles = []
    for role, count in counts.items():
        used = min(cores, count * cores_of[role])
        roles.append(Role(role, count, used, {(HERE, CPU): used / cores}))
    return roles
