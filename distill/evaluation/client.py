"""Client of the evaluator's HTTP service."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from distill.aio import cancel, until_stalled
from sync.claims import Claim
from sync.client import Peer
from sync.errors import Unreachable
from sync.wire import EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version

logger = logging.getLogger(__name__)

STALL_SECONDS = 900.0
"""Without an answer of /health after which the evaluator counts as gone; covers loading its models."""
LOG_SECONDS = 3600.0
"""Between two log lines about an evaluation that goes on."""


class HttpEvaluator:
    """Implements `distill.evaluation.schedule.Evaluator`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        stall_timeout_seconds: float = STALL_SECONDS,
        claim: Claim | None = None,
    ) -> None:
        self._peer, self._stall_timeout_seconds = Peer(url, token, claim=claim), stall_timeout_seconds

    async def evaluate(self, version: Version) -> EvalReport:
        """Evaluate a published version, however long it takes; retried only when the connection is lost.

        Raises Unreachable (no /health within `stall_timeout_seconds`), RemoteError.
        """
        request = self._peer.call("/v1/evaluate", EvalRequest(version=version), EvalReport, math.inf)
        stalled = until_stalled(self._peer.alive, self._stall_timeout_seconds)
        work, watch = asyncio.create_task(request), asyncio.create_task(stalled)
        began, first = time.monotonic(), asyncio.FIRST_COMPLETED
        try:
            while not (await asyncio.wait({work, watch}, timeout=LOG_SECONDS, return_when=first))[0]:
                took = time.monotonic() - began
                logger.warning("the evaluation of %s has taken %.0f s and goes on", version, took)
            if work.done():
                return work.result()
            raise Unreachable(
                f"{self._peer.url}/health has not answered for {self._stall_timeout_seconds:.0f} s "
                f"while {version} was evaluated: is the process running?"
            )
        finally:
            await cancel([work, watch])

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply:
        """Reference values of plain forward passes. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/probe", request, ProbeReply, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._peer.aclose()
