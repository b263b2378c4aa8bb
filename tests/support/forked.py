"""Start servers, trainers and commands of tests as forks of a process that has imported their libraries.

`distill.launch.fork_server` does so for the roles of a run. Here is no guardian, and the server says how a
fork ended: `start` gives what Popen would.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
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
from typing import IO, Any

from distill.launch import fork_server
from distill.launch.fork_server import OURS
from sync.forking import become, program

VLLM = fork_server.IMPORTS["sync.vllm.plugin"]
_DISTILL = (
    *("distill.launch.run", "distill.launch.outcome", "distill.planning.estimate"),
    *("transformers.models.auto.tokenization_auto", "deepspeed.ops", "matplotlib.pyplot"),
)
IMPORTS = fork_server.IMPORTS | {
    "distill.cli.main": _DISTILL,
    "vllm.entrypoints.openai.api_server": VLLM,
}
"""Module → what its server imports; `VLLM` instead for a teacher of that engine."""
_servers: dict[object, Server] = {}
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
    imports = imports or (IMPORTS.get(found.module) if found else None)
    if imports is None:
        return subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=new_session, cwd=cwd
        )
    late = (*OURS, "PYTHONPATH")
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


if __name__ == "__main__":
    socket_ = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket_)
