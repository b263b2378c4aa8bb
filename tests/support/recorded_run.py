"""A run whose roles talk through relays that keep every byte, and what its replicas were asked and answered.

    python recorded_run.py FOLDER CONFIG --set KEY=VALUE …

FOLDER gets two files a connection, of requests and of answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httptools
from faults import Relay, main

from sync.base.errors import WireError
from sync.wire import Generated, GeneratePrompt, GenerateRequest, decode, frames


class Recording(Relay):
    """Passes everything on as it is, and keeps it."""

    def __init__(self, folder: Path, role: str, url: str) -> None:
        super().__init__(role, url)
        self._files = folder / f"{time.time_ns()}"

    def passed(self, number: int, data: bytes, answers: bool) -> bytes:
        with Path(f"{self._files}-{number}.{'answers' if answers else 'requests'}").open("ab") as file:
            file.write(data)
        return data


class _Messages:
    """Paths and bodies of the messages of one direction, in order; the last may be cut."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.bodies: list[bytes] = []

    def on_message_begin(self) -> None:
        self.paths.append(b"")
        self.bodies.append(b"")

    def on_url(self, part: bytes) -> None:
        self.paths[-1] += part

    def on_body(self, part: bytes) -> None:
        self.bodies[-1] += part


def generated(folder: Path) -> Iterator[tuple[GeneratePrompt, Generated]]:
    """Every prompt that a replica completed, and its answer, over all relays that recorded into `folder`."""
    for path in folder.glob("*.requests"):
        asked, answered = _Messages(), _Messages()
        httptools.HttpRequestParser(asked).feed_data(path.read_bytes())
        if (answers := path.with_suffix(".answers")).exists():
            httptools.HttpResponseParser(answered).feed_data(answers.read_bytes())
        for place, body, answer in zip(asked.paths, asked.bodies, answered.bodies, strict=False):
            if place == b"/distill/v1/generate":
                prompts = {one.id: one for one in decode(body, GenerateRequest).prompts}
                for one in _whole(answer):
                    yield prompts[one.id], one


def _whole(body: bytes) -> Iterator[Generated]:
    """The answers in a body that may be cut."""
    with suppress(WireError):
        yield from frames(body, Generated)


if __name__ == "__main__":
    main(partial(Recording, Path(sys.argv.pop(1))))
