"""Ports that servers listen on, and keeping what torch and vLLM open among themselves on loopback."""

from __future__ import annotations

import errno
import socket
from typing import Final

from starlette.types import ASGIApp

from sync.errors import ConfigError

ON_LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""Environment of a process that has to do with this machine alone: where gloo and vLLM listen."""
NCCL_ON_LOOPBACK: Final = {"NCCL_SOCKET_IFNAME": "lo"}
"""The same for NCCL, where no broadcast leaves this machine either."""


def serve_app(app: ASGIApp, host: str, port: int, grace: int) -> None:
    """Answer on a port that a launcher may hold, until SIGTERM or SIGINT and `grace` seconds more.

    Raises ConfigError when another server has the port.
    """
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace)
    uvicorn.Server(config).run(sockets=[join_port(host, port)])


def bind_alone(host: str, port: int) -> socket.socket:
    """A socket on a port that nobody has; connections that an earlier server left behind do not count.

    Raises OSError, or OverflowError for a number that is no port.
    """
    for reuse in (0, 1):
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            if reuse or error.errno != errno.EADDRINUSE:
                raise
        except OverflowError:
            bound.close()
            raise
        else:
            break
    return bound


def join_port(host: str, port: int) -> socket.socket:
    """A socket to listen with, on a port that nobody else listens on; see `distill.launch.roles.Ports`.

    Raises ConfigError when somebody does.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    joined = socket.socket(family)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        joined.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        joined.bind((host, port))
        with socket.socket(family) as probe:  # servers that share a port share its calls
            if port and probe.connect_ex((host, port)) == 0:
                raise OSError(errno.EADDRINUSE, "another server answers there")
    except OSError as error:
        joined.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another port") from None
    return joined
