"""Start servers, trainers and commands of tests as forks of a process that has imported their libraries.

Importing vLLM takes 8 s of processor time, DeepSpeed with transformers 5 s; a fork has them, and so have the
ranks that a forked trainer starts. The roles of a run are executed, as always. `start` gives what Popen
would. A process may fork like this only while it has one thread and uses no accelerator.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from setproctitle import setproctitle

_OURS = ("DISTILL_", "STUDENT_TRAINER_")
"""Prefixes of variables that only our own code reads, when it runs."""
VLLM = ("sync.vllm.middleware", "sync.vllm.engine", "vllm.entrypoints.openai.api_server")
_TORCH = (  # what these import late is named too
    *("distill.evaluation.service", "distill.evaluation.evaluator", "uvicorn.protocols.http.httptools_impl"),
    *("teacher_service.app", "teacher_service.engines.transformers", "student_trainer.loop"),
    *("deepspeed.launcher.launch", "transformers.models.auto.modeling_auto", "torch._inductor.compile_fx"),
    "sync.weights.delta.codec",
)
_DISTILL = (
    *("distill.launch.run", "distill.planning.estimate"),
    *("transformers.models.auto.tokenization_auto", "deepspeed.ops", "matplotlib.pyplot"),
)
IMPORTS = {
    "sync.vllm.plugin": VLLM,
    "student_trainer.launch": _TORCH,
    "teacher_service": _TORCH,
    "distill.cli.main": _DISTILL,
    "vllm.entrypoints.openai.api_server": VLLM,
}
"""Module → what its server imports; `VLLM` instead for a teacher of that engine."""
_servers: dict[object, socket.socket] = {}
"""By imports and by what is added to the environment of the tests."""


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    log: IO[Any],
    new_session: bool = False,
    cwd: Path | None = None,
    imports: Sequence[str] | None = None,
) -> Forked | subprocess.Popen[bytes]:
    """A process that writes into `log`. Its PYTHONPATH comes first, whatever its server had."""
    found = program(command)
    imports = imports or (IMPORTS.get(found[0]) if found else None)
    if imports is None:
        return subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=new_session, cwd=cwd
        )
    late = (*_OURS, "PYTHONPATH")
    common = {name: value for name, value in env.items() if not name.startswith(late)}
    key = imports, tuple(sorted(common.items() - os.environ.items()))
    if key not in _servers:
        _servers[key] = _server(imports, common)
    message = json.dumps([list(command), dict(env), new_session, str(cwd or Path.cwd())]).encode()
    told, tell = os.pipe()
    socket.send_fds(_servers[key], [message], [log.fileno(), tell])
    os.close(tell)
    return Forked(told)


def _server(imports: Sequence[str], environment: Mapping[str, str]) -> socket.socket:
    """Where a process is asked that has imported those; it ends with this one."""
    control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        line = [sys.executable, "-P", __file__, *imports]
        process = subprocess.Popen(line, env=environment, stdin=there, start_new_session=True)

    def end() -> None:
        control.close()
        process.wait()

    atexit.register(end)
    return control


class Forked:
    """What tests use of Popen. From `told` it reads the process's id, and at its end the exit status."""

    def __init__(self, told: int) -> None:
        self._told, self.pid = told, _told(told)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = _told(self._told)
            os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _told(pipe: int) -> int:
    number = os.read(pipe, 8)
    assert number, "the process that forks has ended"
    return int.from_bytes(number, "little", signed=True)


def _tell(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(8, "little", signed=True))


def serve(control: socket.socket) -> None:
    """Fork for each request, and tell what has ended; returns when nobody asks any more."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    while True:
        if woken in select.select([control, woken], [], [])[0]:
            os.read(woken, 64)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell = running.pop(ended[0])
                _tell(tell, os.waitstatus_to_exitcode(ended[1]))
                os.close(tell)
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 17, 2)
        if not message:
            return
        command, environment, new_session, folder = json.loads(message)
        log, tell = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if new_session:
                os.setsid()
            for number in (1, 2):
                os.dup2(log, number)
            for end in (control.detach(), woken, wake, *descriptors, *running.values()):
                os.close(end)
            os.chdir(folder)
            _search([place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place])
            if deepspeed := sys.modules.get("deepspeed.launcher.launch"):
                deepspeed.subprocess = SimpleNamespace(Popen=Rank)  # type: ignore[attr-defined]
            become(command, environment)
        os.close(log)
        running[pid] = tell
        _tell(tell, pid)


def _search(places: Sequence[str]) -> None:
    """Look for modules in these folders first, and run their sitecustomize, as a new interpreter does."""
    sys.path[:0] = places
    if any((Path(place) / "sitecustomize.py").is_file() for place in places):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


# --- in a fork


def program(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Module and words of `python [flags] -m MODULE WORDS …`; None: the command is another."""
    if not command or command[0] != sys.executable or "-m" not in command[:-1]:
        return None
    at = command.index("-m")
    if any(not word.startswith("-") for word in command[1:at]):
        return None
    return command[at + 1], list(command[at + 2 :])


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the program of `command` in this fork as a new interpreter would; leave with its exit status.

    Functions of `atexit` are not called: libraries registered theirs for the process that imported them.
    """
    module, words = program(command)
    setproctitle(" ".join(command))  # which looks for its place by the first environment
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as in a new interpreter
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["", *words]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # its log has all that it printed
    sys.modules.pop(module, None)  # else runpy warns of a module that runs twice
    _reseed()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
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


class Rank:
    """A rank that has this process's imports; what the deepspeed launcher uses of Popen."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            become(command, env)

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None: it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


if __name__ == "__main__":
    socket_ = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket_)
