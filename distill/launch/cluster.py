"""The seam between a run and the engine that starts its processes: here, by srun, or by Ray.

A launcher supervises local children, always. On a cluster each child is a client of the engine (`srun …`, or
`python -m distill.launch.ray_role …`) that starts the role's command on the machines it was placed on, shows
its output, passes on TERM, ends with its exit status, and takes everything down when it is killed itself. So
there is one supervisor, whatever the engine. The role's command is the one that a user types, with the run's
folder; its server registers with the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from distill.config import RunConfig
from distill.config.cluster import ExternalCluster, LocalCluster, RayCluster, SlurmCluster
from distill.launch.ray_cluster import Ray
from distill.launch.roles import DISTILL, Plan, Ports, plan_servers, role_words
from distill.launch.run_folder import RunFolder
from distill.launch.slurm.allocation import Slurm
from distill.launch.supervise import ChildSpec
from distill.preflight_checks.placement import Node, lines, needs, place
from distill.registry import expected_servers
from distill.topology import TRAINER, Process, places
from sync.base import secrets
from sync.base.address import WILDCARDS, is_loopback, token_from_environment
from sync.base.mounts import network_mount


class Cluster(Protocol):
    """An engine, for as long as a run lasts."""

    host: str
    """Address of this machine that the others reach."""
    nodes: list[Node]
    """The machines that a run may use, the controller's first."""
    env: Mapping[str, str]
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
    """Which processes this launcher starts and where all servers are, or will register.

    On a cluster the controller listens where its machines reach it, unless it has an address of its own.
    Raises ConfigError for what does not fit.
    """
    if engine is not None:
        if is_loopback(config.controller.host) or config.controller.host in WILDCARDS:
            config = config.with_(controller={"host": engine.host})
        return config, plan(config, engine, folder.keep_token(token), say)
    if config.cluster.type == "external":
        return config, registered(config, say)
    if token is not None and (token_from_environment() is None or network_mount(folder.path)):
        folder.keep_token(token)  # for `distill why`, and readers of the record
    return config, plan_servers(config, token, ports)


def registered(config: RunConfig, say: Callable[[str], None]) -> Plan:
    """Servers by `urls`, else as they will register; starts none. `say` gets a line with their names."""
    expected = expected_servers(config)
    machines = [f"{config.trainer.nodes} x distill train"] if config.controller.trainer == "external" else []
    if names := [*expected, *machines]:
        say(f"expected to register within {config.run.start_seconds:g} s: {', '.join(names)}")
    return Plan(places(config, expected), expected=expected)


def plan(config: RunConfig, engine: Cluster, env: Mapping[str, str], say: Callable[[str], None]) -> Plan:
    """The same, with a client of the engine for every process; `say` gets a line for each machine.

    `env`: of every role, over what its machine has. Raises ConfigError for what does not fit.
    """
    role_needs = needs(config, any(node.gpus for node in engine.nodes))
    where = place(role_needs, engine.nodes)
    for line in lines(where, role_needs):
        say(line)
    env = {**env, **secrets.environment(config.model_dump(mode="json"))}
    roles = registered(config, say)
    for need in role_needs:
        name, argv = need.name, [*DISTILL, *role_words(config, need.section, need.index)]
        client = engine.client(need, where[name], argv, env)
        spec = ChildSpec(name, client, {**env, **engine.env}, roles.expected.get(name), ends=name == TRAINER)
        roles.children.append(spec)
    return roles
