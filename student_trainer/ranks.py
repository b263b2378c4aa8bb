"""How the ranks meet, what they exchange besides gradients, and how they wait together for disk space.

On one machine they meet at the launcher's file, so that no port is opened. On several they meet at rank 0's
MASTER_ADDR:MASTER_PORT, set by the deepspeed launcher. torch's own store would listen there on every
interface, and it obeys every client: here it listens on that one address. docs/clusters.md has the rule for
the firewall.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from student_trainer.launch import RENDEZVOUS
from sync.base.durable import until_disk_space
from sync.base.errors import ConfigError
from sync.wire.server import join_port

_SCHEME: Final = "own-address"


@dataclass(frozen=True)
class Ranks:
    """This process among its peers; every rank makes the same calls in the same order.

    With a world of 1 nothing is sent, and no process group is needed.
    """

    rank: int
    world_size: int
    device: torch.device

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """A vector of every rank, [world, n], fp64. Collective."""
        sums = values.double().to(self.device)
        if self.world_size == 1:
            return sums.unsqueeze(0)
        every = sums.new_empty((self.world_size, sums.numel()))
        dist.all_gather(list(every.unbind()), sums)
        return every

    def highest(self, value: float) -> float:
        """Largest of a value over the ranks. Collective."""
        return float(self.gather(torch.tensor([value])).max())

    def collect(self, body: bytes) -> list[bytes]:
        """Bytes of every rank, in the order of ranks. Collective."""
        lengths = [int(length) for length in self.gather(torch.tensor([len(body)])).flatten()]
        if self.world_size == 1:
            return [body]
        padded = torch.frombuffer(bytearray(body.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
        every = torch.empty((self.world_size, len(padded)), dtype=torch.uint8, device=self.device)
        dist.all_gather(list(every.unbind()), padded.to(self.device))
        rows = every.cpu().numpy()
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, body: bytes) -> bytes:
        """Bytes of rank 0 on every rank, whatever the others pass. Collective."""
        return self.collect(body if self.rank == 0 else b"")[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def all_done(ranks: Ranks, what: str, work: Callable[[], None]) -> None:
    """Repeat `work` on every rank until none meets a full disk, which is logged once. Collective.

    All ranks wait for the one that has no room, so that no collective is left half-way: `work` may be
    collective only if a full disk makes it raise behind its last collective. Other errors are raised.
    """
    until_disk_space(work, what, "training", lambda full: bool(ranks.highest(full)))


def meeting_point() -> dict[str, Any]:
    """Arguments of init_distributed; none where a launcher other than deepspeed's has a store of its own."""
    if "RANK" not in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"init_method": os.environ.get(RENDEZVOUS, f"{_SCHEME}://"), "rank": rank, "world_size": size}


def _at_own_address(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[TCPStore, int, int]]:
    """torch's rendezvous handler: its store, on a socket that is bound to one address."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = None
    if rank == 0:
        try:
            listener = join_port(host, port)  # which its launcher holds
        except ConfigError as error:
            raise ConfigError(
                f"{error}; ranks meet at an address and a port of rank 0's machine: "
                'trainer.launcher_args = ["--master_addr", ADDRESS, "--master_port", PORT] names others'
            ) from None
        listener.listen()
        listening = listener.detach()
    yield TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=listening), rank, size


register_rendezvous_handler(_SCHEME, _at_own_address)
