"""The Slurm job that this process is in: its machines, and the command of a step on some of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from distill.config.cluster import SlurmCluster
from distill.launch.slurm import step
from distill.preflight_checks.placement import Node
from distill.topology import Process
from sync.base.address import own_address
from sync.base.errors import ConfigError, RemoteError

GANG_WAIT_SECONDS: Final = 10
"""From the first orderly end among the machines of one process to the end of the others."""
_COMMAND_SECONDS: Final = 120.0


class Slurm:
    """A `Cluster` inside an allocation."""

    env: Final = dict[str, str]()

    def __init__(self, settings: SlurmCluster) -> None:
        """Raises ConfigError outside of a job, and in one with less than `settings` say, and RemoteError when
        scontrol fails."""
        self._settings = settings
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
