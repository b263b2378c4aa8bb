"""Run a Python program in a fork of a process that has imported the program's libraries.

Importing vLLM takes 8 s of processor time, DeepSpeed with transformers 5 s; a fork has them. A process may
fork like this only while it has one thread and uses no accelerator.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from setproctitle import setproctitle

_HANDLERS: Final[dict[int, Any]] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""What a new interpreter has."""
_forked = False


class Program(NamedTuple):
    """`python [flags] -m MODULE WORDS …`"""

    module: str
    words: list[str]


def program(command: Sequence[str]) -> Program | None:
    """The program of a command line; None when it is none of this interpreter, or no module."""
    if not command or command[0] != sys.executable or "-m" not in command[:-1]:
        return None
    at = command.index("-m")
    if any(not word.startswith("-") for word in command[1:at]):
        return None
    return Program(command[at + 1], list(command[at + 2 :]))


def is_fork() -> bool:
    """Whether this process runs a program by `become`."""
    return _forked


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the program of `command` in this fork as a new interpreter would; leave with its exit status.

    Functions of `atexit` are not called: libraries registered theirs for the process that imported them.
    """
    global _forked
    target, _forked = program(command), True
    assert target is not None, "only a program can run in a fork"
    setproctitle(" ".join(command))  # which looks for its place by the first environment
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    sys.argv = ["", *target.words]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # its log has all that it printed
    sys.modules.pop(target.module, None)  # else runpy warns of a module that runs twice
    _reseed()
    try:
        runpy.run_module(target.module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(_leave(sys.exception()))


def _reseed() -> None:
    """Give this fork random numbers of its own; `random` sees to itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def _leave(error: BaseException | None) -> int:
    """Wait for threads, flush and report as an interpreter at its end; the exit status."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF
