"""A real Slurm whose machines are all this one: munged, slurmctld and a slurmd for each node, on loopback.

It needs Debian's slurm-wlm and munge, and root, which makes the device files that stand for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ports import free_port
from waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
UP_SECONDS = 30.0
REQUEUE_SECONDS = 5
"""How long a requeued job waits: the life of a credential, 120 s unless it is set."""


def missing() -> str | None:
    """What keeps a local Slurm from running here; None: nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "not root: the devices that stand for GPUs cannot be made"


@dataclass(frozen=True)
class LocalSlurm:
    """A cluster that is up. Every command needs `environment`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        return {**{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}, **ours}

    def call(self, *words: str) -> str:
        """Standard output of a Slurm command. Raises CalledProcessError."""
        return subprocess.run(
            words, env=self.environment, check=True, timeout=60, capture_output=True, text=True
        ).stdout.strip()

    def state(self, job: str) -> str:
        """Such as "RUNNING"; also of a job that ended, for Slurm's five minutes."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)["JobState"]

    def steps(self, job: str) -> list[str]:
        """Names of the steps that run, sorted."""
        found = self.call("squeue", "--steps", "--noheader", "--format=%i %j", f"--jobs={job}")
        pairs = (line.split() for line in found.splitlines())
        return sorted(name for step, name in pairs if step.rsplit(".", 1)[-1].isdigit())


@contextlib.contextmanager
def local_slurm(folder: Path, nodes: int, gpus: int, cpus: int) -> Iterator[LocalSlurm]:
    """A cluster of so many nodes, each with so many pretended GPUs; nothing of it is left."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    names = [f"node{index}" for index in range(nodes)]
    _write_configuration(folder, names, gpus, cpus)
    commands = {
        "munged": ["munged", "--foreground", "--force", *_munge_files(folder)],
        "slurmctld": ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        **{name: ["slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf")] for name in names},
    }
    daemons: list[subprocess.Popen[bytes]] = []
    cluster = LocalSlurm(folder)
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.out").open("ab") as output:
                options = {**streams, "stdout": output, "env": cluster.environment}
                daemons.append(subprocess.Popen(command, start_new_session=True, **options))
            if name == "munged":
                until((folder / "munge.socket").exists, UP_SECONDS)
        until(lambda: _idle(cluster) == nodes, UP_SECONDS, lambda: f"see {folder}/*.log", poll_seconds=0.2)
        yield cluster
    finally:
        _end(cluster, daemons)


def _write_configuration(folder: Path, names: list[str], gpus: int, cpus: int) -> None:
    controller, *ports = (free_port() for _ in range(1 + len(names)))
    (folder / "state").mkdir(exist_ok=True)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    for index in range(gpus):
        os.mknod(folder / f"nvidia{index}", 0o20666, os.makedev(1, 3))
    gres = f"Name=gpu File={folder}/nvidia[0-{gpus - 1}] Flags=nvidia_gpu_env\n"
    (folder / "gres.conf").write_text(gres)
    node = f"CPUs={cpus} RealMemory={psutil.virtual_memory().total >> 20} Gres=gpu:{gpus}"
    lines = [
        "ClusterName=local",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmctldPort={controller}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket,cred_expire={REQUEUE_SECONDS}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "GresTypes=gpu",
        "SlurmdParameters=config_overrides",
        "SlurmctldParameters=preempt_send_user_signal",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0",
        "KillWait=5",
        "SlurmdTimeout=20",
        "ReturnToService=2",
        "JobCompType=jobcomp/none",
        *(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {node}"
            for name, port in zip(names, ports, strict=True)
        ),
        "PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF",
        "PartitionName=spare Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _munge_files(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{end}" for option, end in files.items()]


def _idle(cluster: LocalSlurm) -> int:
    try:
        states = cluster.call("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        return states.split().count("idle")
    except subprocess.CalledProcessError:  # the controller is not up yet
        return 0


def _end(cluster: LocalSlurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Cancel every job, end the daemons, kill what has this cluster's configuration in its environment."""
    with contextlib.suppress(subprocess.SubprocessError):
        cluster.call("scancel", "--state=PENDING", "--user=root")
        cluster.call("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            until(lambda: not cluster.call("squeue", "--noheader"), 15.0)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    configuration = cluster.environment["SLURM_CONF"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == configuration:
                process.kill()
