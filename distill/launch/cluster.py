"""The seam between a run and the engine that starts its processes: here, by srun, or by Ray.

A launcher supervises local children, always. On a cluster each child is a client of the engine (`srun …`, or
`python -m distill.launch.ray_role …`) that starts the role's command on the machines it was placed on, shows
its output, passes on TERM, ends with its exit status, and takes everything down when it is killed itself. So
there is one supervisor, whatever the engine. The role's command is the one that a user types, with the run's
folder; its server registers with the controller.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Final, Protocol

from distill.config import RunConfig
from distill.config.cluster import ExternalCluster, LocalCluster, RayCluster, SlurmCluster
from distill.guardian import MODULE
from distill.launch.ray_role import AUTH_MODE, Order
from distill.launch.roles import DISTILL, Plan, Ports, plan_servers, role_words
from distill.launch.run_folder import RunFolder
from distill.launch.slurm import step
from distill.launch.supervise import ChildSpec
from distill.preflight_checks.placement import Node, lines, needs, place
from distill.registry import expected_servers
from distill.topology import TRAINER, Process, places
from sync.base import secrets
from sync.base.address import (
    TOKEN_FILE_VARIABLE,
    WILDCARDS,
    is_loopback,
    own_address,
    token_from_environment,
)
from sync.base.errors import ConfigError, RemoteError
from sync.base.mounts import network_mount


class Cluster(Protocol):
    """An engine, for as long as a run lasts."""

    host: str
    """Address of this machine that the others reach."""
    nodes: list[Node]
    """The machines that a run may use, the controller's first."""
    env: dict[str, str]
    """Variables of its clients alone."""

    def client(
        self, need: Process, nodes: Sequence[Node], argv: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """The command that runs `argv` on `nodes`, once on each, with `env` over their environment.

        With several machines it ends when one of them does, and ends the others. `env` is in its own
        environment too, and may hold secrets: none of it goes on a command line.
        """
        ...


def opened(config: RunConfig) -> AbstractContextManager[Cluster | None]:
    """The engine of a configuration; None: it has none, its processes are here or register. Raises
    ConfigError."""
    match config.cluster:
        case LocalCluster() | ExternalCluster():
            return nullcontext()
        case RayCluster() as settings:
            return Ray(settings)
        case SlurmCluster() as settings:
            return nullcontext(Slurm(settings))


def planned(
    config: RunConfig,
    engine: Cluster | None,
    folder: RunFolder,
    token: str | None,
    ports: Ports,
    say: Callable[[str], None],
) -> tuple[RunConfig, Plan]:
    """Which processes this launcher starts, and where all servers are, or will register.

    On a cluster they are clients of the engine, and the controller listens where its machines reach it,
    unless it has an address of its own. `say` gets a line for each machine, and who is to register. Raises
    ConfigError for what does not fit.
    """
    if config.cluster.type == "local":
        if token is not None and (token_from_environment() is None or network_mount(folder.path)):
            folder.keep_token(token)  # for `distill why`, and readers of the record
        return config, plan_servers(config, token, ports)
    expected = expected_servers(config)
    machines = [f"{config.trainer.nodes} x distill train"] if config.controller.trainer == "external" else []
    names, plan = [*expected, *machines], Plan(places(config, expected), expected=expected)
    told = [f"expected to register within {config.run.start_seconds:g} s: {', '.join(names)}"] * bool(names)
    if engine is None:
        for line in told:
            say(line)
        return config, plan
    if is_loopback(config.controller.host) or config.controller.host in WILDCARDS:
        config = config.with_(controller={"host": engine.host})
    role_needs = needs(config, any(node.gpus for node in engine.nodes))
    where = place(role_needs, engine.nodes)
    for line in [*lines(where, role_needs), *told]:
        say(line)
    env = folder.keep_token(token) | secrets.environment(config.model_dump(mode="json"))
    for need in role_needs:
        name, argv = need.name, [*DISTILL, *role_words(config, need.section, need.index)]
        client, ends = engine.client(need, where[name], argv, env), name == TRAINER
        plan.children.append(ChildSpec(name, client, env | engine.env, expected.get(name), ends=ends))
    return config, plan


# --- Slurm ------------------------------------------------------------------------------------------------

GANG_WAIT_SECONDS: Final = 10
"""From the first orderly end among the machines of one process to the end of the others."""
_COMMAND_SECONDS: Final = 120.0


class Slurm:
    """A `Cluster` inside the Slurm job that this process is in."""

    def __init__(self, settings: SlurmCluster) -> None:
        """Raises ConfigError outside of a job, and in one with less than `settings` say, and RemoteError when
        scontrol fails."""
        self._settings, self.env = settings, dict[str, str]()
        if not (listed := os.environ.get("SLURM_JOB_NODELIST")):
            raise ConfigError(
                'cluster.type is "slurm", and this process is in no Slurm job: submit one with '
                "`distill slurm CONFIG --submit`, or start `distill run` inside salloc"
            )
        names = output_of("scontrol", "show", "hostnames", listed).split()
        if len(names) < settings.nodes:
            raise ConfigError(
                f"cluster.nodes = {settings.nodes}, and the job has {len(names)} ({listed}): ask for as many "
                "with --nodes, or take less"
            )
        gpus, here = os.environ.get("SLURM_GPUS_ON_NODE", "0"), os.environ.get("SLURMD_NODENAME")
        if here is not None and int(gpus) < settings.gpus_per_node:
            raise ConfigError(
                f"cluster.gpus_per_node = {settings.gpus_per_node}, and the job has {gpus} on this machine: "
                f"ask for them with --gres=gpu:{settings.gpus_per_node}"
            )
        cpus = dict(zip(names, cpus_of(os.environ["SLURM_JOB_CPUS_PER_NODE"]), strict=True))
        names.sort(key=lambda name: name != here)
        self.nodes = [Node(name, settings.gpus_per_node, cpus[name]) for name in names]
        there = re.search(r"NodeAddr=(\S+)", output_of("scontrol", "--oneliner", "show", "node", names[-1]))
        self.host = own_address(f"http://{there[1] if there else names[-1]}")

    def client(
        self, need: Process, nodes: Sequence[Node], argv: Sequence[str], env: Mapping[str, str]
    ) -> list[str]:
        """A step of the job. Its environment is this command's, by srun: `env` is there already.

        A step with GPUs has them, and its share of the CPUs, alone; one without shares all CPUs.
        """
        of_each = self._settings.gpus_per_node
        cpus = min(node.cpus for node in nodes)
        if need.gpus:
            share = cpus * need.gpus // of_each
            taken = ["--exact", f"--gres=gpu:{need.gpus}"]
            taken += [f"--cpus-per-task={share - share % 2 or 1}"]  # whole cores of two threads
        else:
            taken = ["--overlap", f"--cpus-per-task={cpus}", *(["--gres=none"] if of_each else [])]
        ours = [sys.executable, "-P", "-m", step.MODULE]
        return [
            *(*ours, step.LAUNCH, "srun"),
            f"--job-name={need.name}",
            f"--nodelist={','.join(node.name for node in nodes)}",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            *taken,
            "--mem=0",  # the job's, together with the other steps
            "--mpi=none",
            "--export=ALL",
            "--input=none",
            "--unbuffered",
            "--kill-on-bad-exit=1",
            f"--wait={GANG_WAIT_SECONDS}",
            *(*ours, step.GUARD, *argv),
        ]


def cpus_of(text: str) -> list[int]:
    """CPUs of each machine from "64(x3),32", as SLURM_JOB_CPUS_PER_NODE has them."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(cpus) for cpus, times in groups for _ in range(int(times or 1))]


def output_of(*command: str, timeout: float | None = _COMMAND_SECONDS) -> str:
    """What a command of Slurm's says. Raises ConfigError where there is none, RemoteError when it fails."""
    line = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not on this machine, for `{line}`: Slurm's commands must be in PATH"
        ) from None
    except subprocess.SubprocessError as error:
        raise RemoteError(f"{line} failed: {str(getattr(error, 'stderr', None) or error).strip()}") from None
    return done.stdout


# --- Ray --------------------------------------------------------------------------------------------------

AUTH_TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"
HEAD_SECONDS: Final = 120.0
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


class Ray:
    """A `Cluster` of Ray: one that exists, or a head of the run's own on this machine, which ends with `with`
    or with this process.

    This process never connects to Ray itself: a client (`ray_role`) lists the machines, and one for each
    process of the run starts it.
    """

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
        line, env = _client(Order(self._address)), {**os.environ, **self.env}
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
        names = sorted({*env, *self._config.env, *inherited})
        machines = [node.name for node in nodes]
        return _client(Order(self._address, need.name, machines, need.gpus, names, argv))

    def _start_head(self) -> None:
        """A cluster of this machine alone, on loopback, with a token that only this user can read."""
        folder = Path(self._leaving.enter_context(tempfile.TemporaryDirectory(prefix="distill-ray-")))
        token, log, address = folder / "token", folder / "head.log", folder / "ray_current_cluster"
        token.touch(mode=0o600)
        token.write_text(token_urlsafe(32))
        self.env = {**_ALONE, AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token)}
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", *_HEAD]
        with socket.socket() as probe:  # of a server that Ray starts unasked, at a port that may be taken
            probe.bind((LOOPBACK, 0))
            ray += [f"--temp-dir={folder}", f"--ray-client-server-port={probe.getsockname()[1]}"]
        read_end, write_end = os.pipe()
        with log.open("wb") as output:
            head = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, "ray-head", str(read_end), *ray],
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
        deadline = time.monotonic() + HEAD_SECONDS
        while not (address.is_file() and address.read_text()):
            if head.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"Ray cannot be started on this machine:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        self._address = address.read_text().strip()


def _client(order: Order) -> list[str]:
    return [sys.executable, "-P", "-m", "distill.launch.ray_role", json.dumps(asdict(order))]
