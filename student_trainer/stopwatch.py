"""How long the parts of a step take: by the host's clock, on a GPU by events among its kernels.

A kernel ends after the call that launched it, and the host's clock would give its time to a later part.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Times of one step, whose parts follow each other and may come again."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[tuple[str | None, Any]] = []

    def begin(self, part: str | None) -> None:
        """What was timed ends here, and `part` begins; None: nothing does."""
        self._times.append((part, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Of each part in all, once the last has ended; waits for a GPU to get there."""
        if self._on_gpu:
            self._times[-1][1].synchronize()
        totals: dict[str, float] = defaultdict(float)
        for (part, begun), (_, ended) in pairwise(self._times):
            if part is not None:
                totals[part] += begun.elapsed_time(ended) / 1000 if self._on_gpu else ended - begun
        return dict(totals)
