"""`distill logs`: what the roles of a run log, each line behind its role's name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from distill.cli.options import RunDir
from sync.base.errors import DataError
from sync.base.secrets import redact

POLL_SECONDS: Final = 0.5


def logs(
    run_dir: RunDir,
    role: Annotated[str, typer.Argument(help="Default: every role.", metavar="[ROLE]")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each role.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")
    ] = False,
) -> None:
    """Print the last lines that the roles of a run on this machine have logged.

    Example: distill logs runs/NAME trainer --follow
    """
    for line in role_lines(run_dir / "logs", role, lines, follow):
        typer.echo(redact(line))


def role_lines(folder: Path, role: str, count: int, follow: bool) -> Iterator[str]:
    """The last `count` lines of each log, then with `follow` every further whole line, without an end.

    Raises DataError where there is no log, or none of this role.
    """
    from distill.launch.supervise import last_lines

    ends = {path: path.stat().st_size for path in sorted(folder.glob("*.log")) if role in ("", path.stem)}
    if not ends:
        there = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none"
        raise DataError(f"{folder} holds no log of {role or 'any role'}: roles with a log are {there}")
    for path in ends:
        yield from (f"{path.stem:<12} {line}" for line in last_lines(path, count))
    while follow:
        time.sleep(POLL_SECONDS)
        for path in sorted(folder.glob(f"{role or '*'}.log")):
            with path.open("rb") as file:
                file.seek(ends.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                ends[path] = ends.get(path, 0) + len(whole) + 1
                yield from (f"{path.stem:<12} {line}" for line in whole.decode(errors="replace").split("\n"))
