"""Ranks on several machines: what a hostfile must say, and what the other machines must be told.

The deepspeed launcher starts ranks elsewhere over ssh and hands on only the environment variables it is told
to, on a command line that everybody on those machines can read. Settings travel that way; secrets do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sync.client import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, is_loopback
from sync.errors import ConfigError
from sync.secrets import is_secret, redact

ENVIRONMENT_VARIABLE: Final = "DS_ENV_FILE"
"""Names the file of further variables to the deepspeed launcher."""
_ENTRY: Final = re.compile(r"(\S+)\s+slots=\d+")
HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine."""


def read_hosts(hostfile: Path) -> list[str]:
    """Names of the machines in a DeepSpeed hostfile, one `NAME slots=N` a line. Raises ConfigError.

    The launcher itself takes this machine alone when the file is missing.
    """
    try:
        lines = hostfile.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"trainer.hostfile {hostfile} cannot be read: {error.strerror}") from None
    hosts: list[str] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            raise ConfigError(f"{hostfile}:{number}: {line!r} is no entry: write NAME slots=N")
        if entry[1] in hosts:
            raise ConfigError(f"{hostfile}:{number}: {entry[1]} stands there twice: add its slots up")
        hosts.append(entry[1])
    if not hosts:
        raise ConfigError(f"trainer.hostfile {hostfile} names no machine: write NAME slots=N, one a line")
    return hosts


def check_reach(hostfile: Path, controller_url: str, environment: Mapping[str, str]) -> None:
    """Refuse what ranks on other machines could not use. Raises ConfigError."""
    if set(read_hosts(hostfile)) <= HERE:
        return
    if is_loopback(urlsplit(controller_url).hostname or ""):
        raise ConfigError(
            f"trainer.hostfile names other machines, and {controller_url} is this machine's loopback: set "
            "controller.host to an address that they reach (or controller.url)"
        )
    if environment.get(TOKEN_VARIABLE) and not environment.get(TOKEN_FILE_VARIABLE):
        raise ConfigError(
            f"trainer.hostfile names other machines, and {TOKEN_VARIABLE} does not reach them, for the "
            "launcher would show it on its command line: put the token into a file that every machine can "
            f"read, mode 600, and set {TOKEN_FILE_VARIABLE} to its path instead"
        )


def write_environment(path: Path, variables: Mapping[str, str]) -> Path:
    """Write what the launcher hands on to every rank; `path`. Raises ConfigError for a secret among it."""
    for name, value in variables.items():
        if is_secret(name) or redact(value) != value:
            raise ConfigError(
                f"trainer.env.{name} looks like a secret, and the launcher would show it on its command line "
                "on every machine of the hostfile: set it in the environment of each machine instead"
            )
        if "\n" in value:
            raise ConfigError(f"trainer.env.{name} has a line break, which the launcher cannot hand on")
    path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path.absolute()
