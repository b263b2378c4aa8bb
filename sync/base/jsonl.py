"""JSONL files: appended by whole lines, read back without what a crash tore."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from sync.base.decoding import convert, json_decoder
from sync.base.durable import append
from sync.base.errors import DataError

Row = dict[str, Any]
log = logging.getLogger(__name__)


class JsonLines:
    """Appends one JSON value a line; a last line that a crash tore is removed. Not finite floats become null.
    What a full disk refuses is kept and written with the next line; at the end it is lost."""

    def __init__(self, path: Path) -> None:
        self._path, self._pending = path, b""
        if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)

    def write(self, value: Any) -> None:
        self._pending += msgspec.json.encode(value) + b"\n"
        self._flush()

    def _flush(self) -> None:
        if self._pending and append(self._path, self._pending):
            self._pending = b""

    def close(self) -> None:
        """Try for the last time to write what is pending."""
        self._flush()
        if self._pending:
            log.error("disk full: %d bytes of %s are lost", len(self._pending), self._path)


def read_lines(path: Path, kind: Any = Row) -> list[Row]:
    """Objects of a JSONL file, without a torn last line; empty when there is no file. `kind`: what msgspec
    must be able to read every object as. Raises DataError for any other line."""
    *lines, torn = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    rows = [_object(path, number, line, kind) for number, line in enumerate(lines, 1)]
    with contextlib.suppress(DataError):  # the newline alone may be missing
        rows.append(_object(path, len(lines) + 1, torn, kind))
    return rows


def _object(path: Path, number: int, line: bytes, kind: Any) -> Row:
    try:
        row = json_decoder(Row).decode(line)
        if kind is not Row:
            convert(row, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}:{number}: {error}; the file was altered") from None
    return row
