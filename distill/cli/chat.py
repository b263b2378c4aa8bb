"""`distill chat`: prompts from the terminal or from stdin, answers in columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distill.cli.options import RunDir, working
from sync.base.errors import DataError

RESET, QUIT = "/reset", "/quit"


def chat(
    run_dir: RunDir,
    version: Annotated[str, typer.Option(help="final, best, or one that `distill sync ls` lists.")] = "final",
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Default: rollout.temperature of the run.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; default: rollout.max_tokens of the run.")
    ] = None,
    teacher: Annotated[bool, typer.Option("--teacher/--no-teacher", help="Ask the teachers too.")] = True,
) -> None:
    """Talk to a run's student and its teachers side by side; /reset begins anew, /quit ends.

    Example: echo "What is 7 times 8?" | distill chat runs/NAME
    """
    from distill.launch.chat import chatting

    console, options = Console(), {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in options.items() if value is not None}
    with ExitStack() as stack:
        with working("distill chat") as say:
            talk = stack.enter_context(chatting(run_dir, version, teacher, sampling, say))
        for prompt in _prompts():
            if prompt == QUIT:
                break
            if prompt == RESET:
                talk.conversations.reset()
                continue
            with working("generating"):
                answers = talk.answer(prompt)
            table = Table(
                title=None if sys.stdin.isatty() else Text(prompt), title_justify="left", expand=True
            )
            for name in answers:
                table.add_column(Text(name), ratio=1, overflow="fold")
            table.add_row(*map(Text, answers.values()))
            console.print(table)


def _prompts() -> Iterator[str]:
    """Lines of stdin that are not empty, without surrounding space. Raises DataError for bytes."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # keys and history of `input`
    lines = iter(lambda: input("> "), None) if sys.stdin.isatty() else sys.stdin
    try:
        yield from (text for line in lines if (text := line.strip()))
    except EOFError:
        return
    except UnicodeDecodeError as error:
        raise DataError(f"stdin holds bytes that are not {error.encoding}: convert its prompts") from None
