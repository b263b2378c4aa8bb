"""A role on its own, joined to a controller by URLs: `distill student`, `teacher`, `environment` and others.

Each function prepares one process; `replace_process` becomes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from distill.config import RunConfig
from distill.launch.roles import (
    Ports,
    environment_child,
    evaluator_child,
    student_child,
    teacher_child,
    trainer_process,
)
from distill.launch.supervise import ChildSpec
from distill.preflight_checks.checks import (
    check_following,
    check_model,
    check_secrets,
    check_transport,
    refuse,
)
from distill.preflight_checks.environments import check_environment
from distill.preflight_checks.machine import runs_vllm
from distill.preflight_checks.objective import with_objective
from sync.address import token_from_environment
from sync.errors import ConfigError
from sync.own_code import use_folder
from sync.server import check_bind
from sync.settings import Placement


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
    name = _named(name, "teacher", config.teachers)
    place = config.teachers[name]
    use_folder(config.run.code_folder)
    check_secrets(config)
    check_model(place, f"teachers.{name}", runs_vllm(place))
    if place.follow_student_every is not None:
        check_following(with_objective(config).config, name)
    return teacher_child(config, name, index, _ports(place))


def serve_environment(config: RunConfig, name: str, index: int) -> ChildSpec:
    """Process `index` of environment `name`; "" stands for the only one."""
    name = _named(name, "environment", config.environments)
    use_folder(config.run.code_folder)
    check_model(config.student, "student")
    refuse(check_environment(config, name))
    return environment_child(config, name, index, _ports(config.environments[name]))


def _named(name: str, kind: str, sections: Mapping[str, Placement]) -> str:
    if not name and len(sections) == 1:
        (name,) = sections
    if name not in sections:
        raise ConfigError(f"--name {name!r} is no {kind}: choose one of {', '.join(sections) or 'none'}")
    return name


def serve_evaluator(config: RunConfig) -> ChildSpec:
    """The evaluator, listening as [evaluation.placement] says."""
    if config.evaluation is None:
        raise ConfigError("evaluation is off in this configuration: there is nothing to serve")
    use_folder(config.run.code_folder)
    refuse(check_transport(config))
    missing = _unreached(config)
    if (own := config.evaluation.replica) is not None and not own.urls:
        missing.append("evaluation.replica.urls")
    if missing:
        raise ConfigError(f"the evaluator asks the other servers and starts none: set {', '.join(missing)}")
    return evaluator_child(with_objective(config).config, _ports(config.evaluation.placement))


def _unreached(config: RunConfig) -> list[str]:
    served: dict[str, Mapping[str, Placement]] = {
        "teachers": config.teachers,
        "environments": config.environments,
    }
    return [
        f"{kind}.{name}.urls" for kind, all_ in served.items() for name, one in all_.items() if not one.urls
    ]


def train(config: RunConfig, controller_url: str) -> ChildSpec:
    """The deepspeed launcher of all ranks, talking to the controller at that URL."""
    use_folder(config.run.code_folder)
    check_model(config.student, "student")
    check_secrets(config)
    return trainer_process(with_objective(config).config, controller_url)


def check_all_joined(config: RunConfig) -> None:
    """Raise ConfigError unless every role of the controller's configuration is reached by URL."""
    missing = [] if config.student.urls else ["student.urls"]
    missing += _unreached(config)
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
