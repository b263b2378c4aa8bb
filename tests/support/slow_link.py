"""Two network namespaces joined by a link that is slow, narrow and can be cut.

The link is a pair of TUN devices; two threads carry packets between them, each after its time. `tc netem`
does the same in the kernel, but its module is missing in many containers.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import struct
import threading
import time
from pathlib import Path
from typing import Final

import hosts
from hosts import ip

TUNSETIFF: Final = 0x400454CA
TUN_WITHOUT_HEADER: Final = 0x1001
MTU: Final = 1500
INTERFACE: Final = "lan0"
"""What either host calls its end."""


def missing() -> str | None:
    """Why no such link can be made here; None: it can."""
    return hosts.missing() or (None if Path("/dev/net/tun").exists() else "/dev/net/tun is missing")


class Host:
    """One end: a namespace with loopback and one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        ip("netns", "add", name)
        self.device = os.open("/dev/net/tun", os.O_RDWR)
        interface = f"t{name}"[:15]
        request = struct.pack("16sH", interface.encode(), TUN_WITHOUT_HEADER)
        fcntl.ioctl(self.device, TUNSETIFF, request)
        ip("link", "set", interface, "netns", name, "name", INTERFACE)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, "mtu", str(MTU), "up")

    def command(self, line: list[str]) -> list[str]:
        """`line` as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *line]

    def close(self) -> None:
        os.close(self.device)
        ip("netns", "del", self.name)


class SlowLink:
    """`delay` in seconds and `rate` in bits a second, each way. Use it inside `with`."""

    def __init__(self, delay: float = 0.02, rate: float = 100e6) -> None:
        self._delay, self._rate = delay, rate
        self.up, self.carried, self.lost = True, 0, 0
        """Packets on their way count as carried; `up = False` loses those that come."""
        self._over = threading.Event()
        tag = os.getpid()
        self.hosts = [Host(f"od{tag}{letter}", f"10.77.0.{i}") for i, letter in enumerate("ab", 1)]

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
