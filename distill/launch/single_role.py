"""A role on its own: `distill student | teacher | train | evaluator`, joined to a controller by URLs.

Each command becomes the role's process (exec), so that signals, logs and exit status are the role's own.
Files that a role is started with go to roles/ in the run's folder of this machine.
"""

from __future__ import annotations

import os
from typing import NoReturn

from distill.config import RunConfig
from distill.launch import roles
from distill.launch.ports import Ports
from distill.launch.run_folder import write_role
from distill.launch.supervise import ChildSpec
from distill.preflight.checks import check_folder, check_following, check_secrets
from distill.preflight.processor import check_processor, check_teacher
from student_trainer import launch as trainer_launch
from sync.client import token_from_environment
from sync.errors import ConfigError
from sync.server import check_bind
from sync.settings import Placement


def replace_process(child: ChildSpec) -> NoReturn:
    """Become this process; never returns."""
    os.execvpe(child.argv[0], list(child.argv), {**os.environ, **child.env})


def student(config: RunConfig, index: int) -> ChildSpec:
    """Replica `index`, listening as [student] says."""
    check_folder(config.student, "student")
    check_processor("student")
    check_secrets(config)
    host, port = _listen(config.student, index, "student")
    return roles.student_child(config, index, host, port)


def teacher(config: RunConfig, name: str, index: int) -> ChildSpec:
    """Process `index` of teacher `name`; "" stands for the only one."""
    if not name and len(config.teachers) == 1:
        (name,) = config.teachers
    if name not in config.teachers:
        raise ConfigError(f"--name {name!r} is no teacher: choose one of {', '.join(config.teachers)}")
    place = config.teachers[name]
    check_secrets(config)
    check_folder(place, f"teachers.{name}")
    check_teacher(place, name)
    if place.follow_student_every is not None:
        check_following(config, name)
    host, port = _listen(place, index, f"teachers.{name}")
    path = write_role(config.run_dir, f"teacher-{name}", place)
    return roles.teacher_child(config, name, index, path, host, port)


def evaluator(config: RunConfig) -> ChildSpec:
    """The evaluator, listening as [evaluation.placement] says."""
    if config.evaluation is None:
        raise ConfigError("evaluation is off in this configuration: there is nothing to serve")
    host, port = _listen(config.evaluation.placement, 0, "evaluation.placement")
    path = write_role(config.run_dir, roles.EVALUATOR, config)
    return roles.evaluator_child(config, path, host, port)


def trainer(config: RunConfig, controller_url: str) -> ChildSpec:
    """The deepspeed launcher of all ranks, talking to the controller at that URL."""
    check_folder(config.student, "student")
    check_secrets(config)
    settings = roles.trainer_config(config, controller_url)
    argv, env = trainer_launch.command(settings, write_role(config.run_dir, roles.TRAINER, settings))
    return ChildSpec(roles.TRAINER, argv, env)


def check_all_joined(config: RunConfig) -> None:
    """Raise ConfigError unless every role of the controller's configuration is reached by URL."""
    missing = [] if config.student.urls else ["student.urls"]
    missing += [f"teachers.{name}.urls" for name, teacher in config.teachers.items() if not teacher.urls]
    if config.evaluation is not None and not config.evaluation.placement.urls:
        missing.append("evaluation.placement.urls (or evaluation = false)")
    if config.controller.trainer != "external":
        missing.append('controller.trainer = "external"')
    if missing:
        raise ConfigError(
            f"`distill control` starts no other role: set {', '.join(missing)}, or use `distill run`"
        )


def _listen(place: Placement, index: int, key: str) -> tuple[str, int]:
    check_bind(place.host, token_from_environment())
    ports = Ports()
    port = ports.take(place.host, place.port + index if place.port else 0, f"{key}.port")
    ports.keep_through_exec()
    return place.host, port
