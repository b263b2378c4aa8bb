"""What the ranks tell each other besides gradients, in the same order everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. With a world of 1 nothing is sent, and no process group is needed."""

    rank: int
    world_size: int
    device: torch.device

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """A vector of every rank, [world, n], fp64. Collective."""
        own = values.double().to(self.device)
        if self.world_size == 1:
            return own.unsqueeze(0)
        every = own.new_empty((self.world_size, own.numel()))
        dist.all_gather(list(every.unbind()), own)
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

    def broadcast(self, body: bytes | None) -> bytes:
        """Bytes of rank 0 on every rank, whatever the others pass. Collective."""
        own = body or b""
        if self.world_size == 1:
            return own
        size = torch.tensor([len(own)], device=self.device)
        dist.broadcast(size, src=0)
        if int(size) == 0:
            return b""
        content = bytearray(own if self.rank == 0 else bytes(int(size)))
        data = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        dist.broadcast(data, src=0)
        return bytes(data.cpu().numpy().tobytes())

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.world_size > 1:
            dist.barrier()
