"""What a teacher takes at once, from the memory that is left once its model is loaded.

share        a quarter of this machine's: other processes run here too
queue        share / (twice the scores of a token): as the engine gives them, and encoded
bodies       share / 2: of all requests, of which one may have half, and of one answer to several sequences
length       the model's own limit, as far as one sequence's scores fit into the share, and where the engine
             computes layer by layer its forward pass into what is left where the model is
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sync.base.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineInfo

MIB: Final = 1 << 20
SHARE: Final = 4
"""Processes that this machine's free memory is shared by, roughly."""
TYPICAL_TOPK: Final = 128
PASS_WIDTHS: Final = 18
"""Numbers that a layer holds of a token at once, in widths of the model: 6 + 3 x its feed-forward's 4."""
ROUND: Final = 1024
"""A length from memory is a multiple of it."""


class Limits(NamedTuple):
    """Bounds of one teacher process."""

    max_length: int
    """Tokens of a sequence."""
    queue_tokens: int
    """Tokens queued or not yet answered."""
    bodies_bytes: int
    """Size of all requests in work, of which one may have half, and of one answer to several sequences."""

    @property
    def line(self) -> str:
        """The limits in words."""
        return (
            f"takes sequences of {self.max_length:,} tokens, queues {self.queue_tokens:,} tokens, answers "
            f"with {self.bodies_bytes // MIB:,} MiB, reads {self.bodies_bytes // 2 // MIB:,} MiB a request "
            f"and {self.bodies_bytes // MIB:,} MiB together"
        )


def token_bytes(info: EngineInfo) -> int:
    """Bytes of the scores of one position, with hidden states where the engine gives them."""
    hidden = info.hidden_size * (2 if info.dtype == "bfloat16" else 4) if "hidden" in info.can else 0
    return 16 + max(hidden, 8 * min(info.max_topk, TYPICAL_TOPK))


def limits(config: TeacherConfig, info: EngineInfo, host: int, devices: Sequence[int] = ()) -> Limits:
    """Limits of an engine that is loaded.

    `host`, `devices`: free bytes of this machine and of each GPU with a part of the model; none: it is on the
    CPU. Raises ConfigError when a `max_length` or `queue_tokens` of the configuration does not fit.
    """
    share, fit = host // SHARE, 2 * token_bytes(info)
    fits = {"scores": share // fit}
    if config.kind.computes == "layers":
        item = 4 if info.dtype == "float32" else 2
        free = min(devices) if devices else share
        fits["forward pass"] = free // (PASS_WIDTHS * info.hidden_size * item)
    name, limit = min(fits.items(), key=lambda entry: entry[1])
    length = info.max_length
    if length > limit:
        if config.max_length is not None or limit < ROUND:
            raise ConfigError(
                f"the {name} of a sequence of {length:,} tokens does not fit into what is left of memory, "
                f"{limit:,} do: set max_length = {limit // ROUND * ROUND or limit} or less, or give this "
                "teacher more memory"
            )
        length = limit // ROUND * ROUND
    queue = config.queue_tokens or max(length, share // fit)
    return Limits(length, queue, share // 2)


def device_memory() -> list[int]:
    """Free bytes of every GPU that this process sees; empty: none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [int(torch.cuda.mem_get_info(index)[0]) for index in range(count)]
