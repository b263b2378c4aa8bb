"""A Ray cluster of network namespaces, a head and further nodes, each with a /tmp/ray of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import hosts
from hosts import Host, Switch
from waiting import until

from distill.launch.cluster import HEALTH

ROOT = Path(__file__).parent.parent.parent
PORT: Final = 6379
START_SECONDS = 120.0
_OWN: Final = ("DISTILL_TOKEN", "OMP_NUM_THREADS")
"""Variables that the machines of a cluster are not to have from whoever runs the tests."""
_MOUNT = 'mount --bind "$0" /tmp/ray && exec "$@"'


def missing() -> str | None:
    """Why there can be no such cluster here; None: there can."""
    if importlib.util.find_spec("ray") is None:
        return "the package ray is missing (make .venv-ray)"
    return hosts.missing()


class RayHosts:
    """`gpus` of each host that Ray is told of, the head first. Use it inside `with`."""

    def __init__(self, folder: Path, gpus: list[int]) -> None:
        self._folder, self._gpus = folder, gpus
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text("a token of the tests\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in _OWN},
            "PYTHONPATH": str(ROOT),
            "DISTILL_TOKEN_FILE": str(self._token),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
        }
        Path("/tmp/ray").mkdir(exist_ok=True)
        self._switch = Switch(len(gpus))
        self.hosts = self._switch.hosts
        self.address = f"{self.hosts[0].address}:{PORT}"

    def __enter__(self) -> RayHosts:
        try:
            for index in range(len(self.hosts)):
                self.start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.__exit__()

    def command(self, host: Host, line: list[str]) -> list[str]:
        """`line` as it is run on a host, with that host's /tmp/ray."""
        own = self._folder / host.name
        own.mkdir(exist_ok=True)
        return host.command(["sh", "-c", _MOUNT, str(own), *line])

    def start(self, index: int) -> None:
        """Start Ray on a host where it does not run; returns when the host is in the cluster."""
        host = self.hosts[index]
        log = self._folder / f"{host.name}.log"
        head = ["--head", f"--port={PORT}"] if index == 0 else [f"--address={self.address}"]
        line = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *head]
        line += [f"--node-ip-address={host.address}", "--num-cpus=1", f"--num-gpus={self._gpus[index]}"]
        line += ["--disable-usage-stats", "--object-store-memory=80000000"]
        line += ["--include-dashboard=false"] if index == 0 else []
        environment = self.environment | HEALTH | {"RAY_memory_monitor_refresh_ms": "0"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(host, line),
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(lambda: "Ray runtime started" in log.read_text(), START_SECONDS, log.read_text, process)

    def kill(self, index: int) -> None:
        """SIGKILL a host's raylet."""
        for process in self.hosts[index].processes():
            if process.name() == "raylet":
                process.kill()
