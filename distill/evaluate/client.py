"""The evaluator behind a URL."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from distill.control.waiting import cancel
from sync.claims import Claim
from sync.errors import Unreachable
from sync.transport import Peer
from sync.wire import EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version

logger = logging.getLogger(__name__)

SILENT_SECONDS = 900.0
"""Without an answer of /health after which the evaluator is gone; it loads its models in that time."""
LOOK_SECONDS = 5.0
"""Between two looks at /health."""
SAY_SECONDS = 3600.0
"""Between two lines of the log about an evaluation that goes on."""


class HttpEvaluator:
    """Fulfils `distill.control.evaluations.Evaluator`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        silent_seconds: float = SILENT_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        claim: Claim | None = None,
    ) -> None:
        self._peer = Peer(url, token, claim=claim)
        self._silent_seconds, self._look_seconds = silent_seconds, look_seconds

    async def evaluate(self, version: Version) -> EvalReport:
        """Evaluate a published version, however long it takes: asked again only when the connection is lost.

        Raises Unreachable when the evaluator's /health has not answered for `silent_seconds`, RemoteError.
        """
        asked = self._peer.call("/v1/evaluate", EvalRequest(version=version), EvalReport, math.inf)
        work, watch = asyncio.create_task(asked), asyncio.create_task(self._until_silent(version))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            await watch
            raise Unreachable(
                f"{self._peer.url}/health has not answered for {self._silent_seconds:.0f} s while {version} "
                "was evaluated: is the process running?"
            )
        finally:
            await cancel([work, watch])

    async def _until_silent(self, version: Version) -> None:
        began = said = heard = time.monotonic()
        while (now := time.monotonic()) - heard < self._silent_seconds:
            if now - said >= SAY_SECONDS:
                said = now
                logger.warning("the evaluation of %s has taken %.0f s and goes on", version, now - began)
            await asyncio.sleep(self._look_seconds)
            if await self._peer.alive():
                heard = time.monotonic()

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply:
        """What plain forward passes give. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/probe", request, ProbeReply, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._peer.aclose()
