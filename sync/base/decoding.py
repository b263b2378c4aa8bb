"""Decoders of typed data, built one at a time.

msgspec learns the fields of a Struct at its first use, not thread-safely (0.22): two threads that meet it at
once crash the process. Every typed decoder is therefore made here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_building = threading.Lock()
_decoders: dict[Any, Any] = {}


def json_decoder(
    kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.json.Decoder[T]:
    """A decoder of JSON; `kind` may be a union, `dec_hook` is msgspec's and one for a kind."""
    return _decoder(msgspec.json.Decoder, kind, dec_hook)


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A decoder of MessagePack; `kind` may be a union."""
    return _decoder(msgspec.msgpack.Decoder, kind, None)


def _decoder(make: Any, kind: Any, dec_hook: Callable[[type, Any], Any] | None) -> Any:
    if (make, kind) not in _decoders:
        with _building:
            _decoders[make, kind] = make(kind, dec_hook=dec_hook)
    return _decoders[make, kind]


def convert(value: object, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """`msgspec.convert`."""
    json_decoder(kind, dec_hook)  # learns its fields
    return msgspec.convert(value, kind, dec_hook=dec_hook)
