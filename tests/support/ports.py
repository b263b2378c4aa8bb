"""Ports for servers that a test starts."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(15_000, 32_000)
"""No outgoing connection is given one of these, so a port that was free stays free until its server binds."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on; two calls hardly ever give the same."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
