"""Connect to a Ray cluster; as a program, print the machines that are alive as JSON, this one first:

python -m distill.launch.ray_nodes HOST:PORT
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from sync.base.errors import ConfigError
from sync.base.secrets import redact_process

AUTH_MODE: Final = "RAY_AUTH_MODE"
AUTH_TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"
CONNECT_SECONDS: Final = 10.0
NODE_LABEL: Final = "ray.io/node-id"
"""Label by which Ray knows each machine."""


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


def main() -> int:
    """Exit status of the program."""
    redact_process()
    try:
        with connected(sys.argv[1]) as ray:
            nodes = [
                {
                    "name": name,
                    "address": node["NodeManagerAddress"],
                    "gpus": int(node["Resources"].get("GPU", 0)),
                    "cpus": int(node["Resources"].get("CPU", 0)),
                }
                for name, node in alive(ray).items()
            ]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{json.dumps(nodes)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
