"""One answer over HTTP: read up to a limit, never decompressed, and what each status means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from sync.base.errors import Overloaded, RemoteError, Replaced, TooLarge, Unreachable, WrongServer
from sync.base.retry import pause_told
from sync.wire.claims import MISDIRECTED

GONE: Final = 410
"""Status of a refusal: another process has registered in the place of the one that asks."""
MAX_ANSWER: Final = 1 << 32
"""Bytes of the longest answers: a rank's share of a batch with hidden states, the head of a large teacher."""
MAX_SMALL: Final = 1 << 26
"""Bytes of all other answers: digests of 100,000 tensors, with their names, are 20 MB."""
SLOWEST: Final = 1 << 18
"""Bytes a second that a long answer must bring: its time limit is longer by a second for each so many."""
MAX_REFUSAL: Final = 1 << 16
"""Bytes of an answer with another status than 200."""

_REFUSALS: Final = {MISDIRECTED: WrongServer, GONE: Replaced, 413: TooLarge}


class Unavailable(RemoteError):
    """A status that says to come back; the clients of `sync.wire.client` do, and raise something else."""


class Answer:
    """One answer, whose parts are added as they come, up to a limit."""

    def __init__(self, url: str, status: int, headers: Mapping[str, str], limit: int) -> None:
        """`most`: bytes of a 200. Raises RemoteError for an encoded answer, or one that announces more."""
        self.url, self.status, self.headers, self.content = url, status, headers, bytearray()
        self._most = limit if status == 200 else MAX_REFUSAL
        check_plain(url, headers)
        length = headers.get("content-length", "0")
        self._check(int(length) if length.isdecimal() else 0)

    def _check(self, length: int) -> None:
        if length > self._most:
            raise RemoteError(f"{self.url} answered with more than {self._most} bytes: ask for fewer at once")

    def add(self, part: bytes) -> None:
        """Take the next part. Raises RemoteError when the answer is too long."""
        self.content += part
        self._check(len(self.content))

    @property
    def more_seconds(self) -> float:
        """What its length, so far, adds to its time limit."""
        return len(self.content) / SLOWEST

    def body(self, retry: bool) -> memoryview:
        """The content of a 200, no copy. Raises what any other status means.

        With `retry`, 502-504 raise Unavailable.
        """
        if self.status == 200:
            return memoryview(self.content)
        if retry and self.status in (502, 503, 504):
            raise Unavailable(f"status {self.status}")
        try:
            text = str(json.loads(self.content)["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            text = self.content[:500].decode("utf-8", "replace")
        message = f"{self.url} answered {self.status}: {text}"
        if self.status == 429:
            raise Overloaded(message, pause_told(self.headers.get("retry-after", "")))
        raise _REFUSALS.get(self.status, RemoteError)(message)

    def only(self) -> memoryview:
        """As `body`, for callers that retry elsewhere: any 5xx raises Unreachable."""
        if self.status >= 500:
            text = self.content[:500].decode("utf-8", "replace")
            raise Unreachable(f"{self.url} answered {self.status}: {text}")
        return self.body(retry=False)


def check_plain(url: str, headers: Mapping[str, str]) -> None:
    """Raise RemoteError for an answer that would have to be decompressed."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise RemoteError(f"{url} answered with content-encoding {encoding[:100]!r}: send plain bytes")
