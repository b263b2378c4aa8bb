"""The experts that a mixture-of-experts student was sampled through, by request and position. No engine is
imported here: one that records routes itself gives them with its completions (`NativeRoutes`); inside of
another, `engine` fills our record (`RouteRecord`).

The route of position j is the one of the forward pass that read token j and sampled token j + 1, so the last
token of a completion has none. In a prompt it is that of its first pass. Later passes over the same tokens,
after a preemption or a swap of weights, change nothing: the first write wins.

Letters: N tokens of one pass, M mixture-of-experts layers, K experts of a token, E experts of a layer,
P tokens of a prompt, T of its completion, R the first position whose route is wanted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from sync.base.errors import DataError
from sync.wire import Routing

ROUTES_FROM: Final = "distill_routes_from"
"""R among a request's `extra_args` of vLLM's sampling parameters; a request without it is not recorded."""
TOGETHER: Final = 16
"""Most completions whose routes come in one answer: 50 MB for 8,192 tokens each of Qwen3-30B-A3B."""
KEPT_SECONDS: Final = 60.0
"""How long the routes of a request that ended wait to be taken; then whoever asked for it has left."""


class _Request:
    """Tokens and routes of the first `length` positions from R on of one request; all starts are behind R."""

    def __init__(self, shape: Routing, first: int) -> None:
        """`first` is R."""
        self.first, self.length = first, 0
        self.unread: range | None = None
        """Positions before a recorded pass that no recorded pass read; None: there are none."""
        self.ended: float | None = None
        """When the engine let go of it; None: it is in flight."""
        self._token_N = np.empty(0, np.int32)
        self._route_NMK = np.empty((0, shape.layers, shape.chosen), np.dtype(shape.dtype))

    def write(self, start: int, token_N: np.ndarray, route_NMK: np.ndarray) -> None:
        if start > self.length:
            self.unread = self.unread or range(self.length, start)
            return
        again = min(self.length - start, len(token_N))
        (changed,) = np.nonzero(self._token_N[start : start + again] != token_N[:again])
        if len(changed):  # the engine threw a sampled token away, and all that followed from it
            again = int(changed[0])
            self.length = start + again
        end = start + len(token_N)
        if end <= self.length:
            return
        if end > len(self._token_N):
            room = max(end, 2 * len(self._token_N)) - self.length
            self._token_N, self._route_NMK = (
                np.concatenate([array[: self.length], np.empty((room, *array.shape[1:]), array.dtype)])
                for array in (self._token_N, self._route_NMK)
            )
        self._token_N[self.length : end] = token_N[again:]
        self._route_NMK[self.length : end] = route_NMK[again:]
        self.length = end

    def message(self) -> dict[str, Any]:
        if self.unread is not None:
            begin, end = (self.first + place for place in (self.unread.start, self.unread.stop))
            return {
                "error": f"positions {begin} to {end - 1} came from a cache, or "
                "from a time without a record: keep enable-prefix-caching = false, and record from the start"
            }
        routes_NMK = self._route_NMK[: self.length]
        return {
            "token_ids": self._token_N[: self.length].tobytes(),
            "routes": routes_NMK.tobytes(),
            "dtype": routes_NMK.dtype.str,
            "shape": list(routes_NMK.shape),
        }


class RouteRecord:
    """Routes of the requests of one worker, from their first pass until they are taken. A request that ended
    and is not taken within KEPT_SECONDS is forgotten at the next end of another one. In flight it takes up to
    twice `shape.bytes_per_token` + 4 bytes a token."""

    def __init__(self, shape: Routing, clock: Callable[[], float] = time.monotonic) -> None:
        self.shape, self._clock = shape, clock
        self._requests: dict[str, _Request] = {}

    def write(
        self, request: str, start: int, token_N: np.ndarray, route_NMK: np.ndarray, first: int = 0
    ) -> None:
        """What one pass gave for the tokens of `request` at positions `start` … `start` + N - 1. `first`: R,
        the same in all passes of a request."""
        recorded = self._requests.get(request)
        if recorded is None:
            recorded = self._requests[request] = _Request(self.shape, first)
        known = max(0, first - start)
        if known < len(token_N):
            recorded.write(start + known - first, token_N[known:], route_NMK[known:])

    def end(self, requests: Iterable[str]) -> None:
        """The engine let go of these: finished, or aborted."""
        now = self._clock()
        for request in requests:
            if request in self._requests:
                self._requests[request].ended = now
        self._requests = {
            request: recorded
            for request, recorded in self._requests.items()
            if recorded.ended is None or now - recorded.ended <= KEPT_SECONDS
        }

    def take(self, request: str) -> dict[str, Any] | None:
        """Message for `routes_of` with all that is recorded of `request`, which is forgotten. None: nothing
        is. Only a request whose completion was given out is taken: it writes no more. `request` may be its
        caller's name for it, to which vLLM adds "-" and a random part."""
        if request not in self._requests:
            request = next((name for name in self._requests if name.rpartition("-")[0] == request), request)
        recorded = self._requests.pop(request, None)
        return None if recorded is None else recorded.message()


def routes_of(message: dict[str, Any] | None, token_ids: np.ndarray) -> np.ndarray:
    """Routes u1 or i4 [P + T - 1 - R, M, K] of a finished sequence, `token_ids` i4 [P + T - R] from position
    R on, from its `take`.

    Raises DataError when there are none, or not for every position, or of other tokens.
    """
    count = len(token_ids) - 1
    if message is None:
        raise DataError(
            f"no routes of a sequence of {count + 1} tokens: they were taken before, or it ended more than "
            f"{KEPT_SECONDS:.0f} s ago, or it began before they were recorded"
        )
    if "error" in message:
        raise DataError(f"no whole routes of a sequence of {count + 1} tokens: {message['error']}")
    recorded_N = np.frombuffer(message["token_ids"], np.int32)
    if len(recorded_N) < count or not np.array_equal(recorded_N[:count], token_ids[:count]):
        raise DataError(
            f"routes of {len(recorded_N)} tokens do not belong to a sequence of {count + 1} tokens: the "
            "engine computed other ones than it gave out; this version of vLLM is not supported"
        )
    routes_NMK = np.frombuffer(message["routes"], message["dtype"]).reshape(message["shape"])
    return routes_NMK[:count]


# --- API process ----------------------------------------------------------------------------------------


class NativeRoutes(NamedTuple):
    """Routes that an engine records itself, for all layers of the model, those without experts too."""

    shape: Routing
    layers: list[int]
    """The M that have experts."""

    async def routes(self, request: str, token_ids: np.ndarray, native: np.ndarray | None) -> np.ndarray:
        """Routes u1 or i4 [P + T - 1, M, K] of `request`, a sequence of `token_ids` i4 [P + T], of which the
        engine gave `native`. Raises DataError when there are none, or not for every position."""
        if native is None or native.shape[::2] != (len(token_ids) - 1, self.shape.chosen):
            raise DataError(
                f"the engine gave {0 if native is None else native.shape} routes of a sequence of "
                f"{len(token_ids)} tokens, of which all but the last have {self.shape.chosen} a layer: this "
                "version of vLLM is not supported"
            )
        return native[:, self.layers].astype(self.shape.dtype)


Messages: TypeAlias = list[dict[str, Any] | None]
"""Of `RouteRecord.take`, of several requests."""


class RouteQueue:
    """Takes the routes of completions that end together by one call to the worker, which then does not
    generate."""

    def __init__(self, take: Callable[[list[str]], Awaitable[Messages]]) -> None:
        self._take = take
        self._next: tuple[list[str], asyncio.Task[Messages]] | None = None  # a call that is to be made
        self._busy = asyncio.Lock()

    async def routes(self, request: str, token_ids: np.ndarray, native: np.ndarray | None) -> np.ndarray:
        """See `NativeRoutes`; raises what the call raises, too."""
        return routes_of(await self.take(request), token_ids)

    async def take(self, request: str) -> dict[str, Any] | None:
        """The message of a request whose completion was given out. Raises what the call raises."""
        if self._next is None or len(self._next[0]) == TOGETHER:
            requests: list[str] = []
            self._next = requests, asyncio.create_task(self._answers(requests))
        requests, answers = self._next
        place = len(requests)
        requests.append(request)
        return (await asyncio.shield(answers))[place]  # who leaves does not end it for the others

    async def _answers(self, requests: list[str]) -> Messages:
        async with self._busy:
            if self._next is not None and self._next[0] is requests:
                self._next = None
            return await self._take(requests)


RouteSource: TypeAlias = NativeRoutes | RouteQueue
