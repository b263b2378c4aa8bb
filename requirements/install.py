"""Install a lock into this interpreter's environment: python requirements/install.py LOCK

With uv, from where pip is configured to install from: half a minute where pip takes three. What uv cannot do
is left to pip, with a message.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
FLAGS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
"""uv's name of each of pip's options."""
SCOPES = ("global", "user", "site", ":env:")
"""Of pip's settings; a later one wins."""


def with_uv(lock: str) -> bool:
    """Whether uv, installed first, has installed all of `lock`."""
    if subprocess.run([*PIP, "install", "--quiet", "uv"], check=False).returncode != 0:
        return False
    said = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    lines = [line.partition("=") for scope in SCOPES for line in said.splitlines() if line.startswith(scope)]
    configured = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in lines}
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match"]  # as pip: the version counts, not which index has it
    command += ["--compile-bytecode"]  # as pip; an engine imports thousands of modules at every start
    for name, flag in FLAGS.items():
        command += [word for place in configured.get(name, "").split() for word in (flag, place)]
    certificate = {"SSL_CERT_FILE": configured["cert"]} if "cert" in configured else {}
    command += ["--no-deps", "-r", lock]
    return subprocess.run(command, env={**os.environ, **certificate}, check=False).returncode == 0


def main(lock: str) -> int:
    """Exit status of the installer."""
    if with_uv(lock):
        return 0
    sys.stderr.write("uv did not install the lock (see above): pip does, which takes minutes\n")
    return subprocess.run([*PIP, "install", "--quiet", "--no-deps", "-r", lock], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
