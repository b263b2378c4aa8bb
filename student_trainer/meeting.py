"""Where the ranks meet, for deepspeed.init_distributed.

On one machine they meet at the launcher's file, so that nothing listens. On several they meet at rank 0's
MASTER_ADDR:MASTER_PORT, as the deepspeed launcher says. torch's own store would listen there on every
interface, and it obeys whoever connects: here it listens on that one address. docs/operations.md has the rule
for the firewall.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from student_trainer.launch import RENDEZVOUS
from sync.errors import ConfigError
from sync.server import bind_alone

_SCHEME: Final = "own-address"


def meeting_point() -> dict[str, Any]:
    """Arguments of init_distributed; none where a launcher other than deepspeed's has a store of its own."""
    if "RANK" not in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    rank, size = _rank()
    return {"init_method": os.environ.get(RENDEZVOUS, f"{_SCHEME}://"), "rank": rank, "world_size": size}


def _rank() -> tuple[int, int]:
    """This rank and how many there are, as the launcher says."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _at_own_address(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[TCPStore, int, int]]:
    """torch's rendezvous handler: its store, on a socket that is bound to one address."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = _rank()
    listening = _listening(host, port) if rank == 0 else None
    yield TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=listening), rank, size


def _listening(host: str, port: int) -> int:
    try:
        listener = bind_alone(host, port)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror}): ranks meet at an address of its "
            'machine: name it with trainer.launcher_args = ["--master_addr", ADDRESS]'
        ) from error
    listener.listen()
    return listener.detach()


register_rendezvous_handler(_SCHEME, _at_own_address)
