"""The client of one teacher: a request goes once, to one of its processes, and what became of it is reported.

Of the processes in use it is the one with the fewest outstanding tokens. One that fails, is full, or does not
answer /health while it holds a request is left alone for a while (`pause`). Nothing is sent twice, split or
waited for here: that is the caller's (`distill.scoring.ask`). Batches are formed by the service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from sync import wire
from sync.base.address import Place
from sync.base.errors import DistillError, Overloaded, TooLarge, Unreachable, WrongServer
from sync.wire import Kept, Message, Scored, ScoreRefused, ScoreSequence, TeacherCompletion, TeacherPrompt
from sync.wire.claims import Claim
from sync.wire.client import MAX_SMALL, Peer
from sync.wire.peers import ProcessClient, ProcessClients, Role

log = logging.getLogger(__name__)
A = TypeVar("A")
REQUEST_SECONDS: Final = 300.0
"""Limit of one request that gives none, except `generate`."""
HEALTH_SECONDS: Final = 5.0
"""How often /health of a process that holds a request is polled; two misses in a row: it is dead."""
STALLED_SECONDS: Final = 10.0
"""How long such a process is left alone: the next request to it might wait as long again."""
RELEASE_SECONDS: Final = 10.0
WRONG_SECONDS: Final = 30.0
"""How long a process that serves another run or model is left alone."""


class Stalled(Unreachable):
    """A process holds a request and does not answer /health."""


@dataclass
class Counters:
    """What one teacher has done for this client."""

    requests: int = 0
    sequences: int = 0
    refused: int = 0
    tokens: int = 0
    """Prompt and completion; of generation, as many as were allowed."""
    seconds: float = 0.0
    """Sum of the times of requests that were answered."""
    received_bytes: int = 0


class Reply(NamedTuple, Generic[A]):
    """The answer to one request."""

    results: list[A]
    """One for each message of the request, in its order."""
    server: str
    """URL of the process that gave it."""


class TeacherClient(ProcessClients):
    """One teacher; one instance serves all tasks of a loop.

    `claim`: the run that requests are made for. After `info`, answers of another model are refused.

    Every request raises Unreachable (the process is gone, hangs, or is another's, or one message took longer
    than its time limit), Overloaded (it is full), TooLarge (it takes or answers fewer messages at once),
    RemoteError (it refuses the whole request), WireError (the answer is no message) or WrongServer (all
    processes serve another run or model). Cancelling aborts the work on the other side too.
    """

    def __init__(
        self, name: str, urls: Sequence[Place], token: str | None = None, claim: Claim | None = None
    ) -> None:
        super().__init__(f"teacher {name!r}", Role.TEACHER, urls, token, REQUEST_SECONDS, claim)
        self.name, self.counters = name, Counters()

    @property
    def _used(self) -> list[ProcessClient]:
        return [process for process in self._processes if not process.excluded] or self._processes

    @property
    def processes(self) -> int:
        """How many are in use."""
        return len(self._used)

    @property
    def pause(self) -> float:
        """Seconds until one of them may be asked."""
        return min(process.pause for process in self._used)

    async def info(self, timeout: float | None = None) -> wire.TeacherInfo:
        """TeacherInfo of all processes; `max_length`, which may follow from free memory, is the least.

        Raises ConfigError when they are not the same teacher. Retried, as all of them must answer.
        """
        infos = await self._answers("/v1/info", wire.TeacherInfo, timeout)
        least = min(server_info.max_length for server_info in infos)
        info = self._same([replace(server_info, max_length=least) for server_info in infos])
        for peer in self._peers:
            peer.model = info.fingerprint
        return info

    async def first_info(self) -> wire.TeacherInfo:
        """TeacherInfo of one process."""
        return wire.decode((await self._forward("/v1/info"))[0], wire.TeacherInfo)

    async def head(self) -> wire.Head:
        """The output head, for exact objectives."""
        return wire.decode((await self._forward("/v1/head"))[0], wire.Head)

    async def score(
        self, sequences: Sequence[ScoreSequence], want: wire.Want = wire.Want(), limit: float | None = None
    ) -> Reply[Scored | ScoreRefused]:
        """Scores of `sequences`, within `limit` or REQUEST_SECONDS (long answers: see `Peer`)."""
        request = wire.ScoreRequest(sequences=[*sequences], want=want)
        limit = limit or REQUEST_SECONDS
        reply: Reply[Any] = await self._send("/v1/score", request, wire.ScoreReply, sequences, limit)
        results = [
            replace(result, kept=replace(result.kept, url=reply.server))
            if isinstance(result, Scored) and result.kept is not None
            else result
            for result in reply.results
        ]
        return Reply(results, reply.server)

    async def generate(
        self,
        prompts: Sequence[TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        temperature: float = 1.0,
        limit: float | None = None,
    ) -> Reply[TeacherCompletion | ScoreRefused]:
        """Completions of `prompts`. Without a limit they take as long as they take: a long completion is no
        fault, and a process that stops answering /health raises Unreachable."""
        request = wire.TeacherGenerateRequest(
            prompts=[*prompts],
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=[*stop_token_ids],
        )
        extra = len(prompts) * max_tokens
        return await self._send("/v1/generate", request, wire.TeacherGenerateReply, prompts, limit, extra)

    async def release(self, kept: Sequence[Kept]) -> None:
        """Have the processes forget these scores; one that cannot be told evicts them in time."""
        for peer in self._peers:
            if keys := [reference.key for reference in kept if reference.url == peer.url]:
                body = wire.encode(wire.ScoresRelease(keys=keys))
                try:
                    await peer.once("/v1/scores/release", body, RELEASE_SECONDS, MAX_SMALL)
                except DistillError as error:
                    log.info("scores stay at %s: %s", peer.url, error)

    def servers(self) -> wire.TeacherServers:
        """Where the processes in use are, and which model was checked."""
        urls = [process.peer.url for process in self._used if process.peer.placed]
        if not urls:
            raise Unreachable(f"no process of teacher {self.name!r} has registered with the controller")
        return wire.TeacherServers(urls=urls, fingerprint=self._peers[0].model)

    def leave_out(self, server: str) -> bool:
        """Send the process at this URL no more requests; whether another is left."""
        for process in self._processes:
            process.excluded |= process.peer.url == server
        return not all(process.excluded for process in self._processes)

    async def _send(
        self,
        path: str,
        request: Message,
        kind: type[wire.ScoreReply] | type[wire.TeacherGenerateReply],
        messages: Sequence[ScoreSequence] | Sequence[TeacherPrompt],
        limit: float | None,
        extra: int = 0,
    ) -> Reply[Any]:
        """One request of several messages; `extra`: tokens that they take beyond their own."""
        started, tokens = time.monotonic(), sum(map(tokens_of, messages)) + extra
        try:
            answer, server = await self._forward(path, wire.encode(request), tokens, limit)
        except Unreachable as error:
            if len(messages) > 1 and limit is not None and time.monotonic() - started >= limit:
                raise TooLarge(
                    f"{len(messages)} messages were not answered in {limit:g} s: {error}"
                ) from None
            raise
        results = wire.decode(answer, kind).results
        counters = self.counters
        counters.requests += 1
        counters.sequences += len(results)
        counters.refused += sum(isinstance(result, ScoreRefused) for result in results)
        counters.tokens += tokens
        counters.seconds += time.monotonic() - started
        counters.received_bytes += len(answer)
        return Reply(results, server)

    async def _forward(
        self, path: str, body: bytes | None = None, tokens: int = 0, limit: float | None = REQUEST_SECONDS
    ) -> tuple[memoryview, str]:
        """The answer, and the URL of the process that gave it."""
        used = self._used
        process = min(used, key=lambda process: (process.pause, process.load))
        process.load += tokens
        url = process.peer.url  # of the process that is asked; it may move meanwhile
        try:
            answer = await _watched(process.peer, path, body, limit)
        except WrongServer as error:
            process.wrong = True
            process.failed(WRONG_SECONDS)
            if all(other.wrong for other in used):
                raise
            log.error("%s", error)
            raise Unreachable(str(error)) from None
        except (Unreachable, Overloaded) as error:
            told = error.retry_after if isinstance(error, Overloaded) else 0.0
            process.failed(STALLED_SECONDS if isinstance(error, Stalled) else told)
            raise
        finally:
            process.load -= tokens
        process.answered()
        return answer, url


async def _watched(peer: Peer, path: str, body: bytes | None, timeout: float | None) -> memoryview:
    """One exchange, aborted when the process stops answering /health."""
    call = asyncio.ensure_future(peer.once(path, body, timeout))
    misses = 0
    try:
        while not (await asyncio.wait({call}, timeout=HEALTH_SECONDS))[0]:
            misses = 0 if await peer.alive() else misses + 1
            if misses == 2 and not call.done():
                raise Stalled(f"{peer.url} holds a request and does not answer /health")
        return call.result()
    finally:
        call.cancel()


def tokens_of(message: ScoreSequence | TeacherPrompt) -> int:
    """How many its bytes hold, sound or not."""
    return len(message.token_ids.data) // 4
