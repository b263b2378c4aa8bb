"""[cluster]: which engine starts the processes of a run, and on which machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sync.base.settings import Settings


class LocalCluster(Settings):
    """Every process on this machine."""

    type: Literal["local"] = "local"


class ExternalCluster(Settings):
    """The controller alone: servers without `urls`, and the trainer's machines, are started elsewhere and
    register; `distill control` sets it."""

    type: Literal["external"]


class SlurmCluster(Settings):
    """Every process as a step of the Slurm job that `distill run` is in; `distill slurm` writes the job."""

    type: Literal["slurm"]
    nodes: int = Field(1, ge=1)
    """Machines of the job."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of each; 0: the run has none."""
    cpus_per_node: int = Field(ge=1)
    """CPUs of each."""
    time: str = "24:00:00"
    """Time limit of the job, in Slurm's form; it is requeued and goes on while the run is not complete."""
    partition: str | None = None
    """Of the job; None: Slurm's default."""
    account: str | None = None
    """That is charged; None: the user's default."""
    replica_partition: str | None = None
    """Preemptible partition for replicas in a job of their own, which may come and go; None: they are in the
    job itself."""
    sbatch: list[str] = []
    """Further options of sbatch for the job itself, such as ["--constraint=h100", "--qos=long"]."""
    setup: str = ""
    """Shell lines of the job before `distill run`, such as "module load cuda"."""


class RayCluster(Settings):
    """Every process in an actor of a Ray cluster (extra `ray`)."""

    type: Literal["ray"]
    address: str | None = None
    """host:port of an existing cluster; None: one is started on this machine, and stopped at the end."""
    env: list[str] = []
    """Names of this process's variables that the roles on other machines are given too, besides the token's
    and Hugging Face's."""


ClusterConfig = Annotated[
    LocalCluster | ExternalCluster | SlurmCluster | RayCluster, Field(discriminator="type")
]
