"""Where a server may be reached, and the bearer token that it asks for."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Final

import httpx
from pydantic import AfterValidator

from sync.base.errors import ConfigError

TOKEN_VARIABLE: Final = "DISTILL_TOKEN"
"""Environment variable that carries the bearer token; never a flag, never in a file of the run."""
TOKEN_FILE_VARIABLE: Final = "DISTILL_TOKEN_FILE"
"""Path of a file that holds the bearer token, where the variable itself does not reach."""
CONTROLLER_FILE: Final = "controller.json"
"""In a run's folder: {"url": where its controller is}."""
TOKEN_FILE: Final = "token"
"""In the folder of a run on several machines, or that only its controller reads: the token, mode 600."""


WILDCARDS: Final = ("0.0.0.0", "::")
"""Addresses to listen on that nobody reaches."""


def url_problem(url: str) -> str | None:
    """What keeps HTTP from reaching a server at `url`, and the remedy; None: nothing."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"not a server's URL ({error}): write http://host:port"
    if parts.scheme not in ("http", "https") or not parts.host or parts.port not in (None, *range(1, 65536)):
        return "not a server's URL: write http://host:port"
    return None


def checked_url(url: str, name: str = "URL") -> str:
    """`url` itself. Raises ConfigError when no server can be there."""
    if problem := url_problem(url):
        raise ConfigError(f"{name} {url!r} is {problem}")
    return url


def _in_settings(url: str) -> str:
    if problem := url_problem(url):
        raise ValueError(problem)  # without the URL: the caller redacts it
    return url


def _host(host: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", host) or re.fullmatch(r"[\d.]+", host):
        ipaddress.ip_address(host)  # raises ValueError
    return host


Url = Annotated[str, AfterValidator(_in_settings)]
"""A field of a configuration that names a server."""
Host = Annotated[str, AfterValidator(_host)]
"""A field of a configuration that says where to listen: a host name, or an address of either kind."""


class Address:
    """Where one server is: a URL that stays, or the one that it registered last and may change."""

    def __init__(self, name: str, url: str | None = None) -> None:
        """`url`: None until it registers. Raises ConfigError for a URL where no server can be."""
        self.name = name
        self.url = None if url is None else checked_url(url).rstrip("/")

    def __str__(self) -> str:
        return self.url or f"{self.name} (not registered)"


Place = str | Address
"""Where a server is: its URL, or an address that registers."""


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen on the way to `host`; nothing is sent. Raises OSError."""
    family, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def own_address(url: str) -> str:
    """The address by which this machine reaches the server at `url`, and others of its network reach it.
    Raises ConfigError when there is no way to that server."""
    parts = httpx.URL(checked_url(url))
    try:
        return address_towards(parts.host, parts.port or 80)
    except OSError as error:
        raise ConfigError(f"{url} cannot be reached from this machine ({error}): give another URL") from None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_from_environment() -> str | None:
    """The bearer token of this process; None when unset or empty. Whitespace around it is no part of it.
    Raises ConfigError for a token file that cannot be read, and for what no HTTP header can carry."""
    token, path = os.environ.get(TOKEN_VARIABLE, "").strip(), os.environ.get(TOKEN_FILE_VARIABLE)
    source = TOKEN_VARIABLE
    if not token:
        if not path:
            return None
        source = f"{TOKEN_FILE_VARIABLE} {path}"
        try:
            token = Path(path).read_bytes().decode("utf-8", "replace").strip()
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
        if not token:
            raise ConfigError(f"{source} is empty: write the token into it")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"the token of {source} has characters other than printable ASCII: make another")
    return token


def token_of_run(run_dir: Path) -> str | None:
    """The bearer token of this process, else the one in a run's folder; None: there is neither."""
    kept = run_dir / TOKEN_FILE
    return token_from_environment() or (kept.read_text().strip() if kept.is_file() else None)


def controller_url(run_dir: Path) -> str:
    """Where a run's controller is, or was when it last started. Raises ConfigError."""
    path = run_dir / CONTROLLER_FILE
    try:
        return str(json.loads(path.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} does not say where the controller is: start `distill run` or `distill control` first, "
            "with controller.url if controller.host is 0.0.0.0, or give its URL with --controller"
        ) from None
