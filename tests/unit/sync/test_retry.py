"""Which pauses are made, what is retried, and when it ends. Nobody really waits."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sync.base.errors import Overloaded
from sync.base.retry import Backoff, retrying, retrying_async


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those of tenacity, whose clock they alone move; no thread of another test uses it."""
    made = list[float]()
    clock = SimpleNamespace(sleep=made.append, monotonic=lambda: 100.0 + sum(made))
    for module in ("tenacity", "tenacity.nap"):
        monkeypatch.setattr(f"{module}.time", clock)
    return made


def failing(*errors: Exception) -> Callable[[], str]:
    left = [*errors]

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_pauses_double_up_to_the_longest_and_heed_what_a_peer_asks_for(pauses: list[float]) -> None:
    call = failing(*[OSError()] * 4, Overloaded("full", retry_after=0.7))
    assert retrying((OSError, Overloaded), first=0.1, longest=0.4)(call) == "done"
    assert pauses == [0.1, 0.2, 0.4, 0.4, 0.7]


def test_the_last_error_is_raised_when_the_next_pause_would_end_too_late(pauses: list[float]) -> None:
    with pytest.raises(OSError, match="fourth"):
        retrying(OSError, within=1.0, first=0.1, longest=9)(failing(*[OSError()] * 3, OSError("fourth")))
    assert pauses == [0.1, 0.2, 0.4]


def test_the_last_attempt_raises_and_each_retried_error_is_noted(pauses: list[float]) -> None:
    errors, noted = [OSError("first"), OSError("second"), OSError("third")], list[BaseException]()
    with pytest.raises(OSError, match="third"):
        retrying(OSError, attempts=3, first=0.5, longest=0.5, note=noted.append)(failing(*errors))
    assert noted == errors[:2]
    assert pauses == [0.5, 0.5]


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
