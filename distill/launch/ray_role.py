"""Run a command on machines of a Ray cluster, as a local process that a launcher supervises; without one,
print the machines that are alive as JSON, this one first:

    python -m distill.launch.ray_role ORDER          an `Order`, as JSON

    this client ──Ray──▶ an actor on each machine ──▶ guardian ──▶ COMMAND

    COMMAND ends         → the client ends with its status; of several, with the first that is not 0
    one of several ends  → the others are killed: at once, or after ORDERLY_SECONDS when its status is 0
    SIGTERM, SIGINT      → SIGTERM to every COMMAND; the client waits for them
    the client is killed → Ray ends the actors, and the guardians kill everything below them
    a machine is lost    → the client ends with status LOST; started again, it takes another machine that fits

No COMMAND is asked to leave in order but by the client's SIGTERM: a trainer would end the run.

Values of variables travel in calls to the actors, never on a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from distill.launch.ray_actor import CALLS, RoleActor
from sync.base.errors import ConfigError
from sync.base.secrets import redact_process

AUTH_MODE: Final = "RAY_AUTH_MODE"
CONNECT_SECONDS: Final = 10.0
NODE_LABEL: Final = "ray.io/node-id"
"""Label by which Ray knows each machine."""
NODE_INDEX_VARIABLE: Final = "DISTILL_NODE_INDEX"
"""Tells a command that runs on several machines which one it is on."""
LOST: Final = 128 + signal.SIGKILL
"""Exit status when a machine or an actor is gone: a supervisor restarts what was killed."""
ORDERLY_SECONDS: Final = 60.0
"""For the others to end by themselves, when one of several has ended with status 0."""
START_SECONDS: Final = 180.0
"""An actor, with its machine's Python, has so long to start."""
PINNED_SECONDS: Final = 60.0
"""A machine has so long to have its GPUs free; then any other will do."""
_LOOK_SECONDS: Final = 1.0
_WORKER = {"RAY_kill_child_processes_on_worker_exit": "false"}
"""Else Ray kills a guardian with its actor, and what is below it stays."""


@dataclass(frozen=True)
class Order:
    """What this program is told."""

    address: str
    """HOST:PORT of the cluster."""
    name: str = ""
    """The role's."""
    nodes: Sequence[str] = ()
    """Machines, as `alive` names them: wanted, one for each command; none: they are to be listed."""
    gpus: int = 0
    """On each of them."""
    env: Sequence[str] = ()
    """Variables of this process that the command is given."""
    argv: Sequence[str] = ()


def say(text: str) -> None:
    """A line of this client among the role's."""
    sys.stdout.buffer.write(f"ray: {text}\n".encode())
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to the cluster at host:port and never to another. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:  # Ray itself would try for a minute
        if not host:
            raise ValueError("no port")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address {address}: no Ray cluster is there ({error}): write HOST:PORT as `ray start "
            "--head` prints it, or leave cluster.address out and a run starts one on its own machine"
        ) from None
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:  # Ray's own are RuntimeErrors
        raise ConfigError(
            f"cluster.address {address}: Ray does not let this process in ({error}). This machine must be in "
            f"the cluster (`ray start --address={address}`), with the same {AUTH_MODE}, token and version "
            "of Ray"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def alive(ray: Any) -> dict[str, dict[str, Any]]:
    """Name → what Ray says of each machine that is alive, the one of this process first.

    The name is Ray's own, by default its address; its id where another machine has the same name.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeName"]))
    count = Counter(node["NodeName"] for node in nodes)
    return {node["NodeName"] if count[node["NodeName"]] == 1 else node["NodeID"]: node for node in nodes}


def listing(ray: Any) -> list[dict[str, Any]]:
    """Name, address and resources of each of `alive`."""
    return [
        {
            "name": name,
            "address": node["NodeManagerAddress"],
            "gpus": int(node["Resources"].get("GPU", 0)),
            "cpus": int(node["Resources"].get("CPU", 0)),
        }
        for name, node in alive(ray).items()
    ]


async def reserve(ray: Any, order: Order) -> Any:
    """A placement group with a bundle for each machine, on those that are wanted as far as they can be had.

    Waits until the cluster has room.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    each = {"GPU": order.gpus} if order.gpus else {"CPU": 0.001}  # a bundle must ask for something
    deadline = time.monotonic() + PINNED_SECONDS
    while True:
        pinned, why = _pins(ray, order, time.monotonic() > deadline)
        if why:
            say(f"{order.name} takes another machine: {why}")
        free = [{NODE_LABEL: f"!in({','.join(pinned)})"} if pinned else {}] * (len(order.nodes) - len(pinned))
        group = placement_group(
            [each] * len(order.nodes),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[*({NODE_LABEL: node} for node in pinned), *free],
        )
        while _pins(ray, order, time.monotonic() > deadline)[0] == pinned:
            if await asyncio.to_thread(group.wait, _LOOK_SECONDS):
                return group
        remove_placement_group(group)


def _pins(ray: Any, order: Order, late: bool) -> tuple[list[str], str]:
    """Ids of those machines that are wanted and can be had, and why others cannot; `late`: none."""
    if late:
        return [], f"{', '.join(order.nodes)} has had no room for {PINNED_SECONDS:.0f} s"
    machines = alive(ray)
    gone = [name for name in order.nodes if name not in machines]
    pinned = [machines[name]["NodeID"] for name in order.nodes if name in machines]
    return pinned, f"{', '.join(gone)} is not in the cluster" if gone else ""


class End(NamedTuple):
    """How a command ended."""

    status: int
    """Its exit status, or LOST."""
    why: str = ""
    """What else ended it; empty: itself."""


class Remote:
    """One command on one machine, and the actor that holds it."""

    def __init__(self, ray: Any, group: Any, index: int, order: Order) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        env = {name: os.environ[name] for name in order.env}
        paths = {name: value for name, value in env.items() if name == "PYTHONPATH"}
        if len(order.nodes) > 1:
            env[NODE_INDEX_VARIABLE] = str(index)
        self._order, self._env = order, env
        self._errors = ray.exceptions
        self.actor = (
            ray.remote(RoleActor)
            .options(
                num_cpus=0,
                num_gpus=order.gpus,
                max_concurrency=CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                runtime_env={"env_vars": _WORKER | paths},
            )
            .remote()
        )

    async def run(self) -> End:
        """Start it and show what it writes, until it ends or is lost."""
        try:
            async with asyncio.timeout(START_SECONDS):
                sent = self._order.name, self._order.argv, self._env, sys.executable, os.getcwd()
                machine = await self.actor.start.remote(*sent)
            say(f"{self._order.name} runs on {machine}")
            while chunk := await self._output():
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            return End(await self.actor.status.remote())
        except self._errors.RayActorError as error:
            said = str(error).strip().splitlines()[-1].strip().partition(". ")[0]
            return End(LOST, f"is lost with its machine or its actor ({said})")
        except TimeoutError:
            return End(LOST, f"has no actor after {START_SECONDS:.0f} s")
        except self._errors.RayError as error:
            return End(1, f"cannot be started: {error}")

    async def _output(self) -> bytes:
        while True:
            try:
                return await self.actor.output.remote()
            except self._errors.ActorUnavailableError:  # Ray has not given the machine up
                await asyncio.sleep(_LOOK_SECONDS)


async def drive(ray: Any, order: Order) -> End:
    """Run the command on all its machines; the first end that is not in order, else the first."""
    this, remotes = asyncio.current_task(), list[Remote]()
    assert this is not None, "runs in a task"

    def end() -> None:
        for remote in remotes:
            remote.actor.terminate.remote()
        if not remotes:
            this.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        group = await reserve(ray, order)
    except asyncio.CancelledError:
        return End(128 + signal.SIGTERM)
    remotes += [Remote(ray, group, index, order) for index in range(len(order.nodes))]
    running = [asyncio.create_task(remote.run()) for remote in remotes]
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    ends = [task.result() for task in done]
    if left and not any(end.status for end in ends):
        await asyncio.wait(left, timeout=ORDERLY_SECONDS)
    for remote, task in zip(remotes, running, strict=True):
        if not task.done():
            remote.actor.kill.remote()
    ends += await asyncio.gather(*left)
    return next((end for end in ends if end.status), ends[0])


def main() -> int:
    """Exit status of the program."""
    redact_process()
    try:
        order = Order(**json.loads(sys.argv[1]))
        with connected(order.address) as ray:
            if not order.nodes:
                sys.stdout.write(f"{json.dumps(listing(ray))}\n")
                return 0
            end = asyncio.run(drive(ray, order))
    except ConfigError as error:
        sys.stderr.write(f"{'ray: ' * bool(order.nodes)}{error}\n")
        return 2
    if end.why:
        say(f"{order.name} {end.why}")  # last: Ray says much by itself
    return end.status


if __name__ == "__main__":
    sys.exit(main())
