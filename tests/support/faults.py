"""Faults that need help: relays that cut connections or malform answers.

    python tests/support/faults.py CONFIG --set KEY=VALUE …      a run whose roles talk through relays

    controller ──▶ relay ──▶ replica, teacher, evaluator        trainer's ranks ──▶ relay ──▶ controller

A relay injects what an empty file in faults/ of the run's folder orders; the file is removed afterwards:

    ROLE.cut         every connection of the role is reset; waits until there is one
    ROLE.malformed   a stretch of the role's next long answer arrives as bytes of all ones: numbers that are
                     none, lengths that are not so, or no message at all

The relays live in a thread of the launcher and end with it; it supervises its own processes without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from distill.aio import cancel
from distill.config import RunConfig
from distill.config.loading import load
from distill.launch import cluster, roles, run
from distill.launch.supervise import ChildSpec
from distill.topology import CONTROLLER
from sync.base.errors import DistillError
from sync.base.secrets import redact_process

FAULTS = "faults"
CUT, MALFORMED = "cut", "malformed"
MIN_BYTES, MIN_BYTES_OF_TURNS = 160, 40
"""Of a piece of an answer that is malformed: shorter ones are mostly refusals and states; an environment's
turns are short."""
MALFORMED_BYTES = 32
POLL_SECONDS = 0.1
HEADERS_END = b"\r\n\r\n"


# --- relays -----------------------------------------------------------------------------------------------


class Relay:
    """In front of one server. Everything happens in the loop of `Relays`."""

    def __init__(self, role: str, url: str) -> None:
        at = urlsplit(url)
        self._min_bytes = MIN_BYTES_OF_TURNS if role.startswith("environment-") else MIN_BYTES
        self._target = (at.hostname or "127.0.0.1", at.port or 80)
        self._open: set[asyncio.StreamWriter] = set()
        self._numbers = itertools.count()
        self.sound = asyncio.Event()
        """Cleared: the next long answer is malformed."""
        self.sound.set()

    async def listen(self) -> str:
        """Begin; its own URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return "http://{}:{}".format(*self._server.sockets[0].getsockname())

    async def inject(self, fault: str) -> bool:
        """Whether the fault was injected: a cut needs a connection."""
        if fault == CUT:
            for writer in self._open:
                writer.transport.abort()
            return bool(self._open)
        self.sound.clear()
        return await self.sound.wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends, number = {writer}, next(self._numbers)
        self._open.add(writer)
        with contextlib.suppress(OSError):
            upstream, to = await asyncio.open_connection(*self._target)
            ends.add(to)
            ways = [
                asyncio.create_task(self._pass(number, reader, to, answers=False)),
                asyncio.create_task(self._pass(number, upstream, writer, answers=True)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await cancel(ways)
        self._open -= ends
        for end in ends:
            end.close()

    async def _pass(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool
    ) -> None:
        while data := await reader.read(1 << 16):
            writer.write(self.passed(number, data, answers))
            await writer.drain()

    def passed(self, number: int, data: bytes, answers: bool) -> bytes:
        """What becomes of some bytes of connection `number`, of its requests or of its answers."""
        if answers and not self.sound.is_set():
            body = data.find(HEADERS_END) + len(HEADERS_END) if data.startswith(b"HTTP/") else 0
            if len(data) - body >= self._min_bytes:
                self.sound.set()
                return malformed(data, random.randrange(body, len(data) - MALFORMED_BYTES))
        return data


def malformed(data: bytes, at: int) -> bytes:
    """`data` with bytes of all ones from `at` on."""
    return data[:at] + b"\xff" * MALFORMED_BYTES + data[at + MALFORMED_BYTES :]


class Relays:
    """All relays of a launcher, in a thread of their own."""

    def __init__(self, folder: Path, kind: Callable[[str, str], Relay] = Relay) -> None:
        """`folder`: of the orders; those for an earlier launcher are removed. `kind`: of role and URL."""
        self._folder, self._kind, self._relays = folder, kind, dict[str, Relay]()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="relays", daemon=True).start()
        self._polling = asyncio.run_coroutine_threadsafe(self._poll(), self._loop)

    def before(self, role: str, url: str) -> str:
        """Put a relay in front of a server; its URL."""
        self._relays[role] = self._kind(role, url)
        return asyncio.run_coroutine_threadsafe(self._relays[role].listen(), self._loop).result()

    async def _poll(self) -> None:
        while True:
            for order in list(self._folder.iterdir()):
                relay = self._relays.get(order.stem)
                if relay is not None and await relay.inject(order.suffix[1:]):
                    order.unlink()
            await asyncio.sleep(POLL_SECONDS)


def put_between(relays: Relays) -> None:
    """Have the controller reach the servers that a run starts here, and its trainer the controller, through
    relays."""

    def plan_servers(config: RunConfig, token: str | None, ports: roles.Ports) -> roles.Plan:
        plan = roles.plan_servers(config, token, ports)
        urls = {child.url: relays.before(child.name, str(child.url)) for child in plan.children}
        where = {section: [urls.get(place, place) for place in at] for section, at in plan.where.items()}
        return replace(plan, where=where)

    def trainer_child(config: RunConfig, controller_url: str, token: str | None) -> ChildSpec:
        return roles.trainer_child(config, relays.before(CONTROLLER, controller_url), token)

    cluster.plan_servers, run.trainer_child = plan_servers, trainer_child


def main(kind: Callable[[str, str], Relay] = Relay) -> None:
    """Run a configuration with relays between the roles; exit 1 where the run ends with problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    config = load(given.config, given.set)
    redact_process()
    put_between(Relays(config.run_dir / FAULTS, kind))
    running = run.run(config, resume=given.resume, console=Console())
    try:
        summary = asyncio.run(running)
    except DistillError as error:
        sys.exit(f"distill: {error}")
    sys.exit(bool(summary["problems"]))


if __name__ == "__main__":
    main()
