"""Network namespaces as machines: on one switch, or two that are joined by a link which is slow and narrow.

Any of the cables can be cut. The link is a pair of TUN devices; two threads carry packets between them, each
after its time. `tc netem` does the same in the kernel, but its module is missing in many containers.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

INTERFACE: Final = "eth0"
"""What every host calls its cable."""
TUNSETIFF: Final = 0x400454CA
TUN_WITHOUT_HEADER: Final = 0x1001
MTU: Final = 1500


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


def link_missing() -> str | None:
    """Why no slow link can be made here; None: it can."""
    return missing() or (None if Path("/dev/net/tun").exists() else "/dev/net/tun is missing")


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Host:
    """One machine: a namespace with loopback and one address."""

    def __init__(self, name: str, address: str, *plug: str) -> None:
        """`plug`: words of `ip` that give the namespace its INTERFACE."""
        self.name, self.address = name, address
        ip("netns", "add", name)
        ip(*plug)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, "up")

    def command(self, line: list[str]) -> list[str]:
        """`line` as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *line]

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


# --- a switch ---------------------------------------------------------------------------------------------


class Switched(Host):
    """At a port of a switch: 10.78.0.1, 10.78.0.2, …"""

    def __init__(self, switch: str, index: int) -> None:
        name, port = f"{switch}h{index}", f"port{index}"
        plug = "-n", switch, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", name
        super().__init__(name, f"10.78.0.{index + 1}", *plug)
        self._port = "-n", switch, "link", "set", port
        ip(*self._port, "up")
        self.heal()

    def cut(self) -> None:
        """Frames from and to this host are lost, without a word to it."""
        ip(*self._port, "nomaster")

    def heal(self) -> None:
        ip(*self._port, "master", "bridge")


class Switch:
    """`count` hosts on one switch. Use it inside `with`."""

    def __init__(self, count: int) -> None:
        self._name = f"od{os.getpid()}"
        ip("netns", "add", self._name)
        ip("-n", self._name, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._name, "link", "set", "bridge", "up")
        self.hosts = [Switched(self._name, index) for index in range(count)]

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()
        ip("netns", "del", self._name)


# --- a slow link ------------------------------------------------------------------------------------------


class End(Host):
    """A host at one end of the link."""

    def __init__(self, name: str, address: str) -> None:
        self.device, interface = os.open("/dev/net/tun", os.O_RDWR), f"t{name}"[:15]
        request = struct.pack("16sH", interface.encode(), TUN_WITHOUT_HEADER)
        fcntl.ioctl(self.device, TUNSETIFF, request)
        super().__init__(name, address, "link", "set", interface, "netns", name, "name", INTERFACE)

    def close(self) -> None:
        os.close(self.device)
        super().close()


class SlowLink:
    """`delay` in seconds and `rate` in bits a second, each way. Use it inside `with`."""

    def __init__(self, delay: float = 0.02, rate: float = 100e6) -> None:
        self._delay, self._rate = delay, rate
        self.up, self.carried, self.lost = True, 0, 0
        """Packets on their way count as carried; `up = False` loses those that come."""
        self._over = threading.Event()
        tag = os.getpid()
        self.hosts = [End(f"od{tag}{letter}", f"10.77.0.{i}") for i, letter in enumerate("ab", 1)]

    def __enter__(self) -> SlowLink:
        a, b = self.hosts
        ways = [(a.device, b.device), (b.device, a.device)]
        self._threads = [threading.Thread(target=self._carry, args=way) for way in ways]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for host in self.hosts:
            host.close()

    def _carry(self, source: int, target: int) -> None:
        """Packets leave the line one after the other at its rate, and arrive after the delay."""
        os.set_blocking(source, False)
        waiting: list[tuple[float, bytes]] = []
        free = 0.0
        while not self._over.is_set():
            try:
                packet = os.read(source, MTU + 64)
                free = max(free, time.monotonic()) + 8 * len(packet) / self._rate
                if self.up:
                    heapq.heappush(waiting, (free + self._delay, packet))
                    self.carried += 1
                else:
                    self.lost += 1
            except BlockingIOError:
                time.sleep(0.001)
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(target, heapq.heappop(waiting)[1])
