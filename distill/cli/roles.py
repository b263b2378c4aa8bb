"""`distill student | teacher | environment | evaluator | train`: one role in this process.

CONFIG is the run's file, or its folder: what `distill run` and `distill control` keep there says where the
controller is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from distill import api
from distill.cli.options import Index, Overrides, checked_url
from sync.base.errors import ConfigError

if TYPE_CHECKING:
    from distill.config import RunConfig
    from distill.launch.single_role import Controller

Source = Annotated[Path, typer.Argument(help="TOML file of the run, or the run's folder.", metavar="CONFIG")]
Join = Annotated[
    str,
    typer.Option(
        "--controller",
        help="URL of the run's controller, to register with; default: what the run's folder says, and for a "
        "file none: then the controller's file needs this server's URL.",
        metavar="URL",
        callback=lambda url: checked_url(url, "--controller") if url else "",
    ),
]
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port to listen on; default: that of its section, plus --index."),
]
Name = Annotated[str, typer.Option(help="NAME of its section, if there are several.")]


def student(
    config: Source,
    overrides: Overrides,
    controller: Join = "",
    index: Index = 0,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Serve evaluation.replica, for evaluations alone.")
    ] = False,
    port: Port = 0,
) -> None:
    """Serve one student replica. An index beyond student.replicas is a further replica of a live run."""
    _serve("evaluation.replica" if evaluation else "student", config, overrides, controller, index, port)


def teacher(
    config: Source,
    overrides: Overrides,
    controller: Join = "",
    name: Name = "",
    index: Index = 0,
    port: Port = 0,
) -> None:
    """Serve one process of a teacher."""
    _serve("teachers", config, overrides, controller, index, port, name)


def environment(
    config: Source,
    overrides: Overrides,
    controller: Join = "",
    name: Name = "",
    index: Index = 0,
    port: Port = 0,
) -> None:
    """Serve one process of an environment."""
    _serve("environments", config, overrides, controller, index, port, name)


def evaluator(config: Source, overrides: Overrides, controller: Join = "", port: Port = 0) -> None:
    """Serve the evaluator."""
    _serve("evaluation.placement", config, overrides, controller, 0, port)


def _serve(
    kind: str, source: Path, overrides: list[str], controller: str, index: int, port: int, name: str = ""
) -> None:
    from distill.launch import single_role
    from distill.launch.roles import Ports

    config, where = _joining(source, overrides, controller)
    section = single_role.section_of(config, kind, name)
    with Ports(only=port) as ports:
        single_role.serve(config, single_role.serving(config, section, ports, index, where), where)


def train(
    config: Source,
    overrides: Overrides,
    controller: Join = "",
    node: Annotated[
        int,
        typer.Option(
            help="Which of trainer.nodes this machine is.",
            envvar=["DISTILL_NODE_INDEX", "SLURM_PROCID", "JOB_COMPLETION_INDEX"],
        ),
    ] = 0,
) -> None:
    """Run the trainer's ranks of one machine, for a live run or one with controller.trainer = "external"."""
    from distill.launch import single_role

    settings, where = _joining(config, overrides, controller)
    if where is None:
        raise ConfigError(f"{config} does not say where the controller is: give its URL with --controller")
    single_role.train(settings, where, node)


def _joining(source: Path, overrides: list[str], controller: str) -> tuple[RunConfig, Controller | None]:
    from distill.launch.single_role import joining
    from sync.base.own_code import use_folder

    settings, folder = api.load_config(source, overrides), source.absolute() if source.is_dir() else None
    use_folder(settings.run.code_folder)
    return joining(settings, folder, controller or None)


COMMANDS: Final = (student, teacher, environment, evaluator, train)
