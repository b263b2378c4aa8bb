"""The client of one teacher: several replicas, few large requests, retries until a deadline.

score() ─┐                                         ┌─▶ replica 0
score() ─┼─▶ pending (per want) ─▶ bounded requests ┼─▶ replica 1   least outstanding tokens first
score() ─┘   for `window` seconds                   └─▶ replica 2
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from sync.claims import Claim
from sync.errors import ConfigError, DistillError, Unreachable, WireError
from sync.wire import (
    Head,
    Scored,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    ScoreSequence,
    TeacherCompletion,
    TeacherGenerateReply,
    TeacherGenerateRequest,
    TeacherInfo,
    TeacherPrompt,
    Want,
    decode,
    encode,
)
from teacher_service.replicas import HEALTH_SECONDS, Replicas

Result = Scored | ScoreRefused
W = TypeVar("W")
HIDDEN_FACTOR: Final = 8
"""Hidden states are long: a token with them counts as so many towards `request_tokens`."""
MOST_NOTED: Final = 1 << 16


@dataclass
class Counters:
    """What one teacher has done for this client."""

    requests: int = 0
    sequences: int = 0
    refused: int = 0
    tokens: int = 0
    """Prompt and completion; of writing, as many as were allowed."""
    seconds: float = 0.0
    """Sum of the requests' times, retries included."""
    received_bytes: int = 0


class _Kind(NamedTuple):
    """Sequences of one kind may share a request."""

    want: Want
    gather: bool


@dataclass(eq=False)
class _Part:
    """Sequences of one caller that travel in one request."""

    sequences: list[ScoreSequence]
    tokens: int
    expires: float
    future: asyncio.Future[list[Result]]


@dataclass(eq=False)
class _Pending:
    """A request that is being put together."""

    timer: asyncio.TimerHandle
    parts: list[_Part] = field(default_factory=list)
    tokens: int = 0


class TeacherClient:
    """One teacher. Use inside `async with`, or call `aclose()`; one instance serves all tasks of a loop.

    `window`: longest time that sequences wait for those of other callers, seconds. `request_tokens`: bound of
    one request (a longer sequence travels alone). `timeout`: deadline of calls that give none, seconds.
    `health`: how often a replica that holds a request is asked whether it lives, seconds. `claim`: the run
    that is asked for. Once `info` was asked, answers of another model are refused (WrongServer).
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        token: str | None = None,
        *,
        timeout: float = 300.0,
        window: float = 0.002,
        request_tokens: int = 65536,
        health: float = HEALTH_SECONDS,
        claim: Claim | None = None,
    ) -> None:
        if not urls:
            raise ConfigError(f"teacher {name!r} has no urls: give at least one")
        self.name, self.counters = name, Counters()
        self.replicas = Replicas(urls, token, timeout, health, claim)
        self._timeout, self._window, self._request_tokens = timeout, window, request_tokens
        self._pending: dict[_Kind, _Pending] = {}
        self._answered: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TeacherClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give up what is under way and close the connections."""
        for kind in list(self._pending):
            self._flush(kind)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replicas.aclose()

    # --- questions ----------------------------------------------------------------------------------------

    async def info(self, timeout: float | None = None) -> TeacherInfo:
        """What the replicas say about themselves. Raises ConfigError when they are not the same teacher."""
        peers = [replica.peer for replica in self.replicas.all]
        infos = await asyncio.gather(*(peer.call("/v1/info", None, TeacherInfo, timeout) for peer in peers))
        for peer, info in zip(peers, infos, strict=True):
            if info != infos[0]:
                raise ConfigError(
                    f"replicas of teacher {self.name!r} differ: {peer.url} serves {info}, "
                    f"{peers[0].url} serves {infos[0]}: start them from the same configuration"
                )
        for peer in peers:
            peer.model = infos[0].fingerprint
        return infos[0]

    async def first_info(self) -> TeacherInfo:
        """What the first replica that answers says about itself."""
        expires = time.monotonic() + self._timeout
        return decode((await self.replicas.exchange("/v1/info", None, 0, expires)).body, TeacherInfo)

    def answered_by(self, id: str) -> str:
        """URL of the replica that answered last for this id; the teacher's name where none has."""
        return self._answered.pop(id, self.name)

    def leave_out(self, server: str) -> bool:
        """Ask the replica at this URL nothing more; whether another is left."""
        return self.replicas.leave_out(server)

    def _note(self, sent: Sequence[ScoreSequence | TeacherPrompt], url: str) -> None:
        """Who answered, until it is asked; callers that never ask cost no more than MOST_NOTED notes."""
        if len(self._answered) > MOST_NOTED:
            self._answered.clear()
        self._answered |= dict.fromkeys((one.id for one in sent), url)

    async def head(self, timeout: float | None = None) -> Head:
        """The output head, for exact objectives."""
        return decode(await self.head_body(timeout), Head)

    async def head_body(self, timeout: float | None = None) -> bytes:
        """The output head as it came, to pass it on."""
        expires = time.monotonic() + (timeout or self._timeout)
        return (await self.replicas.exchange("/v1/head", None, 0, expires)).body

    async def score(
        self, sequences: Sequence[ScoreSequence], want: Want = Want(), deadline: float | None = None
    ) -> list[Result]:
        """Marks of `sequences`, in their order, within `deadline` seconds.

        Raises Unreachable when no replica answers until then, Overloaded when all stay full, RemoteError when
        the teacher refuses the request as a whole. Cancelling gives the work up on the other side too.
        """
        limit = deadline or self._timeout
        expires = time.monotonic() + limit
        cuts = in_parts(sequences, [_tokens(one) for one in sequences], self._limit(want))
        parts = [self._enqueue(cut, tokens, want, expires) for cut, tokens in cuts]
        try:
            async with asyncio.timeout(limit):
                answers = await asyncio.gather(*(part.future for part in parts))
        except TimeoutError:
            raise Unreachable(f"teacher {self.name!r} did not answer within {limit:.0f} s") from None
        finally:
            for part in parts:
                part.future.cancel()
        return [result for answer in answers for result in answer]

    async def write(
        self,
        prompts: Sequence[TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        deadline: float | None = None,
        temperature: float = 1.0,
    ) -> list[TeacherCompletion | ScoreRefused]:
        """Completions of `prompts`, in their order; raises as `score` does.

        One request after the other, each of no more than `request_tokens` with all that it may become.
        """
        expires = time.monotonic() + (deadline or self._timeout)
        results: list[TeacherCompletion | ScoreRefused] = []
        sizes = [_tokens(prompt) + max_tokens for prompt in prompts]
        for part, tokens in in_parts(prompts, sizes, self._request_tokens):
            request = TeacherGenerateRequest(
                prompts=part,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=list(stop_token_ids),
                deadline=max(0.001, expires - time.monotonic()),
            )
            body = encode(request)
            started = time.monotonic()
            answer, url = await self.replicas.exchange("/v1/generate", body, tokens, expires)
            self._note(part, url)
            found = decode(answer, TeacherGenerateReply).results
            self._check_ids([one.id for one in found], [prompt.id for prompt in part])
            refused = sum(isinstance(one, ScoreRefused) for one in found)
            self._count(len(answer), tokens, time.monotonic() - started, len(found), refused)
            results += found
        return results

    # --- putting requests together ------------------------------------------------------------------------

    def _limit(self, want: Want) -> int:
        """Tokens of one request."""
        return self._request_tokens // (HIDDEN_FACTOR if want.hidden else 1)

    def _enqueue(self, sequences: list[ScoreSequence], tokens: int, want: Want, expires: float) -> _Part:
        loop = asyncio.get_running_loop()
        kind = _Kind(want, any(sequence.gather_ids is not None for sequence in sequences))
        pending = self._pending.get(kind)
        if pending is not None and pending.tokens + tokens > self._limit(want):
            self._flush(kind)
            pending = None
        if pending is None:
            timer = loop.call_later(self._window, self._flush, kind)
            pending = self._pending[kind] = _Pending(timer)
        part = _Part(sequences, tokens, expires, loop.create_future())
        pending.parts.append(part)
        pending.tokens += tokens
        return part

    def _flush(self, kind: _Kind) -> None:
        """Send what is pending, and give it up when every caller has left."""
        pending = self._pending.pop(kind)
        pending.timer.cancel()
        task = asyncio.create_task(self._send(pending.parts, kind.want))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        waiting = {part.future for part in pending.parts}

        def one_left(future: asyncio.Future[list[Result]]) -> None:
            waiting.discard(future)
            if not waiting:
                task.cancel()

        for future in list(waiting):
            future.add_done_callback(one_left)

    async def _send(self, parts: list[_Part], want: Want) -> None:
        """One request for several callers: each gets its results, or the error."""
        started = time.monotonic()
        expires = max(part.expires for part in parts)
        sequences = [sequence for part in parts for sequence in part.sequences]
        tokens = sum(part.tokens for part in parts)
        body = encode(ScoreRequest(sequences=sequences, want=want, deadline=max(0.001, expires - started)))
        try:
            answer, url = await self.replicas.exchange("/v1/score", body, tokens, expires)
            self._note(sequences, url)
            results = self._results(answer, sequences)
        except DistillError as error:
            for part in parts:
                if not part.future.done():
                    part.future.set_exception(error)
            return
        refused = sum(isinstance(result, ScoreRefused) for result in results)
        self._count(len(answer), tokens, time.monotonic() - started, len(results), refused)
        first = 0
        for part in parts:
            if not part.future.done():
                part.future.set_result(results[first : first + len(part.sequences)])
            first += len(part.sequences)

    def _results(self, answer: bytes, sequences: list[ScoreSequence]) -> list[Result]:
        results = decode(answer, ScoreReply).results
        self._check_ids([result.id for result in results], [sequence.id for sequence in sequences])
        return results

    def _check_ids(self, found: list[str], options: list[str]) -> None:
        if found != options:
            raise WireError(f"teacher {self.name!r} answered {len(found)} results for others than asked")

    def _count(self, received: int, tokens: int, seconds: float, results: int, refused: int) -> None:
        counters = self.counters
        counters.requests += 1
        counters.sequences += results
        counters.refused += refused
        counters.tokens += tokens
        counters.seconds += seconds
        counters.received_bytes += received


def in_parts(work: Sequence[W], sizes: Sequence[int], limit: int) -> list[tuple[list[W], int]]:
    """Consecutive pieces of work that fit into one request, at least one each, and their sizes in all."""
    parts: list[tuple[list[W], int]] = []
    for piece, size in zip(work, sizes, strict=True):
        if parts and parts[-1][1] + size <= limit:
            held, tokens = parts[-1]
            held.append(piece)
            parts[-1] = held, tokens + size
        else:
            parts.append(([piece], size))
    return parts


def _tokens(sent: ScoreSequence | TeacherPrompt) -> int:
    """As many as its bytes hold: whether it is sound is for the teacher to say."""
    return len(sent.token_ids.data) // 4
