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
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final, NamedTuple, NoReturn

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
_servers: dict[object, Server] = {}
"""By imports and by what is added to the environment of the tests."""
_HANDLERS: Final[dict[int, Any]] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""What a new interpreter has."""


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
    imports = imports or (IMPORTS.get(found.module) if found else None)
    if imports is None:
        return subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=new_session, cwd=cwd
        )
    late = (*_OURS, "PYTHONPATH")
    common = {name: value for name, value in env.items() if not name.startswith(late)}
    key = imports, tuple(sorted(common.items() - os.environ.items()))
    if key not in _servers:
        _servers[key] = Server(imports, common)
    return _servers[key].fork(command, env, log, new_session, cwd)


def output_of(command: Sequence[str], env: Mapping[str, str], seconds: float = 1500.0) -> str:
    """What it says until it ends well, on both streams."""
    with tempfile.TemporaryFile("w+") as log:
        status = start(command, env, log).wait(seconds)
        log.seek(0)
        said = log.read()
    assert status == 0, said[-8000:]
    return said


class Forked:
    """What tests use of Popen."""

    def __init__(self, pid: int, server: Server) -> None:
        self.pid, self._server = pid, server

    @property
    def returncode(self) -> int | None:
        return self._server.ended.get(self.pid)

    def poll(self) -> int | None:
        self._server.read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that imports and forks. It ends with this one."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        self.ended: dict[int, int] = {}
        self._lock, self._started = threading.Lock(), list[int]()
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            line = [sys.executable, "-P", __file__, *imports]
            self._process = subprocess.Popen(line, env=environment, stdin=there, start_new_session=True)
        atexit.register(self._end)

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: IO[Any],
        new_session: bool,
        cwd: Path | None,
    ) -> Forked:
        message = json.dumps([list(command), dict(env), new_session, str(cwd or Path.cwd())]).encode()
        with self._lock:
            socket.send_fds(self._control, [message], [log.fileno()])
            while not self._started:
                self._receive()
            return Forked(self._started.pop(), self)

    def read(self) -> None:
        """What has ended meanwhile."""
        with self._lock:
            while select.select([self._control], [], [], 0)[0]:
                self._receive()

    def _end(self) -> None:
        self._control.close()
        self._process.wait()

    def _receive(self) -> None:
        answer = self._control.recv(64)
        assert answer, "the process that forks has ended"
        pid, status = json.loads(answer)
        if status is None:
            self._started.append(pid)
        else:
            self.ended[pid] = status


def serve(control: socket.socket) -> None:
    """Fork for each request, and tell what has ended; returns when nobody asks any more."""
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            woken.recv(64)
            _tell_ended(control)
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 17, 1)
            if not message:
                return
            command, environment, new_session, folder = json.loads(message)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (control, woken, wake):
                    end.close()
                if new_session:
                    os.setsid()
                for number in (1, 2):
                    os.dup2(descriptors[0], number)
                os.close(descriptors[0])
                os.chdir(folder)
                _search([place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place])
                if deepspeed := sys.modules.get("deepspeed.launcher.launch"):
                    deepspeed.subprocess = SimpleNamespace(Popen=start_rank)  # type: ignore[attr-defined]
                become(command, environment)
            os.close(descriptors[0])
            control.send(json.dumps([pid, None]).encode())


def _search(places: Sequence[str]) -> None:
    """Look for modules in these folders first, and run their sitecustomize, as a new interpreter does."""
    sys.path[:0] = places
    if any((Path(place) / "sitecustomize.py").is_file() for place in places):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _tell_ended(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


# --- in a fork


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


def start_rank(command: list[str], env: Mapping[str, str], **log: Any) -> Rank | subprocess.Popen[bytes]:
    """A rank, as the deepspeed launcher starts it. `log`: stdout and stderr, if they are of its own."""
    if program(command) is None:  # bound to cores by numactl
        return subprocess.Popen(command, env=env, **log)
    return Rank(command, env, **log)


class Rank:
    """A rank that has this process's imports; what the deepspeed launcher uses of Popen."""

    def __init__(self, command: list[str], env: Mapping[str, str], **log: IO[str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number, name in enumerate(("stdout", "stderr"), 1):
                if name in log:
                    os.dup2(log[name].fileno(), number)
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
