"""What several commands share: their arguments, and the figures that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Config = Annotated[Path, typer.Argument(help="TOML file of the run", metavar="CONFIG")]
RunDir = Annotated[Path, typer.Argument(help="Folder of a run", metavar="RUN_DIR")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Over the file, as often as needed: run.steps=10",
        default_factory=list,
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here too")]
Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist", metavar="TARGET")]
Published = Annotated[str, typer.Option("--version", help="Such as L000-v00000120; default: the newest")]
Controller = Annotated[
    str, typer.Option(help="URL of the run's controller", metavar="URL", callback=lambda url: _checked(url))
]
Unmerged = Annotated[bool, typer.Option("--adapter", help="Do not merge an adapter")]


def _checked(controller: str) -> str:
    from sync.client import checked_url

    return checked_url(controller, "--controller")


def write_figures(path: Path | None, figures: Any) -> None:
    """Write what a command found to the file of `--json`; None: it was not given."""
    if path is not None:
        from sync.durable import write_json

        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)
