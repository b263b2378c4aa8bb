"""The evaluator behind a URL."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from distill.aio import cancel, until_stalled
from sync.claims import Claim
from sync.errors import Unreachable
from sync.transport import Peer
from sync.wire import EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version

logger = logging.getLogger(__name__)

SILENT_SECONDS = 900.0
"""Without an answer of /health after which the evaluator is gone; it loads its models in that time."""
SAY_SECONDS = 3600.0
"""Between two lines of the log about an evaluation that goes on."""


class HttpEvaluator:
    """Fulfils `distill.evaluation.schedule.Evaluator`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        stall_timeout_seconds: float = SILENT_SECONDS,
        claim: Claim | None = None,
    ) -> None:
        self._peer, self._stall_timeout_seconds = Peer(url, token, claim=claim), stall_timeout_seconds

    async def evaluate(self, version: Version) -> EvalReport:
        """Evaluate a published version, however long it takes: asked again only when the connection is lost.

        Raises Unreachable (no /health within `stall_timeout_seconds`), RemoteError.
        """
        options = self._peer.call("/v1/evaluate", EvalRequest(version=version), EvalReport, math.inf)
        silent = until_stalled(self._peer.alive, self._stall_timeout_seconds)
        work, watch = asyncio.create_task(options), asyncio.create_task(silent)
        began, first = time.monotonic(), asyncio.FIRST_COMPLETED
        try:
            while not (await asyncio.wait({work, watch}, timeout=SAY_SECONDS, return_when=first))[0]:
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
        """What plain forward passes give. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/probe", request, ProbeReply, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._peer.aclose()
