"""What the commands share: arguments, the progress and figures that they show, and how every command ends."""

from __future__ import annotations

import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sync.base.errors import ConfigError, DataError, DistillError, Interrupted
from sync.base.secrets import redact

EXIT_FAILED, EXIT_USER, EXIT_STOPPED = 1, 2, 130
_BY_SIGNAL = {128 + number: number for number in (signal.SIGTERM, signal.SIGHUP)}
"""Exit statuses of a command that a signal ended before, or beside, a run that handles it."""


def checked_url(url: str, option: str) -> str:
    """`url` itself. Raises ConfigError when no server can be there."""
    from sync.base import address

    return address.checked_url(url, option)


Config = Annotated[Path, typer.Argument(help="TOML file of the run.", metavar="CONFIG")]
RunDir = Annotated[Path, typer.Argument(help="Folder of a run, such as runs/NAME.", metavar="RUN_DIR")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the file; repeatable: --set run.steps=10.",
        default_factory=list,
        show_default=False,
    ),
]
Index = Annotated[int, typer.Option(help="Index of the process; 0 is the first.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")]


def _checked_file(path: Path | None) -> Path | None:
    """`path` itself. Raises ConfigError, before a command works for its figures, when it cannot be a file."""
    if path is not None and path.is_dir():
        raise ConfigError(f"--json {str(path)!r} is a folder: name a file")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures to FILE too.", callback=_checked_file),
]
Controller = Annotated[
    str,
    typer.Option(
        help="URL of the run's controller.",
        metavar="URL",
        callback=lambda url: checked_url(url, "--controller"),
    ),
]


def write_figures(path: Path | None, figures: Any) -> None:
    """Write a command's figures to the file of `--json`; None: it was not given."""
    if path is not None:
        from sync.base.durable import write_json

        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what`, its seconds and the newest text that it is given, while stderr is a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=2,
        redirect_stdout=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=f"{what}: {redact(text)}")


def guarded(command: Callable[[], Any]) -> int:
    """Run a command and return its exit status; the one place where errors meant for people become text."""
    console = Console(stderr=True)
    try:
        with _signals_raise():
            command()
    except (DistillError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            if error.filename is None:
                raise
            text = f"{error.filename}: {error.strerror}"
        console.print(redact(f"distill: {text}"), style="red", markup=False, highlight=False, soft_wrap=True)
        if isinstance(error, Interrupted):
            return EXIT_STOPPED
        return EXIT_USER if isinstance(error, ConfigError | DataError) else EXIT_FAILED
    except (KeyboardInterrupt, CancelledError):  # the latter: a run that was told to stop twice
        console.print("distill: stopped", style="red")
        return EXIT_STOPPED
    except SystemExit as leaving:
        if leaving.code in _BY_SIGNAL:
            console.print(f"distill: stopped by {_BY_SIGNAL[leaving.code].name}", style="red")
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    return 0


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind a command as Ctrl-C does, so that it ends what it started.

    A second one kills it; one that is ignored, as SIGHUP is under nohup, stays ignored.

    A run handles them itself while it lasts.
    """

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in _BY_SIGNAL.values() if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
