"""Start the roles of a run on CPUs as forks of processes that have imported their libraries.

    supervisor ──command, environment, log, pipe──▶ fork server ──fork──▶ guardian ──fork──▶ role
               ◀──────────── process id of the guardian, whose parent the supervisor is

There is one server for each set of libraries and of variables that a role has beside the launcher's. Our own
are not counted, they are read late: teachers, evaluator and trainer share a server unless their `env` differ.
Without its server, when that is gone, a role is executed. On GPUs all are: an import may use the driver,
which forks cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, NoReturn, Self

from setproctitle import setproctitle

from distill.launch.guardian import MODULE as GUARDIAN
from distill.launch.guardian import PR_SET_PDEATHSIG, guard, prctl
from distill.preflight_checks.machine import installed_for_cpu
from sync.forking import become, program

log = logging.getLogger(__name__)
MODULE: Final = "distill.launch.fork_server"
_VLLM: Final = ("sync.vllm.middleware", "sync.vllm.engine", "vllm.entrypoints.openai.api_server")
_TORCH: Final = (  # what these import late is named too
    *("distill.evaluation.service", "distill.evaluation.evaluator", "uvicorn.protocols.http.httptools_impl"),
    *("teacher_service.app", "teacher_service.engines.transformers", "student_trainer.loop"),
    *("deepspeed.launcher.launch", "transformers.models.auto.modeling_auto", "torch._inductor.compile_fx"),
    "sync.weights.delta.codec",
)
IMPORTS: Final = {
    "sync.vllm.plugin": _VLLM,
    "student_trainer.launch": _TORCH,
    "teacher_service": _TORCH,
    "distill.evaluation.service": _TORCH,
}
"""Module of a role → what its server imports."""
OURS: Final = ("DISTILL_", "STUDENT_TRAINER_")
"""Prefixes of variables that only our own code reads, when it runs."""
IMPORT_SECONDS: Final = 300.0
"""For all imports and a fork: a server that takes longer is stalled."""
_MOST_BYTES: Final = 1 << 17
_MOST_SAID: Final = 2000
_TITLE_ROOM: Final = {"DISTILL_TITLE_ROOM": " " * 4096}
"""Memory for a title as long as a role's command line: it lies where the first environment was."""


# --- in the launcher


class Forked:
    """A guardian that a server forked, now a child of this process; as asyncio's `Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended, self._handle = asyncio.Event(), os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._collect)

    async def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None, "it was collected"
        return self.returncode

    def kill(self) -> None:
        """SIGKILL; nothing when it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _collect(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else collected it; asyncio has the same status then
            self.returncode = 255
        self._ended.set()


class ForkServers:
    """The servers of a launcher, each started when it is expected, or at the latest when its first role is.

    The launcher adopts orphans (`distill.launch.guardian.adopt_orphans`) before the first fork.
    """

    def __init__(self) -> None:
        self._servers: dict[object, _Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, command: Sequence[str], environment: Mapping[str, str]) -> _Server | None:
        """The server of a role, which is started unless it is there; None: the role must be executed."""
        target = program(command)
        if target is None or target.module not in IMPORTS or not installed_for_cpu():
            return None
        imports = IMPORTS[target.module]
        common = {name: value for name, value in environment.items() if not name.startswith(OURS)}
        key = imports, tuple(sorted(common.items() - os.environ.items()))
        if key not in self._servers:
            self._servers[key] = _Server(imports, common)
        return self._servers[key]

    async def fork(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: int, pipe: int
    ) -> Forked | None:
        """Start a role's guardian, whose pipe and output are these descriptors; None: it must be executed."""
        server = self.expect(command, environment)
        return None if server is None else await server.fork(name, command, environment, log_file, pipe)

    def close(self) -> None:
        """End them; what they forked goes on."""
        while self._servers:
            self._servers.popitem()[1].close()


class _Server:
    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._closed = False
        self._turn, self._output = asyncio.Lock(), tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        with there:
            descriptors = (there.fileno(), self._output.fileno(), self._output.fileno())
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", MODULE],
                {**environment, **_TITLE_ROOM},
                file_actions=[(os.POSIX_SPAWN_DUP2, pipe, to) for to, pipe in enumerate(descriptors)],
            )
        self._control.send(json.dumps(imports).encode())  # its command line is no longer than a fork's

    async def fork(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: int, pipe: int
    ) -> Forked | None:
        message = json.dumps([name, list(command), dict(environment)]).encode()
        if len(message) > _MOST_BYTES:
            return None
        async with self._turn:
            if answer := await self._answer(message, log_file, pipe):
                return Forked(int(answer))
            if not self._closed:
                self._output.seek(0)
                said = self._output.read().decode(errors="replace")[-_MOST_SAID:]
                log.warning("%s starts without its fork server, which is gone:\n%s", name, said)
                self.close()
            return None

    async def _answer(self, message: bytes, *descriptors: int) -> bytes:
        """b"" once the server is gone, or stalled."""
        try:
            socket.send_fds(self._control, [message], descriptors)
            async with asyncio.timeout(IMPORT_SECONDS):
                return await asyncio.get_running_loop().sock_recv(self._control, 32)
        except (OSError, TimeoutError):
            return b""

    def close(self) -> None:
        """End it; again changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._control.close()
        self._output.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it ended, nobody collects here
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


# --- in a server


class _Request(NamedTuple):
    name: str
    command: list[str]
    environment: dict[str, str]
    log_file: int
    pipe: int


def main() -> None:
    """Import, then fork for each request, until the launcher is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the launcher inherited is not for roles
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for roles, and this process has none
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    imports, before = json.loads(control.recv(_MOST_BYTES)), dict(os.environ)
    for name in imports:
        if select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK):
            return  # the launcher is gone
        importlib.import_module(name)
    added = dict(os.environ.items() - before.items())
    gc.collect()
    gc.freeze()  # or a collection would copy the memory that forks share
    request = _serve(control)
    if request is not None:
        os._exit(_guard(request._replace(environment=added | request.environment)))


def _serve(control: socket.socket) -> _Request | None:
    """In a fork: its request. In the server: None once the launcher is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, 2)
        if not message:
            return None
        middle = os.fork()
        if middle == 0:
            server = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == server:  # then the launcher adopts this process
                pass
            os.setsid()
            control.send(str(os.getpid()).encode())
            control.close()
            return _Request(*json.loads(message), *descriptors)
        if os.waitpid(middle, 0)[1] != 0:  # no process can be made: the launcher executes the role, or fails
            return None
        for descriptor in descriptors:
            os.close(descriptor)


def _guard(request: _Request) -> int:
    """Be the guardian of a role; its exit status."""
    for output in (1, 2):
        os.dup2(request.log_file, output)
    os.close(request.log_file)
    command = [sys.executable, "-P", "-m", GUARDIAN, request.name, str(request.pipe), *request.command]
    setproctitle(" ".join(command))

    def begin() -> NoReturn:
        os.close(request.pipe)
        become(request.command, request.environment)

    os.set_inheritable(request.pipe, False)
    return guard(begin, request.pipe)


if __name__ == "__main__":
    main()
