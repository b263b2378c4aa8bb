"""HTTP transports that read no more of an answer than is allowed, and never decompress one.

A few kilobytes of gzip can stand for gigabytes: requests ask for plain bytes, and an answer that is encoded
all the same is refused. `extensions={"most": N}` of a request bounds the body of its answer to N bytes; None:
a stream, which its reader bounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx

from sync.errors import RemoteError

PLAIN: Final = {"accept-encoding": "identity"}
MAX_ANSWER: Final = 1 << 32
"""Bytes of an answer: a rank's share of a batch with hidden states, or the head of a large teacher."""
MOST_REFUSAL: Final = 1 << 16
"""Bytes of an answer that says no, or only shows life."""


class BoundedTransport(httpx.AsyncBaseTransport):
    """`httpx.AsyncHTTPTransport` whose answers raise RemoteError when they are encoded or too long."""

    def __init__(self, **options: Any) -> None:
        self._inner = httpx.AsyncHTTPTransport(**options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        try:
            bound = _Bound(request, response)
        except RemoteError:
            await response.aclose()
            raise
        response.stream = _AsyncBody(response.stream, bound)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class BoundedBlockingTransport(httpx.BaseTransport):
    """The same without an event loop."""

    def __init__(self, **options: Any) -> None:
        self._inner = httpx.HTTPTransport(**options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        try:
            bound = _Bound(request, response)
        except RemoteError:
            response.close()
            raise
        response.stream = _Body(response.stream, bound)
        return response

    def close(self) -> None:
        self._inner.close()


class _Bound:
    """Bytes that are left of what one answer may have."""

    def __init__(self, request: httpx.Request, response: httpx.Response) -> None:
        """Raises RemoteError when the headers alone say that it cannot be read."""
        self._url = request.url
        self._most = request.extensions.get("most", MAX_ANSWER)
        if response.status_code != 200:
            self._most = MOST_REFUSAL
        self._seen = 0
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise RemoteError(
                f"{self._url} answered with content-encoding {encoding[:100]!r}: send plain bytes"
            )
        length = response.headers.get("content-length", "0")
        self.count(int(length) if length.isdecimal() else 0)
        self._seen = 0

    def count(self, length: int) -> None:
        """`length` more bytes came. Raises RemoteError when they are too many."""
        self._seen += length
        if self._most is not None and self._seen > self._most:
            raise RemoteError(
                f"{self._url} answered with more than {self._most} bytes: ask for fewer at once"
            )


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, inner: Any, bound: _Bound) -> None:
        self._inner, self._bound = inner, bound

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            self._bound.count(len(part))
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(httpx.SyncByteStream):
    def __init__(self, inner: Any, bound: _Bound) -> None:
        self._inner, self._bound = inner, bound

    def __iter__(self) -> Iterator[bytes]:
        for part in self._inner:
            self._bound.count(len(part))
            yield part

    def close(self) -> None:
        self._inner.close()
