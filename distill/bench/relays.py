"""`distill run` whose roles talk through relays that cut connections and spoil answers when they are told to.

    python -m distill.bench.relays run CONFIG …

    controller ──▶ relay ──▶ replica, teacher, evaluator        trainer's ranks ──▶ relay ──▶ controller

Told by empty files in faults/ of the run's folder, which are removed once it has happened:

    ROLE.cut         every connection of the role is reset; waits until there is one
    ROLE.malformed   a stretch of the role's next long answer arrives as bytes of all ones: numbers that are
                     none, lengths that are not so, or no message at all

The relays live in a thread of the launcher and go with it; it looks after its own processes without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.launch import run
from distill.launch.roles import Plan, Ports, plan_servers, trainer_child
from distill.launch.supervise import ChildSpec

FAULTS = "faults"
CUT, MALFORMED = "cut", "malformed"
LEAST_BYTES = 160
"""Of a piece of an answer that is spoilt: shorter ones are mostly refusals and states."""
SPOILT_BYTES = 32
LOOK_SECONDS = 0.1
HEADERS_END = b"\r\n\r\n"


class Relay:
    """Before one server. Everything happens in the loop of `Relays`."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._target = (at.hostname or "127.0.0.1", at.port or 80)
        self._open: set[asyncio.StreamWriter] = set()
        self.sound = asyncio.Event()
        """Cleared: the next long answer is spoilt."""
        self.sound.set()

    async def listen(self) -> str:
        """Begin; its own URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return "http://{}:{}".format(*self._server.sockets[0].getsockname())

    def cut(self) -> bool:
        """Reset every connection; whether there was one."""
        for writer in self._open:
            writer.transport.abort()
        return bool(self._open)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._open.add(writer)
        with contextlib.suppress(OSError):
            there, to = await asyncio.open_connection(*self._target)
            ends.add(to)
            ways = [asyncio.create_task(way) for way in (self._ask(reader, to), self._answer(there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        self._open -= ends
        for end in ends:
            end.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            body = data.find(HEADERS_END) + len(HEADERS_END) if data.startswith(b"HTTP/") else 0
            if not self.sound.is_set() and len(data) - body >= LEAST_BYTES:
                data = spoilt(data, random.randrange(body, len(data) - SPOILT_BYTES))
                self.sound.set()
            writer.write(data)
            await writer.drain()


def spoilt(data: bytes, at: int) -> bytes:
    """`data` with bytes of all ones from `at` on."""
    return data[:at] + b"\xff" * SPOILT_BYTES + data[at + SPOILT_BYTES :]


class Relays:
    """All relays of a launcher, in a thread of their own."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where they are told what to do; a former launcher's orders are forgotten."""
        self._folder, self._relays = folder, dict[str, Relay]()
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="relays", daemon=True).start()
        self._obeying = asyncio.run_coroutine_threadsafe(self._obey(), self._loop)

    def before(self, role: str, url: str) -> str:
        """Put a relay before a server; its URL."""
        self._relays[role] = Relay(url)
        return asyncio.run_coroutine_threadsafe(self._relays[role].listen(), self._loop).result()

    async def _obey(self) -> None:
        while True:
            for order in list(self._folder.iterdir()):
                relay = self._relays.get(order.stem)
                if relay is not None and await self._done(relay, order.suffix[1:]):
                    order.unlink()
            await asyncio.sleep(LOOK_SECONDS)

    async def _done(self, relay: Relay, what: str) -> bool:
        if what == CUT:
            return relay.cut()
        relay.sound.clear()
        return await relay.sound.wait()


def main() -> None:
    """The command line, with relays between the roles of the runs that it starts."""
    from distill.cli.main import main as command_line

    relays: list[Relays] = []

    def planned(config: RunConfig, token: str | None, ports: Ports) -> Plan:
        relays.append(Relays(config.run_dir / FAULTS))
        plan = plan_servers(config, token, ports)
        urls = {child.url: relays[0].before(child.name, child.url) for child in plan.children if child.url}
        plan.replicas = {name: urls.get(url, url) for name, url in plan.replicas.items()}
        plan.teachers = {name: [urls.get(url, url) for url in all_] for name, all_ in plan.teachers.items()}
        plan.evaluator = urls.get(plan.evaluator or "", plan.evaluator)
        return plan

    def trainer(config: RunConfig, url: str, token: str | None) -> ChildSpec:
        return trainer_child(config, relays[0].before("controller", url), token)

    vars(run).update(plan_servers=planned, trainer_child=trainer)
    command_line()


if __name__ == "__main__":
    main()
