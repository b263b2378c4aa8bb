"""What a batch is picked from."""

from __future__ import annotations

import pytest

from distill.control.buffer import Buffer, Entry, Pick
from sync.wire import Version, VersionSpan


def entry(number: int, *steps: int) -> Entry:
    spans = [VersionSpan(Version(0, step), i, i + 1) for i, step in enumerate(steps)]
    return Entry(f"r{number}", number, 0, len(steps), spans)


def step_of(version: Version) -> int:
    return version.step


def filled(buffer: Buffer, *entries: Entry) -> Buffer:
    for one in entries:
        buffer.admit(one)
    return buffer


def test_the_oldest_token_decides_and_what_is_too_old_is_named() -> None:
    buffer = filled(Buffer(2), entry(0, 5, 9), entry(1, 7, 7), entry(2, 9))
    assert buffer.pick(8, 2, step_of) == Pick(["r1", "r2"], ["r0"])
    assert buffer.pick(7, 3, step_of) == Pick(["r0", "r1", "r2"], [])
    assert len(buffer) == 3


def test_too_few_give_no_batch() -> None:
    assert filled(Buffer(0), entry(0, 3)).pick(3, 2, step_of) == Pick([], [])


@pytest.mark.parametrize(("order", "first"), [("oldest", ["r0", "r1"]), ("arrival", ["r2", "r0"])])
def test_long_rollouts_do_not_starve_unless_asked(order, first) -> None:
    buffer = filled(Buffer(4, order), entry(2, 1), entry(0, 1), entry(1, 1))
    assert buffer.pick(1, 2, step_of).chosen == first


def test_a_rollout_enters_once() -> None:
    buffer = filled(Buffer(4), entry(0, 1))
    with pytest.raises(AssertionError, match="buffered already"):
        buffer.admit(entry(0, 1))
    assert [one.id for one in buffer.remove(["r0"])] == ["r0"]
    assert "r0" not in buffer
