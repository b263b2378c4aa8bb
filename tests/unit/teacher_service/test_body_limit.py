"""Bodies are read within bounds, one by one and all together."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.types import Message

from sync.base.errors import Overloaded, WireError
from teacher_service.app import BodyLimit


def request(*chunks: bytes, leaves: bool = False) -> Request:
    """A request whose body comes in chunks, from a caller that may leave before its end."""
    messages: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""})
    left = iter(messages)

    async def receive() -> Message:
        return next(left)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def read(gate: BodyLimit, options: Request) -> bytes:
    async with gate.read(options) as body:
        return body


async def test_a_body_counts_until_its_request_is_answered_and_not_after() -> None:
    gate = BodyLimit(request_limit=10, total=12)
    for _ in range(5):
        async with gate.read(request(b"12345", b"678")) as first:
            assert first == b"12345678"
            assert await read(gate, request(b"1234")) == b"1234"
            with pytest.raises(Overloaded):
                await read(gate, request(b"12345"))


async def test_a_body_that_is_too_long_or_cut_is_refused_and_leaves_nothing_behind() -> None:
    gate = BodyLimit(request_limit=10, total=12)
    for _ in range(5):
        with pytest.raises(WireError, match="longer than 10 bytes"):
            await read(gate, request(b"123456", b"123456", b"123456"))
        with pytest.raises(WireError, match="left before"):
            await read(gate, request(b"123456", leaves=True))
    assert await read(gate, request(b"1234567890")) == b"1234567890"
