"""The machines of a Ray cluster for a run: an existing cluster, or a head of the run's own on this machine.

This process never connects to Ray itself: a client (`ray_role`) lists the machines, and one for each process
of the run starts it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from distill.config.cluster import RayCluster
from distill.guardian import MODULE
from distill.launch.ray_role import AUTH_MODE
from distill.preflight_checks.placement import Node
from distill.topology import Process
from sync.base.address import TOKEN_FILE_VARIABLE
from sync.base.errors import ConfigError

AUTH_TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"
HEAD: Final = "ray-head"
START_SECONDS: Final = 120.0
"""A head has so long to be up; it takes 5 s on an idle machine."""
LIST_SECONDS: Final = 120.0
"""A cluster has so long to name its machines."""
LOOPBACK: Final = "127.0.0.1"
HEALTH: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Variables of a cluster's head that have a machine which is cut off given up within 12 s, not a minute."""
_ALONE: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray replaces 127.0.0.1 by this machine's own address
    "RAY_memory_monitor_refresh_ms": "0",  # the kernel alone kills for memory, as without Ray
    **HEALTH,
}
_HEAD: Final = (
    "start --head --block --port=0 --include-dashboard=false --disable-usage-stats "
    f"--min-worker-port=0 --max-worker-port=0 --object-store-memory=80000000 --node-ip-address={LOOPBACK}"
).split()
_CLIENT: Final = (sys.executable, "-P", "-m", "distill.launch.ray_role", "--address")


class Ray:
    """Implements `Cluster`. Use inside `with`; a head of its own ends there, or with this process."""

    def __init__(self, config: RayCluster) -> None:
        """Raises ConfigError without Ray, and for a variable of `env` that is not set."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                'cluster.type = "ray" needs the package ray, on every machine: pip install '
                "'onpolicy-distill[ray]'"
            )
        if missing := [name for name in config.env if name not in os.environ]:
            raise ConfigError(
                f"cluster.env names {', '.join(missing)}, not set here: set it, or leave it out"
            )
        self._config, self._leaving = config, ExitStack()
        self._address, self.host = config.address or "", ""
        self.nodes, self.env = list[Node](), dict[str, str]()

    def __enter__(self) -> Ray:
        """Ray takes this project's token file, unless RAY_AUTH_MODE is set.

        Raises ConfigError when a head cannot be started, or a cluster does not answer.
        """
        with self._leaving:
            if self._config.address is None:
                self._start_head()
            elif (path := os.environ.get(TOKEN_FILE_VARIABLE)) and AUTH_MODE not in os.environ:
                self.env = {AUTH_MODE: "token", AUTH_TOKEN_PATH: path}
            machines = self._machines()
            self.host = str(machines[0]["address"])
            self.nodes = [Node(machine["name"], machine["gpus"], machine["cpus"]) for machine in machines]
            self._leaving = self._leaving.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def _machines(self) -> list[dict[str, Any]]:
        """What a client without a command prints."""
        env = {**os.environ, **self.env}
        line = [*_CLIENT, self._address]
        try:
            done = subprocess.run(
                line, env=env, capture_output=True, text=True, timeout=LIST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the Ray cluster at {self._address} has not named its machines within {LIST_SECONDS:.0f} s: "
                "see its logs, in /tmp/ray of its head"
            ) from None
        if done.returncode != 0:
            raise ConfigError(done.stderr.strip())
        machines: list[dict[str, Any]] = json.loads(done.stdout)
        return machines

    def client(
        self, need: Process, nodes: Sequence[Node], argv: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """See `Cluster`. Values of variables stay in the environment that the client is started with."""
        inherited = {name for name in os.environ if name.startswith("HF_") or name == TOKEN_FILE_VARIABLE}
        line = [*_CLIENT, self._address, "--name", need.name]
        line += ["--nodes", ",".join(node.name for node in nodes)]
        line += ["--gpus", str(need.gpus), "--env", ",".join(sorted({*env, *self._config.env, *inherited}))]
        return [*line, "--", *argv]

    def _start_head(self) -> None:
        """A cluster of this machine alone, on loopback, with a token that only this user can read."""
        folder = Path(self._leaving.enter_context(tempfile.TemporaryDirectory(prefix="distill-ray-")))
        token, log, address = folder / "token", folder / "head.log", folder / "ray_current_cluster"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        self.env = {**_ALONE, AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", *_HEAD]
        with socket.socket() as probe:  # of a server that Ray starts unasked, at a port that may be taken
            probe.bind((LOOPBACK, 0))
            ray += [f"--temp-dir={folder}", f"--ray-client-server-port={probe.getsockname()[1]}"]
        read_end, write_end = os.pipe()
        with log.open("wb") as output:
            head = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, HEAD, str(read_end), *ray],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.env},
                pass_fds=(read_end,),
                start_new_session=True,
            )

        def end() -> None:
            os.write(write_end, b"k")
            head.wait()
            os.close(write_end)
            os.close(read_end)

        self._leaving.callback(end)
        deadline = time.monotonic() + START_SECONDS
        while not (address.is_file() and address.read_text()):
            if head.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"Ray cannot be started on this machine:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        self._address = address.read_text().strip()
