"""Request bodies, read with a bound on what all of them hold in memory together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import ClientDisconnect, Request

from sync.errors import Overloaded, WireError

MAX_BODY: Final = 1 << 28
"""Bytes of one request."""
MAX_BODIES: Final = 1 << 29
"""Bytes of all requests that are being read or answered."""


class BodyGate:
    """Counts the bytes of bodies from their first chunk until their request is answered."""

    def __init__(self, one: int = MAX_BODY, all_: int = MAX_BODIES) -> None:
        self._one, self._all, self._held = one, all_, 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes count until the context ends.

        A body over a bound is read to its end and thrown away, so that the caller gets its refusal instead of
        a broken connection. Raises WireError (one body too long, caller left) or Overloaded (all together).
        """
        chunks, size, refusal = [], 0, None
        try:
            async for chunk in request.stream():
                if refusal is None:
                    size += len(chunk)
                    self._held += len(chunk)
                    chunks.append(chunk)
                    refusal = self._refusal(size)
                if refusal is not None and chunks:
                    chunks.clear()
                    self._held -= size
                    size = 0
            if refusal is not None:
                raise refusal
            yield b"".join(chunks)
        except ClientDisconnect:
            raise WireError("the caller left before its request was complete") from None
        finally:
            self._held -= size

    def _refusal(self, size: int) -> WireError | Overloaded | None:
        if size > self._one:
            return WireError(f"body is longer than {self._one} bytes: send fewer sequences a request")
        if self._held > self._all:
            return Overloaded(
                f"requests in work hold {self._all} bytes: come back later, or add a replica", 1.0
            )
        return None
