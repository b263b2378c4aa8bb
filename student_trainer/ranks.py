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

    def highest(self, values: list[float]) -> list[float]:
        """Largest of each value over the ranks. Collective."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a vector over the ranks, fp64. Collective."""
        tensor = values.double()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, body: bytes | None) -> bytes:
        """Bytes of rank 0 on every rank; the others pass None. Collective."""
        if self.world_size == 1:
            assert body is not None
            return body
        size = torch.tensor([len(body or b"")], device=self.device)
        dist.broadcast(size, src=0)
        data = torch.frombuffer(bytearray(body or bytes(int(size))), dtype=torch.uint8).to(self.device)
        dist.broadcast(data, src=0)
        return bytes(data.cpu().numpy().tobytes())

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self.world_size > 1:
            dist.barrier()
