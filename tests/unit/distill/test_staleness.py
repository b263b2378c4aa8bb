"""Steps of versions across lineages, ages, and the capacity rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest

from distill.buffer import Depth, Lineage, Lineages, capacity
from sync.wire import Version


@pytest.fixture
def tree() -> Lineages:
    """0 runs to 47; 1 resumes at 40 and replays to 47; 2 goes back to 20 of 0, whose batches are gone."""
    lineages = Lineages()
    for lineage in (Lineage(0, 0, None, 0), Lineage(1, 40, 0, 47), Lineage(2, 20, 0, 20)):
        lineages.add(lineage)
    return lineages


@pytest.mark.parametrize(
    ("version", "lineage", "step"),
    [
        (Version(1, 50), 1, 50),
        (Version(0, 45), 1, 45),  # trained on the batches that lineage 1 replays: the same weights
        (Version(0, 49), 1, 47),  # left behind: counts as the branching point
        (Version(1, 45), 2, 20),
        (Version(2, 30), 1, 20),
        (Version(1, 60), 0, 47),
        (Version(9, 5), 0, 0),
    ],
)
def test_a_version_counts_up_to_where_the_ways_part(tree, version: Version, lineage: int, step: int) -> None:
    assert tree.step_in(version, lineage) == step


def test_of_several_common_ancestors_the_nearest_counts(tree: Lineages) -> None:
    tree.add(Lineage(3, 50, 1, 55))
    assert [tree.step_in(version, 3) for version in (Version(1, 60), Version(0, 50))] == [55, 47]


def test_batches_belong_to_who_formed_them(tree: Lineages) -> None:
    assert [tree.owner(1, step) for step in (0, 46, 47)] == [0, 0, 1]
    assert [tree.owner(2, step) for step in (19, 20)] == [0, 2]


def test_a_trainer_takes_over_the_newest_lineage_that_holds_its_checkpoint(tree: Lineages) -> None:
    assert Lineages().origin_of(None) is None
    assert tree.origin_of(None) == 2
    assert tree.origin_of(Version(0, 20)) == 2
    assert tree.origin_of(Version(0, 40)) == 1
    assert tree.origin_of(Version(2, 25)) == 2


@pytest.mark.parametrize(
    ("applied", "depth", "handed_out", "outstanding", "room"),
    [
        (0, 0, 0, 0, 8),  # synchronous: one batch at the start
        (3, 4, 40, 20, 4),
        (0, 4, 48, 0, 0),
        (1, 1.5, 16, 3, 9),  # of a depth of one and a half batches, 4 rollouts are of the half
    ],
)
def test_what_may_start_can_be_trained_within_the_bound(
    applied: int, depth: float, handed_out: int, outstanding: int, room: int
) -> None:
    assert capacity(applied, depth, 8, handed_out, outstanding) == room


def test_the_depth_follows_the_trainers_waits_within_its_bounds() -> None:
    depth = Depth(bound=4)
    depth.step(9.0, 10.0)  # the first step waits for the engines to start
    assert depth.batches == 1
    for calm, left in ((15, 1.0), (1, 0.875)):
        for _ in range(calm):
            depth.step(0.005, 1.0)
        assert depth.batches == left
    depth.step(0.1, 1.0)
    assert depth.batches == pytest.approx(0.975)
    for calm, left in ((31, 0.975), (1, 0.85), (32, 0.725), (16, 0.6)):  # that fall was felt, the others not
        for _ in range(calm):
            depth.step(0.0, 1.0)
        assert depth.batches == pytest.approx(left)
    depth.step(9.0, 10.0)
    assert depth.batches == pytest.approx(1.1), "at most half a batch for one step"
    for _ in range(20):
        depth.step(0.9, 1.0)
    assert depth.batches == 4
    for _ in range(20 * 128):
        depth.step(0.0, 1.0)
    assert depth.batches == 0
    depth.restart()
    assert depth.batches == 1


def stepped(
    depth: Depth, work: Callable[[float], float], steps: int, full: float = 1.0
) -> tuple[float, float]:
    """Mean seconds of a step and mean depth over the last half of `steps`.

    At depth b the trainer works for work(b) seconds, and waits for its batch until `full` are over.
    """
    noise, found = random.Random(0), []
    for _ in range(steps):
        pace, own = noise.gauss(1.0, 0.03), work(depth.batches)
        seconds = max(own, full)
        depth.step(pace * (seconds - own), pace * seconds)
        found.append((pace * seconds, depth.batches))
    late = found[steps // 2 :]
    return mean(seconds for seconds, _ in late), mean(batches for _, batches in late)


def test_a_deeper_buffer_that_makes_no_step_faster_is_given_up() -> None:
    """Where roles share processors the trainer works slower by what it waits less; where replicas are the
    bottleneck it waits all the same."""
    for work in (lambda b: 0.5 + 0.1 * min(b, 4.0), lambda _: 0.4):
        seconds, batches = stepped(Depth(bound=4), work, 200)
        assert batches == pytest.approx(1.0, abs=0.1)
        assert seconds == pytest.approx(1.0, rel=0.02)


def test_a_depth_that_makes_steps_faster_is_kept() -> None:
    depth, tried = Depth(bound=4), []
    for _ in range(3000):
        waited = 0.4 * max(0.0, 3.0 - depth.batches)
        depth.step(waited, 1.0 + waited)
        tried.append(depth.batches)
    assert mean(tried[1000:]) == pytest.approx(3.0, abs=0.1)
    assert sum(batches < 2.5 for batches in tried[1000:]) < 40, "trials are rare, and soon over"


def test_a_depth_that_was_given_up_may_be_taken_when_the_trainer_waits_for_more() -> None:
    depth = Depth(bound=4)
    stepped(depth, lambda _: 0.4, 200)
    given_up, most = depth.batches, 0.0
    for _ in range(40):
        depth.step(0.8, 1.0)
        most = max(most, depth.batches)
    assert (given_up, most) == (pytest.approx(1.0, abs=0.1), 4.0)


def test_the_depth_keeps_what_a_run_needs_to_go_on_and_the_bound_when_it_is_full() -> None:
    needs_two, none, full = Depth(bound=4, least=2), Depth(bound=0), Depth(bound=4, adaptive=False)
    for one in (needs_two, none, full):
        for waited in (0.5, *[0.0] * 1000):
            one.step(waited, 1.0)
    assert (needs_two.batches, none.batches, full.batches) == (2, 0, 4)
