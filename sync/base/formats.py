"""Formats of files that outlive a process: what another release wrote is refused, never guessed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sync.base.decoding import json_decoder
from sync.base.errors import DataError


def check_format(where: object, number: int, reads: int) -> None:
    """Raise DataError where a file has another format than the one that this release `reads`."""
    if number != reads:
        raise DataError(
            f"{where} has format {number}, this release reads {reads}: go on with the release that wrote it"
        )


def check_json_format(where: object, data: bytes, reads: int) -> None:
    """`check_format` of a JSON object whose key "format" has the number; what names none passes.

    So does what is no such object: whoever reads it next says what it should be.
    """
    number: Any = None
    with suppress(ValueError, RecursionError):
        number = json_decoder(dict[str, Any]).decode(data).get("format")
    check_format(where, number if type(number) is int else reads, reads)
