"""What a batch is picked from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.buffer import Bound, Pick, Rules, capacity, pick
from distill.record.rollout import Rollout
from sync.wire import Array, Version, VersionSpan


def entry(number: int, *steps: int, name: str = "") -> Rollout:
    spans = [VersionSpan(Version(0, step), i, i + 1) for i, step in enumerate(steps)]
    return Rollout(name or f"r{number}", number, tokens=Array("i4", (len(steps),), b""), spans=spans)


def step_of(version: Version) -> int:
    return version.step


def filled(bound: Bound, *entries: Rollout, group: int = 1) -> Callable[..., Pick]:
    """What is picked from these at a step, for a batch of a size."""
    buffer = {one.id: one for one in entries}

    def picked(step: int, batch: int, among: Sequence[str] = ()) -> Pick:
        return pick(buffer, Rules(batch, bound, group), step, step_of, among)

    return picked


def test_the_oldest_token_decides_and_what_is_too_old_is_named() -> None:
    buffer = filled(Bound(2, 2), entry(0, 5, 9), entry(1, 7, 7), entry(2, 9))
    assert buffer(8, 2) == Pick(["r1", "r2"], ["r0"], [1.0, 1.0])
    assert buffer(7, 3) == Pick(["r0", "r1", "r2"], [], [1.0] * 3)


def test_too_few_give_no_batch() -> None:
    assert filled(Bound(0, 0), entry(0, 3))(3, 2) == Pick([], [], [])


def test_the_default_order_is_that_of_asking_so_that_long_rollouts_do_not_starve() -> None:
    assert filled(Bound(4, 4), entry(2, 1), entry(0, 1), entry(1, 1))(1, 2).chosen == ["r0", "r1"]
    assert filled(Bound(4, 4), entry(2, 1), entry(0, 1))(1, 2).chosen == ["r0", "r2"]


def test_what_the_teacher_generated_has_no_age() -> None:
    generated = Rollout("r0", 0, tokens=Array("i4", (3,), b""), spans=[], by_teacher=True)
    assert generated.age(9, step_of) == 0
    assert filled(Bound(0, 0), generated)(9, 1).chosen == ["r0"]


def test_those_that_are_named_are_the_batch_however_few() -> None:
    buffer = filled(Bound(4, 4), *(entry(n, 1) for n in range(4)))
    assert buffer(1, 4, among=["r3", "r1"]) == Pick(["r1", "r3"], [], [1.0, 1.0])


def test_what_cannot_wait_for_the_next_batch_comes_before_the_order_of_asking() -> None:
    """r0 was requeued, so r7 is the one that can wait least."""
    buffer = filled(Bound(2, 2), entry(0, 3), entry(7, 1, 3), entry(5, 2))
    assert buffer(3, 2).chosen == ["r7", "r0"]


def trained_at(limit: int, duration: int) -> int | None:
    """Step whose batch holds a rollout that takes `duration` steps among short ones; None: dropped or never.

    Short rollouts are written at once, as many as the capacity rule lets in: the buffer is always full.
    """
    rules, issued = Rules(4, Bound(limit, limit)), 1
    buffer: dict[str, Rollout] = {}
    for step in range(3 * limit + 3):
        if step == duration:
            buffer["long"] = entry(0, 0, name="long")
        flying = 1 if step < duration else 0
        for _ in range(capacity(step, limit, rules.batch, step * rules.batch, len(buffer) + flying)):
            buffer[f"r{issued}"] = entry(issued, step)
            issued += 1
        picked = pick(buffer, rules, step, step_of)
        assert len(picked.chosen) == rules.batch
        for one in picked.chosen + picked.too_old:
            del buffer[one]
        if "long" in picked.chosen + picked.too_old:
            return step if "long" in picked.chosen else None
    return None


@pytest.mark.parametrize("limit", [1, 2, 4, 8])
def test_a_long_rollout_is_trained_in_the_step_it_arrives_in_among_short_ones(limit: int) -> None:
    for duration in range(1, limit + 1):
        assert trained_at(limit, duration) == duration


arrivals = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40)


@given(arrivals=arrivals, limit=st.integers(0, 4), batch=st.integers(1, 5))
def test_nothing_overtakes_what_expires_now(arrivals: list[tuple[int, bool]], limit: int, batch: int) -> None:
    entries = [entry(i, old, *([old + 1] if more else [])) for i, (old, more) in enumerate(arrivals)]
    chosen, too_old, _ = filled(Bound(limit, limit), *entries)(6, batch)
    oldest = {one.id: 6 - one.age(6, step_of) for one in entries}
    assert all((6 - oldest[i] > limit) == (i in too_old) for i in oldest)
    if chosen:
        expiring = [6 - oldest[i] == limit for i in chosen]
        assert expiring == sorted(expiring, reverse=True)
        left = [i for i in oldest if i not in chosen and i not in too_old]
        assert all(expiring) or not any(6 - oldest[i] == limit for i in left)


# --- freshness --------------------------------------------------------------------------------------------


def test_the_weight_halves_with_every_half_life_beyond_the_limit() -> None:
    bound = Bound(limit=2, hard=8, half_life=2.0)
    assert [bound.weight(age) for age in (0, 2, 4, 6, 8)] == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert Bound(0, 9, 3.0).weight(1) == pytest.approx(2 ** (-1 / 3))


def test_a_late_rollout_has_a_weighted_place_in_the_next_batch_up_to_the_hard_limit() -> None:
    buffer = filled(Bound(1, 3, 1.0), entry(0, 5), entry(1, 8), entry(2, 7), entry(3, 6))
    assert buffer(9, 3) == Pick(["r1", "r2", "r3"], ["r0"], [1.0, 0.5, 0.25])


# --- groups -----------------------------------------------------------------------------------------------


def group(row: int, *steps: int) -> list[Rollout]:
    """Completions of one prompt, each of the version that `steps` says."""
    return [entry(10 * row + i, step, name=f"0:{row}:{i}") for i, step in enumerate(steps)]


def test_a_group_is_picked_whole_and_only_when_it_is() -> None:
    one, other = group(0, 3, 3)
    rest = [*group(1, 3, 3), *group(2, 2, 3)]
    buffer = filled(Bound(4, 4), one, *rest, group=2)
    assert buffer(3, 4).chosen == ["0:1:0", "0:1:1", "0:2:0", "0:2:1"]
    assert buffer(3, 6).chosen == []
    assert filled(Bound(4, 4), one, *rest, other, group=2)(3, 6).chosen[:2] == ["0:0:0", "0:0:1"]


def test_a_group_is_too_old_with_its_oldest_member_arrived_or_not() -> None:
    buffer = filled(Bound(1, 1), *group(0, 1, 3), *group(1, 1, 3)[:1], *group(2, 3, 2), group=2)
    assert buffer(3, 2) == Pick(["0:2:0", "0:2:1"], ["0:0:0", "0:0:1", "0:1:0"], [1.0, 1.0])
