"""Which pauses are made, what is retried, and when it ends. Nobody really waits."""

import pytest

from sync.base.errors import Overloaded
from sync.base.retry import Backoff, retrying, retrying_async


class Clock:
    """tenacity's `time`, whose `sleep` moves `monotonic`; no thread of another test uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pauses = 100.0, list[float]()
        for module in ("tenacity", "tenacity.nap"):
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def failing(*errors: Exception):  # type: ignore[no-untyped-def]
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_pauses_double_up_to_the_longest_and_heed_what_a_peer_asks_for(clock: Clock) -> None:
    call = failing(*[OSError()] * 4, Overloaded("full", retry_after=0.7))
    assert retrying((OSError, Overloaded), first=0.1, longest=0.4)(call) == "done"
    assert clock.pauses == [0.1, 0.2, 0.4, 0.4, 0.7]


def test_the_last_error_is_raised_when_the_next_pause_would_end_too_late(clock: Clock) -> None:
    with pytest.raises(OSError, match="fourth"):
        retrying(OSError, within=1.0, first=0.1, longest=9)(
            failing(OSError(), OSError(), OSError(), OSError("fourth"))
        )
    assert clock.pauses == [0.1, 0.2, 0.4]


def test_the_last_attempt_raises_and_each_retried_error_is_noted(clock: Clock) -> None:
    errors, noted = [OSError("first"), OSError("second"), OSError("third")], list[BaseException]()
    with pytest.raises(OSError, match="third"):
        retrying(OSError, attempts=3, first=0.5, longest=0.5, note=noted.append)(failing(*errors))
    assert noted == errors[:2]
    assert clock.pauses == [0.5, 0.5]


async def test_other_errors_are_raised_at_once() -> None:
    with pytest.raises(KeyError):
        retrying(OSError)(failing(KeyError()))

    async def call() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        await retrying_async(lambda error: isinstance(error, OSError))(call)


def test_a_backoff_begins_again_after_a_success() -> None:
    backoff = Backoff(0.5, 2.0)
    assert [backoff.next(), backoff.next(1.5), backoff.next(), backoff.next()] == [0.5, 1.5, 2.0, 2.0]
    backoff.reset()
    assert backoff.next() == 0.5
