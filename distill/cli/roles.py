"""`distill student | teacher | environment | evaluator | train`: one role in this process."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from distill import api
from distill.cli.options import Config, Controller, Index, Overrides


def student(config: Config, overrides: Overrides, index: Index = 0) -> None:
    """Serve one student replica; put its URL into student.urls of the controller's file."""
    from distill.launch import single_role

    single_role.replace_process(single_role.serve_student(api.load_config(config, overrides), index))


def teacher(
    config: Config,
    overrides: Overrides,
    name: Annotated[str, typer.Option(help="NAME of its section teachers.NAME, if there are several.")] = "",
    index: Index = 0,
) -> None:
    """Serve one teacher; put its URL into teachers.NAME.urls of the controller's file."""
    from distill.launch import single_role

    single_role.replace_process(single_role.serve_teacher(api.load_config(config, overrides), name, index))


def environment(
    config: Config,
    overrides: Overrides,
    name: Annotated[str, typer.Option(help="NAME of its section environments.NAME, if several.")] = "",
    index: Index = 0,
) -> None:
    """Serve one environment; put its URL into environments.NAME.urls of the controller's file."""
    from distill.launch import single_role

    single_role.replace_process(
        single_role.serve_environment(api.load_config(config, overrides), name, index)
    )


def evaluator(config: Config, overrides: Overrides) -> None:
    """Serve the evaluator; put its URL into evaluation.placement.urls of the controller's file."""
    from distill.launch import single_role

    single_role.replace_process(single_role.serve_evaluator(api.load_config(config, overrides)))


def train(config: Config, overrides: Overrides, controller: Controller) -> None:
    """Run the trainer for a controller whose file sets controller.trainer = "external"."""
    from distill.launch import single_role

    single_role.replace_process(single_role.train(api.load_config(config, overrides), controller))


COMMANDS: Final = (student, teacher, environment, evaluator, train)
