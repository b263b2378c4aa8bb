"""Which port each server of a run listens on."""

from __future__ import annotations

import errno
import socket

from sync.errors import ConfigError


class Ports:
    """Hands out ports, none twice. Use inside `with`: what was handed out is free again only at its end."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str, port: int, owner: str) -> int:
        """`port`, or any free one for 0. Raises ConfigError, naming setting `owner`, when it is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except (OSError, OverflowError) as error:
            held.close()
            raise ConfigError(_explain(error, host, port, owner)) from None
        self._held.append(held)
        return int(held.getsockname()[1])

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()


def _explain(error: Exception, host: str, port: int, owner: str) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{owner}: port {port} of {host} is in use: choose another one, or 0 for any free one"
    return f"{owner}: cannot listen on {host} port {port} ({error}): choose an address of this machine"
