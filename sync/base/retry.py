"""What to do after a failure: repeat a call, or pause.

`retrying` and `retrying_async` repeat a call with exponential backoff (through tenacity); `Backoff` gives the
pauses alone, for a loop that does more.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
)

Retried = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
"""Exceptions to retry on, or a predicate of them; every other exception is raised at once."""


class Backoff:
    """Pauses in seconds that double from `first` up to `longest`."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self.reset()

    def reset(self) -> None:
        self._pause = self._first

    def next(self, at_least: float = 0.0) -> float:
        """The pause to make now: `at_least` what the peer asked for."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return max(pause, at_least)


def pause_told(retry_after: str | None) -> float | None:
    """Seconds, at least 0.05, that the value of a Retry-After asks for; None: it is no finite number."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return max(seconds, 0.05) if math.isfinite(seconds) else None


def retrying(
    on: Retried,
    *,
    within: float = math.inf,
    attempts: int = sys.maxsize,
    first: float = 0.05,
    longest: float = 2.0,
    note: Callable[[BaseException], None] | None = None,
) -> Retrying:
    """`retrying(...)(function, *arguments)` calls a function until it raises nothing of `on`.

    An error's `retry_after` (`sync.base.errors.Overloaded`) lengthens the pause before the next call.
    `within`: seconds after which the last error is raised, at once if the next pause would end later;
    `attempts`: calls after which it is. `note` hears of every error that is retried, before the pause.
    """
    return Retrying(
        before_sleep=None if note is None else lambda state: note(_error(state)),
        **_policy(on, within, attempts, first, longest),
    )


def retrying_async(on: Retried, *, within: float = math.inf) -> AsyncRetrying:
    """`await retrying_async(...)(coroutine_function, *arguments)`: see `retrying`."""
    return AsyncRetrying(sleep=asyncio.sleep, **_policy(on, within, sys.maxsize, 0.05, 2.0))


def _policy(on: Retried, within: float, attempts: int, first: float, longest: float) -> dict[str, Any]:
    doubled = wait_exponential(first, longest)

    def pause(state: RetryCallState) -> float:
        return max(doubled(state), getattr(_error(state), "retry_after", 0.0))

    is_retried = (lambda e: isinstance(e, on)) if isinstance(on, type | tuple) else on
    return {
        "retry": retry_if_exception(is_retried),
        "wait": pause,
        "stop": stop_before_delay(within) | stop_after_attempt(attempts),
        "reraise": True,
    }


def _error(state: RetryCallState) -> BaseException:
    """What the call before this pause raised."""
    error = state.outcome.exception() if state.outcome else None
    assert error is not None
    return error
