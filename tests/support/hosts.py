"""Network namespaces as machines on one switch: 10.78.0.1, 10.78.0.2, …; any of their cables can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import Final

import psutil

INTERFACE: Final = "eth0"
"""What every host calls its cable."""


def missing() -> str | None:
    """Why no such hosts can be made here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (package iproute2)"
    probe = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode != 0:
        return "network namespaces may not be made here"
    ip("netns", "del", probe)
    return None


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Host:
    """One machine: a namespace with loopback and one address."""

    def __init__(self, switch: str, index: int) -> None:
        self.name, self.address = f"{switch}h{index}", f"10.78.0.{index + 1}"
        self._switch, self._port = switch, f"port{index}"
        ip("netns", "add", self.name)
        ip("-n", switch, "link", "add", self._port, "type", "veth", "peer", INTERFACE, "netns", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        ip("-n", self.name, "link", "set", INTERFACE, "up")
        ip("-n", switch, "link", "set", self._port, "up")
        self.heal()

    def command(self, line: list[str]) -> list[str]:
        """`line` as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *line]

    def cut(self) -> None:
        """Frames from and to this host are lost, without a word to it."""
        ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Processes of this host, those with `word` in their command line."""
        found = []
        for pid in ip("netns", "pids", self.name).split():
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE and word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        while pids := ip("netns", "pids", self.name).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", self.name)


class Switch:
    """`count` hosts on one switch. Use it inside `with`."""

    def __init__(self, count: int) -> None:
        self._name = f"od{os.getpid()}"
        ip("netns", "add", self._name)
        ip("-n", self._name, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._name, "link", "set", "bridge", "up")
        self.hosts = [Host(self._name, index) for index in range(count)]

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()
        ip("netns", "del", self._name)
