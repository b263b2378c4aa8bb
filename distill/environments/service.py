"""One environment process.

    python -m distill.environments.service --config FILE --port PORT [--host HOST] [--index I]

FILE is an EnvironmentService as JSON. It imports no torch, and runs in any virtual environment that has what
`sync.wire.server` imports, and transformers for the tokenizer. Its routes are in docs/architecture.md.

    begin ─▶ Playing.next ─▶ Turn ─continue─▶ answer, next … ─▶ EpisodeOver | EpisodeFailed
                              └─ idle, and room is needed ─▶ given up

429 carries Retry-After: as many episodes are under way as may be.
Exit status: 0 after a signal, 1 without a server of tools, 2 when the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distill.environments.config import EnvironmentConfig, EnvironmentService
from distill.environments.episode import ANSWER, EnvironmentAnswer
from distill.environments.host import Host, Playing
from distill.environments.rendering import Renderer
from sync import wire
from sync.base.address import TOKEN_VARIABLE, token_from_environment
from sync.base.errors import DataError, Overloaded
from sync.base.own_code import own_code
from sync.base.settings import read_settings
from sync.wire.checks import turn_tokens
from sync.wire.claims import Claim
from sync.wire.peers import Role
from sync.wire.server import (
    application,
    check_bind,
    process_registry,
    read_message,
    refuse,
    reply,
    run_role,
    serve_app,
)

log = logging.getLogger("distill.environments.service")  # not __main__
STOP_SECONDS: Final = 1.0
"""Longest wait for an episode that is given up: it may ignore that."""
END_SECONDS: Final = 10.0
"""The same when the service ends, of all together: nothing goes on behind it."""
IDLE_SECONDS: Final = 600.0
"""An episode that waits for its student for longer makes room, when there is none, for one that begins."""
RETRY_SECONDS: Final = 1.0
"""When to come back, for one that finds no room."""
MAX_BODY: Final = 1 << 26
"""Bytes of a request."""


@dataclass(eq=False)
class _Episode:
    playing: Playing
    call: asyncio.Task[EnvironmentAnswer]
    """The wait for what the environment says next, or said last."""
    turn: int = 0
    """Turn that this makes."""
    answered_at: float = math.inf
    """time.monotonic() at which it ended; inf: it is under way."""
    said: bytes = b""
    """The student's tokens before that turn."""
    over: bool = False


class Service:
    """One environment behind HTTP; `app` is the ASGI application, whose lifespan is `serving`."""

    def __init__(
        self,
        host: Host,
        config: EnvironmentConfig,
        tokenizer: tuple[str, int],
        token: str | None = None,
        claim: Claim | None = None,
    ) -> None:
        """`tokenizer`: its fingerprint, and the size of its vocabulary."""
        self._host, self._config = host, config
        self._fingerprint, self._vocab_size = tokenizer
        self._episodes: dict[str, _Episode] = {}
        """Episodes under way, and the newest that are over: their last answer may be asked for again."""
        self.registry = registry = process_registry()
        name = "distill_environment"
        self._counted = Counter(f"{name}_episodes", "Episodes, by event", ("event",), registry=registry)
        self._turns = Counter(f"{name}_turns", "Turns given to the student", registry=registry)
        self._spent = Histogram(f"{name}_turn_seconds", "Calls of the environment", registry=registry)
        gauge = Gauge(f"{name}_open_episodes", "Episodes under way", registry=registry)
        gauge.set_function(lambda: len(self._open()))
        routes = [
            Route("/v1/begin", self.begin, methods=["POST"]),
            Route("/v1/continue", self.proceed, methods=["POST"]),
            Route("/v1/end", self.end, methods=["POST"]),
            Route("/v1/info", self.get_info),
        ]

        claiming, lifespan = ("/v1/begin", "/v1/continue"), lambda _: self.serving()
        self.app = application(Role.ENVIRONMENT, routes, registry, token, claim, claiming, lifespan=lifespan)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Enter the host; at the end every episode is given up."""
        async with self._host.serving():
            try:
                yield
            finally:
                await asyncio.gather(*(self._give_up(id, END_SECONDS) for id in [*self._episodes]))

    # --- routes

    async def begin(self, request: Request) -> Response:
        message = await read_message(request, wire.EpisodeBegin, MAX_BODY)
        await self._make_room(message.id)
        while message.id in self._episodes:
            await self._give_up(message.id)
        playing = Playing(self._host, message.id, message.task)
        call = asyncio.create_task(self._said(playing, 0))
        episode = self._episodes[message.id] = _Episode(playing, call)
        self._counted.labels("begun").inc()
        return await _answered(episode)

    async def proceed(self, request: Request) -> Response:
        message = await read_message(request, wire.EpisodeContinue, MAX_BODY)
        episode = self._episodes.get(message.id)
        if episode is None:
            lost = f"episode {message.id} is not known: this process was restarted, or gave it up"
            return reply(wire.EpisodeFailed(id=message.id, error=lost, lost=True))
        if message.turn + 1 == episode.turn:
            if message.token_ids.data != episode.said:
                other = f"turn {message.turn} of episode {message.id} was answered with other tokens"
                return reply(wire.EpisodeFailed(id=message.id, error=other, lost=True))
            return await _answered(episode)
        if message.turn != episode.turn or episode.over or not episode.call.done():
            rule = f"its newest turn is {episode.turn}: continue a turn once it is given, and once only"
            return refuse(409, f"turn {message.turn} of {message.id} is continued, and {rule}")
        if problem := turn_tokens(message.token_ids, self._vocab_size):
            return refuse(400, f"turn {message.turn} of {message.id}: {problem}")
        episode.turn, episode.said = message.turn + 1, message.token_ids.data
        episode.answered_at = math.inf
        episode.playing.answer(wire.unpack(message.token_ids).tolist(), message.finish_reason)
        episode.call = asyncio.create_task(self._said(episode.playing, episode.turn))
        return await _answered(episode)

    async def end(self, request: Request) -> Response:
        for id in (await read_message(request, wire.EpisodeEnd, MAX_BODY)).ids:
            await self._give_up(id)
        return reply(wire.Ok())

    async def get_info(self, _: Request) -> Response:
        host, what = self._host, f"{self._config.type}: {self._config.environment}"
        info = wire.EnvironmentInfo(
            name=host.name, environment=what, tasks=host.tasks, tokenizer_fingerprint=self._fingerprint
        )
        return reply(info)

    # --- episodes

    def _open(self) -> list[_Episode]:
        return [episode for episode in self._episodes.values() if not episode.over]

    async def _make_room(self, id: str) -> None:
        """For episode `id`. Raises Overloaded when as many others are under way as may be: an evaluation's do
        not wait for those of training, whose replica may be held for it."""
        limit = self._config.max_episodes
        for old in [old for old, episode in self._episodes.items() if episode.over][:-limit]:
            del self._episodes[old]
        kind, since = id.startswith(wire.EVALUATION_ID), dict[str, float]()
        for other, episode in self._episodes.items():
            if not episode.over and other != id and other.startswith(wire.EVALUATION_ID) == kind:
                since[other] = episode.answered_at
        if len(since) < limit:
            return
        idle = min(since, key=lambda other: since[other])
        if time.monotonic() - since[idle] < IDLE_SECONDS:
            key = f"environments.{self._host.name}.max_episodes"
            raise Overloaded(f"{limit} episodes are under way: raise {key}, or add processes", RETRY_SECONDS)
        await self._give_up(idle)

    async def _give_up(self, id: str, seconds: float = STOP_SECONDS) -> None:
        episode = self._episodes.pop(id, None)
        if episode is not None and not episode.over:
            self._counted.labels("given_up").inc()
            episode.call.cancel()
            await episode.playing.stop(seconds)

    async def _said(self, playing: Playing, turn: int) -> EnvironmentAnswer:
        """What the environment says in `turn`; EpisodeFailed when it raises, hangs or cannot be used."""
        limit, key, id = self._config.call_timeout_seconds, f"environments.{self._host.name}", playing.id
        about = f"turn {turn} of episode {id}"
        try:
            with self._spent.time():
                async with asyncio.timeout(limit):
                    answer = await playing.next()
            with own_code(key, about, "mend it"):
                said = wire.decode(wire.encode(answer), ANSWER)
            if isinstance(said, wire.Turn) and (problem := turn_tokens(said.token_ids, self._vocab_size)):
                raise DataError(f"{key}: {about} cannot be used: {problem}")
        except TimeoutError:
            error = f"{key}: {about} took longer than call_timeout_seconds = {limit:g}: raise it, or mend it"
            said = wire.EpisodeFailed(id=id, error=error)
        except DataError as error:
            said = wire.EpisodeFailed(id=id, error=str(error))
        if isinstance(said, wire.EpisodeFailed):
            log.error("%s", said.error)
            await playing.stop(STOP_SECONDS)
        if isinstance(said, wire.Turn):
            self._turns.inc()
        else:
            self._counted.labels("over" if isinstance(said, wire.EpisodeOver) else "failed").inc()
        episode = self._episodes.get(id)
        if episode is not None and episode.call is asyncio.current_task():
            episode.answered_at, episode.over = time.monotonic(), not isinstance(said, wire.Turn)
        return said


async def _answered(episode: _Episode) -> Response:
    """The answer to its newest call; the call goes on when this is cancelled."""
    call = episode.call
    await asyncio.wait({call})
    if call.cancelled():
        return reply(wire.EpisodeFailed(id=episode.playing.id, error="the episode was given up", lost=True))
    return reply(call.result())


# --- the process


def serve(settings: EnvironmentService, host: str, port: int, index: int) -> None:
    """Load tokenizer and environment, then answer until SIGTERM or SIGINT."""
    token = token_from_environment()
    os.environ.pop(TOKEN_VARIABLE, None)  # an environment starts processes of its own: tools, sandboxes
    check_bind(host, token)
    import setproctitle

    from sync.base.tokenizers import fingerprint, load_tokenizer, vocab_size

    setproctitle.setproctitle(f"distill environment {settings.name}[{index}]")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # while loading, and at uvicorn's end
    tokenizer = load_tokenizer(settings.student)
    name, config = settings.name, settings.environment
    environment: Host
    if config.type == "python":
        from distill.environments.python_host import PythonEnvironment

        renderer = Renderer(tokenizer, config.chat_template_kwargs, settings.stop_token_ids)
        environment = PythonEnvironment(name, config, renderer)
    else:
        from distill.environments.verifiers_host import VerifiersEnvironment

        environment = VerifiersEnvironment(name, config, tokenizer)
    known = fingerprint(tokenizer), vocab_size(tokenizer, settings.student.known_ids)
    service = Service(environment, config, known, token, Claim(wire.RunIdentity(settings.run)))
    serve_app(service.app, host, port, grace=1)


def main() -> int:
    """Serve until signalled; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.environments.service", description="Serve one environment."
    )
    parser.add_argument("--config", type=Path, required=True, help="an EnvironmentService as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--index", type=int, default=0, help="process, for its title and its log")
    options = parser.parse_args()

    def work() -> None:
        settings = read_settings(EnvironmentService, options.config)
        serve(settings, options.host, options.port, options.index)

    chatty = ("httpx", "httpx2", "aiohttp.access", "verifiers")  # lines for every turn, and secret URLs
    return run_role(log, f"environment [{options.index}]", work, chatty)


if __name__ == "__main__":
    sys.exit(main())
