"""A server of a few bytes: what no library would answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def saying(answer: bytes) -> AsyncIterator[str]:
    """URL of a server that answers the head of each request with these bytes, and closes the connection."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as listening:
        yield "http://127.0.0.1:{1}".format(*listening.sockets[0].getsockname())
