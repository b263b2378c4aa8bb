"""The client of one teacher: requests of bounded size to any of its replicas, retried until a deadline.

A request goes to the replica with the fewest outstanding tokens. A replica that fails, is full, or does not
answer /health while it holds a request is left alone for a while, and another gets the request. Batches for
the engine are formed by the service (`teacher_service.batching`), not here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from msgspec.structs import replace

from sync import wire
from sync.base.address import Place
from sync.base.errors import DistillError, Overloaded, TooLarge, Unreachable, WireError, WrongServer
from sync.base.retry import isolate
from sync.wire import Kept, Message, Scored, ScoreRefused, ScoreSequence, TeacherCompletion, TeacherPrompt
from sync.wire.claims import Claim
from sync.wire.client import MAX_SMALL, Peer
from sync.wire.peers import ProcessClients, Role

log = logging.getLogger(__name__)
W = TypeVar("W", ScoreSequence, TeacherPrompt)
TIMEOUT_SECONDS: Final = 300.0
"""Deadline of calls that give none, except `generate`."""
HIDDEN_FACTOR: Final = 8
"""Hidden states make long answers: a token with them counts as so many towards `request_tokens`."""
HEALTH_SECONDS: Final = 5.0
"""How often /health of a replica that holds a request is polled; two misses in a row: it is dead."""
RELEASE_SECONDS: Final = 10.0
WRONG_SECONDS: Final = 30.0
"""How long a replica that serves another run or model is left alone."""
MOST_NOTED: Final = 1 << 16


@dataclass
class Counters:
    """What one teacher has done for this client."""

    requests: int = 0
    sequences: int = 0
    refused: int = 0
    tokens: int = 0
    """Prompt and completion; of generation, as many as were allowed."""
    seconds: float = 0.0
    """Sum of the requests' times, retries included."""
    received_bytes: int = 0


class TeacherClient(ProcessClients):
    """One teacher; one instance serves all tasks of a loop.

    `claim`: the run that requests are made for. `request_tokens`: bound of one request (a longer sequence
    travels alone); what the teacher does not take at once is sent again in halves. After `info`, answers of
    another model are refused (WrongServer).
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[Place],
        token: str | None = None,
        claim: Claim | None = None,
        request_tokens: int = 65536,
    ) -> None:
        super().__init__(f"teacher {name!r}", Role.TEACHER, urls, token, TIMEOUT_SECONDS, claim)
        self.name, self.counters = name, Counters()
        self._request_tokens = request_tokens
        self._answered: dict[str, str] = {}

    async def info(self, timeout: float | None = None) -> wire.TeacherInfo:
        """TeacherInfo of all replicas; `max_length`, which may follow from free memory, is the least.

        Raises ConfigError when they are not the same teacher.
        """
        infos = await self._answers("/v1/info", wire.TeacherInfo, timeout)
        least = min(server_info.max_length for server_info in infos)
        info = self._same([replace(server_info, max_length=least) for server_info in infos])
        for peer in self._peers:
            peer.model = info.fingerprint
        return info

    async def first_info(self) -> wire.TeacherInfo:
        """TeacherInfo of the first replica that answers."""
        return wire.decode(await self._get("/v1/info"), wire.TeacherInfo)

    async def head(self) -> wire.Head:
        """The output head, for exact objectives."""
        return wire.decode(await self._get("/v1/head"), wire.Head)

    async def score(
        self, sequences: Sequence[ScoreSequence], want: wire.Want = wire.Want(), deadline: float | None = None
    ) -> list[Scored | ScoreRefused]:
        """Scores of `sequences`, in their order, within `deadline` seconds (long answers: see `Peer`).

        Raises Unreachable when no replica answers until then, Overloaded when all stay full, RemoteError when
        the teacher refuses the request as a whole. Cancelling aborts the work on the other side too.
        """

        def request(part: list[ScoreSequence], left: float) -> Message:
            return wire.ScoreRequest(sequences=part, want=want, deadline=left)

        limit = self._request_tokens // (HIDDEN_FACTOR if want.hidden else 1)
        parts = in_parts(sequences, 0, limit)
        return await self._send_all(parts, 0, request, wire.ScoreReply, deadline or TIMEOUT_SECONDS)

    async def generate(
        self,
        prompts: Sequence[TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        deadline: float | None = None,
        temperature: float = 1.0,
    ) -> list[TeacherCompletion | ScoreRefused]:
        """Completions of `prompts`, in their order; raises as `score` does.

        Without a deadline it takes as long as it takes: a long completion is no fault, and a replica that
        stops answering /health loses its part of the work to another.
        """

        def request(part: list[TeacherPrompt], left: float) -> Message:
            return wire.TeacherGenerateRequest(
                prompts=part,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
                deadline=deadline and left,
            )

        parts = in_parts(prompts, max_tokens, self._request_tokens)
        return await self._send_all(
            parts, max_tokens, request, wire.TeacherGenerateReply, deadline or math.inf
        )

    async def release(self, kept: Sequence[Kept]) -> None:
        """Have the replicas forget these scores; one that cannot be told evicts them in time."""
        for replica in self._processes:
            peer = replica.peer
            if keys := [reference.key for reference in kept if reference.url == peer.url]:
                body = wire.encode(wire.ScoresRelease(keys=keys))
                try:
                    await peer.once("/v1/scores/release", body, RELEASE_SECONDS, MAX_SMALL)
                except DistillError as error:
                    log.info("scores stay at %s: %s", peer.url, error)

    def servers(self) -> wire.TeacherServers:
        """Where the replicas in use are, and which model was checked."""
        used = [replica.peer for replica in self._processes if not replica.excluded] or [
            self._processes[0].peer
        ]
        urls = [peer.url for peer in used if peer.placed]
        if not urls:
            raise Unreachable(f"no process of teacher {self.name!r} has registered with the controller")
        return wire.TeacherServers(urls=urls, fingerprint=self._processes[0].peer.model)

    def answered_by(self, id: str) -> str:
        """URL of the replica that answered last for this id; the teacher's name where none has."""
        return self._answered.pop(id, self.name)

    def leave_out(self, server: str) -> bool:
        """Send the replica at this URL no more requests; whether another is left."""
        for replica in self._processes:
            replica.excluded |= replica.peer.url == server
        return not all(replica.excluded for replica in self._processes)

    async def _get(self, path: str) -> memoryview:
        return (await self._exchange(path, None, 0, time.monotonic() + TIMEOUT_SECONDS))[0]

    async def _send_all(
        self,
        parts: Sequence[list[W]],
        extra: int,
        request: Callable[[list[W], float], Message],
        reply: type[wire.ScoreReply] | type[wire.TeacherGenerateReply],
        deadline: float,
    ) -> list[Any]:
        """Results of all parts, which travel at the same time, in order; `extra`: see `_tokens`."""
        path = "/v1/score" if reply is wire.ScoreReply else "/v1/generate"
        expires = time.monotonic() + deadline

        async def send(part: Sequence[W]) -> list[Any]:
            started, tokens = time.monotonic(), sum(_tokens(item, extra) for item in part)
            body = wire.encode(request(list(part), max(0.001, expires - started)))
            answer, url = await self._exchange(path, body, tokens, expires)
            if len(self._answered) > MOST_NOTED:  # of callers that never use `answered_by`
                self._answered.clear()
            self._answered |= dict.fromkeys((item.id for item in part), url)
            results = [_at(url, result) for result in wire.decode(answer, reply).results]
            if [result.id for result in results] != [item.id for item in part]:
                raise WireError(
                    f"teacher {self.name!r} answered {len(results)} results for other ids than it was sent"
                )
            counters = self.counters
            counters.requests += 1
            counters.sequences += len(results)
            counters.refused += sum(isinstance(result, ScoreRefused) for result in results)
            counters.tokens += tokens
            counters.seconds += time.monotonic() - started
            counters.received_bytes += len(answer)
            return results

        tasks = [asyncio.ensure_future(isolate(part, send, _refused, on=(TooLarge,))) for part in parts]
        try:
            return [result for results in await asyncio.gather(*tasks) for result in results]
        finally:
            for task in tasks:
                task.cancel()

    async def _exchange(
        self, path: str, body: bytes | None, tokens: int, expires: float
    ) -> tuple[memoryview, str]:
        """The first answer before `expires` (time.monotonic()), and the URL of the replica that gave it.

        Raises Unreachable when there was none, Overloaded when the last replica was full, RemoteError for a
        refusal, WrongServer when all serve another run or model.
        """
        while True:
            used = [replica for replica in self._processes if not replica.excluded] or self._processes
            replica = min(used, key=lambda process: (process.pause, process.load))
            if pause := replica.pause:
                await asyncio.sleep(min(pause, max(0.0, expires - time.monotonic())))
            replica.load += tokens
            url = replica.peer.url  # of the process that is asked; it may move meanwhile
            try:
                left = None if expires == math.inf else max(0.05, expires - time.monotonic())
                answer = await _attempt(replica.peer, path, body, left)
                replica.answered()
                return answer, url
            except WrongServer as error:
                replica.wrong = True
                replica.failed(WRONG_SECONDS)
                if all(other.wrong for other in used):
                    raise
                log.error("%s", error)
            except (Unreachable, Overloaded) as error:
                replica.failed(error.retry_after if isinstance(error, Overloaded) else 0.0)
                if time.monotonic() >= expires or min(r.back_at for r in used) >= expires:
                    raise
                log.warning("%s; retrying", error)
            finally:
                replica.load -= tokens


async def _attempt(peer: Peer, path: str, body: bytes | None, timeout: float | None) -> memoryview:
    """One exchange, aborted when the replica stops answering /health."""
    call = asyncio.ensure_future(peer.once(path, body, timeout))
    misses = 0
    try:
        while not (await asyncio.wait({call}, timeout=HEALTH_SECONDS))[0]:
            misses = 0 if await peer.alive() else misses + 1
            if misses == 2 and not call.done():
                raise Unreachable(f"{peer.url} holds a request and does not answer /health")
        return call.result()
    finally:
        call.cancel()


def _at(url: str, result: Any) -> Any:
    """`result`, whose kept scores are at `url`."""
    if not isinstance(result, Scored) or result.kept is None:
        return result
    return replace(result, kept=replace(result.kept, url=url))


def _refused(_: object, error: Exception) -> NoReturn:
    """A single sequence that is too large is an error of the whole call."""
    raise error


def _tokens(item: ScoreSequence | TeacherPrompt, extra: int) -> int:
    """Count the tokens that its bytes hold, sound or not, and `extra`."""
    return len(item.token_ids.data) // 4 + extra


def in_parts(work: Sequence[W], extra: int, limit: int) -> list[list[W]]:
    """Consecutive work of at most `limit` tokens (at least one each); `extra`: see `_tokens`."""
    parts, tokens = list[list[W]](), 0
    for item in work:
        size = _tokens(item, extra)
        if parts and tokens + size <= limit:
            parts[-1].append(item)
            tokens += size
        else:
            parts.append([item])
            tokens = size
    return parts
