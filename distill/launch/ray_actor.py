"""What a Ray actor does on a machine: start one command below a guardian, and hand on its output and its end.

A plain class; `distill.launch.ray_role` makes an actor of it. Its calls run in threads of the actor, so that
`output` and `status` may wait while `terminate` comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from distill import guardian

CALLS = 8
"""Calls that one actor answers at once."""
_CHUNK_BYTES = 1 << 16


class RoleActor:
    """One command on one machine. `output` and `status` are called after `start`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._read_end, self._pipe = os.pipe()

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], python: str, folder: str) -> str:
        """Start the command of role `name`, with the GPUs alone that Ray has given this actor; the machine's
        address.

        `env` is over the environment that this machine's Ray was started with, without what Ray adds for its
        workers (such as OMP_NUM_THREADS=1), and without its token. `python`: interpreter of the sender; where
        `argv` names it, the machine's own is taken. `folder`: to work in, where the machine has it.
        """
        import ray

        argv = [sys.executable if word == python else word for word in argv]
        devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        variables = {variable for variable in os.environ if not variable.startswith("RAY_")}
        raylet = psutil.Process(os.getppid()).environ()
        there = {variable: value for variable, value in raylet.items() if variable in variables}
        guard = ["-m", guardian.MODULE, name, str(self._read_end), guardian.KILL]
        self._process = subprocess.Popen(
            [sys.executable, "-P", *guard, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**there, **env, "CUDA_VISIBLE_DEVICES": ",".join(devices)},
            cwd=folder if Path(folder).is_dir() else None,
            pass_fds=(self._read_end,),
            start_new_session=True,
        )
        os.close(self._read_end)
        return str(ray.util.get_node_ip_address())

    def output(self) -> bytes:
        """What it has written since the last call, waiting for some; empty: everything has ended."""
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "it is a pipe"
        return os.read(self._process.stdout.fileno(), _CHUNK_BYTES)

    def status(self) -> int:
        """Exit status, in the shell's way, when it has ended and nothing of it is left."""
        assert self._process is not None, "it was started"
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Send SIGTERM to it, also when it is not there yet."""
        self._tell(guardian.ASK)

    def kill(self) -> None:
        """Kill everything that there is of it, or will be."""
        self._tell(b"k")

    def _tell(self, word: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._pipe, word)
