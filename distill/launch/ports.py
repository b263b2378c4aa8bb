"""Which port each server of a run listens on. A port is held from its choice on, so nobody else gets it."""

from __future__ import annotations

import errno
import os
import socket

from sync.errors import ConfigError
from sync.server import bind_alone


class Ports:
    """Hands out ports, none twice. Use inside `with` for as long as servers are started on them.

    What is held never listens. A server of the same user joins the port with SO_REUSEPORT
    (`sync.server.join_port`); for everybody else it is in use, also while the server is started again.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str, port: int, owner: str) -> int:
        """`port`, or any free one for 0. Raises ConfigError, naming setting `owner`, when it is in use."""
        try:
            held = bind_alone(host, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(_explain(error, host, port, owner)) from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.append(held)
        return int(held.getsockname()[1])

    def keep_through_exec(self) -> None:
        """Hold what was handed out until the program ends that replaces this one."""
        for held in self._held:
            os.set_inheritable(held.detach(), True)

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()


def _explain(error: Exception, host: str, port: int, owner: str) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{owner}: port {port} of {host} is in use: choose another one, or 0 for any free one"
    return f"{owner}: cannot listen on {host} port {port} ({error}): choose an address of this machine"
