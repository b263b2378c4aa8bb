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
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def json_decoder(
    kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.json.Decoder[T]:
    """A decoder of JSON; `kind` may be a union, `dec_hook` is msgspec's and one for a kind."""
    if kind not in _json:
        with _building:
            _json[kind] = msgspec.json.Decoder(kind, dec_hook=dec_hook)
    return _json[kind]


def msgpack_decoder(
    kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None
) -> msgspec.msgpack.Decoder[T]:
    """A decoder of MessagePack; `kind` may be a union, `dec_hook` is msgspec's and one for a kind."""
    if kind not in _msgpack:
        with _building:
            _msgpack[kind] = msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)
    return _msgpack[kind]


def convert(value: object, kind: type[T]) -> T:
    """`msgspec.convert`."""
    json_decoder(kind)  # learns its fields
    return msgspec.convert(value, kind)
