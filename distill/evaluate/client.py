"""The evaluator behind a URL."""

from __future__ import annotations

from sync.transport import Peer
from sync.wire import EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version

LONGEST_SECONDS = 3600.0
"""Of one evaluation."""


class HttpEvaluator:
    """Fulfils `distill.control.evaluations.Evaluator`."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._peer = Peer(url, token, LONGEST_SECONDS)

    async def evaluate(self, version: Version) -> EvalReport:
        """Evaluate a published version. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/evaluate", EvalRequest(version=version), EvalReport)

    async def probe(self, request: ProbeRequest, timeout: float) -> ProbeReply:
        """What plain forward passes give. Raises Unreachable, RemoteError."""
        return await self._peer.call("/v1/probe", request, ProbeReply, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._peer.aclose()
