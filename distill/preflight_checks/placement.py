"""Which machines of a cluster each process of a run gets: computed once, before anything starts.

Processes that need the most GPUs are placed first, each on the machine with the fewest left that still holds
it; a GPU belongs to one process alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from distill.config import RunConfig
from distill.config.cluster import LocalCluster, RayCluster, SlurmCluster
from distill.preflight_checks.machine import installed_for_cpu
from distill.topology import EACH_NODE, TRAINER, Process, processes
from sync.base.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """One machine of a cluster."""

    name: str
    """As its engine calls it."""
    gpus: int
    cpus: int


def needs(config: RunConfig, gpus: bool) -> list[Process]:
    """Every process that a run starts; `gpus`: whether the cluster's machines have any.

    A process with `devices` has those. Replicas on a partition of their own are started by Slurm. Raises
    ConfigError for `devices` on machines that Slurm or Ray shares out.
    """
    cluster, needed = config.cluster, list[Process]()
    elsewhere = isinstance(cluster, SlurmCluster) and cluster.replica_partition is not None
    for process in processes(config, gpus):
        section, of_trainer = process.section, process.section == TRAINER
        if process.url or (elsewhere and section == "student"):
            continue
        if of_trainer and config.controller.trainer != "launch":
            continue
        devices = config.trainer.devices if of_trainer else config.places()[section].devices
        if devices and isinstance(cluster, SlurmCluster | RayCluster):
            raise ConfigError(
                f"{section}.devices = {devices!r}: on a cluster its engine says which GPUs a process has; "
                f"leave it out, {'trainer.ranks' if of_trainer else f'{section}.gpus'} is how many"
            )
        needed.append(process)
    return needed


def place(role_needs: Iterable[Process], nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """A machine for every process. Raises ConfigError, naming what does not fit.

    Processes without GPUs go where the fewest processes are.
    """
    free = {node.name: node.gpus for node in nodes}
    load = dict.fromkeys(free, 0)
    placed: dict[str, list[Node]] = {}
    for need in sorted(role_needs, key=lambda role: (-role.gpus * role.nodes, -role.gpus)):
        fitting = sorted(
            (node for node in nodes if free[node.name] >= need.gpus),
            key=lambda node: (free[node.name] if need.gpus else 0, load[node.name]),
        )
        if len(fitting) < need.nodes:
            left = ", ".join(f"{name} {count}" for name, count in free.items())
            many = _count(need.gpus)
            if need.nodes > 1:
                many = f"{need.nodes} machines with {many} each"
            raise ConfigError(
                f"{need.name} needs {many}, and the machines have left: {left}. Add machines, or take less "
                "(replicas, gpus, trainer.ranks, trainer.nodes)"
            )
        placed[need.name] = fitting[: need.nodes]
        for node in placed[need.name]:
            free[node.name] -= need.gpus
            load[node.name] += 1
    return placed


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def lines(placed: Mapping[str, Sequence[Node]], role_needs: Iterable[Process]) -> list[str]:
    """The placement for people, a line for each machine."""
    gpus = {need.name: need.gpus for need in role_needs}
    by_node: dict[str, list[str]] = {}
    for process, nodes in placed.items():
        for node in nodes:
            by_node.setdefault(node.name, []).append(
                f"{process} ({_count(gpus[process])})" if gpus[process] else process
            )
    return [f"{node}: {', '.join(sorted(names))}" for node, names in sorted(by_node.items())]


def placed(config: RunConfig) -> tuple[list[Process], list[str]]:
    """Every process of a run on its machine with the GPUs that it has there, and a line for each machine.

    GPUs of a cluster are numbered machine by machine from 0 on. Where the machines are not known yet, each
    process has one of its own, and there are no lines. Raises ConfigError when the run does not fit.
    """
    cluster, where, told = config.cluster, dict[str, list[Node]](), list[str]()
    if isinstance(cluster, LocalCluster):
        return processes(config), told
    if isinstance(cluster, SlurmCluster):
        reserved, gpus = cluster.nodes * cluster.gpus_per_node, cluster.gpus_per_node > 0
        role_needs = needs(config, gpus)
        machines = [
            Node(f"machine {i}", cluster.gpus_per_node, cluster.cpus_per_node) for i in range(cluster.nodes)
        ]
        where, used = place(role_needs, machines), sum(need.gpus * need.nodes for need in role_needs)
        told = [*lines(where, role_needs), f"GPUs: {used} used of {reserved} reserved"]
        role_needs = needs(config.with_(cluster={"replica_partition": None}), gpus)
    else:
        role_needs = needs(config.with_(controller={"trainer": "launch"}), gpus=not installed_for_cpu())
    free: dict[str, Iterator[int]] = defaultdict(count)
    started: dict[str, Process] = {}
    for need in role_needs:
        for machine in [node.name for node in where.get(need.name, ())] or [f"the machine of {need.name}"]:
            names = tuple(str(number) for number in islice(free[machine], need.gpus))
            host = machine if need.nodes == 1 else EACH_NODE
            started[need.name] = replace(need, host=host, devices=names)
    unknown = [process if process.url else replace(process, devices=()) for process in processes(config)]
    return [started.get(process.name, process) for process in unknown], told
