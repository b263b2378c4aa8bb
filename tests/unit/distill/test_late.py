"""What a configuration says about late rollouts and groups, and how long a batch is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distill.batching.batcher import LateWait
from distill.buffer import Bound, Rules, rules
from distill.config import RunConfig
from sync.base.errors import ConfigError

GROUPED = {"type": "sampled", "task": {"baseline": "group"}}


def test_by_default_the_limit_is_the_bound_and_nothing_is_grouped(config: Callable[..., RunConfig]) -> None:
    assert rules(config()) == Rules(8, Bound(2, 2), group=1, max_attempts=5)
    assert rules(config(buffer={"late": {"type": "wait", "seconds": 3}})).bound == Bound(2, 2)
    assert rules(config(weights={"publish_every": 3})).bound == Bound(2, 2), "as far behind as may be"
    assert rules(config(rollout={"max_attempts": 2})).max_attempts == 2


def test_freshness_moves_the_bound_to_the_hard_limit(config: Callable[..., RunConfig]) -> None:
    late = {"type": "freshness", "hard_limit": 6, "half_life": 2}
    assert rules(config(buffer={"late": late})).bound == Bound(2, 6, 2.0)


def test_a_group_baseline_asks_for_whole_groups(config: Callable[..., RunConfig]) -> None:
    grouped = config(objective=GROUPED, rollout={"per_prompt": 4, "batch": 8})
    assert rules(grouped).group == 4
    assert rules(config(objective=GROUPED, rollout={"per_prompt": 2, "batch": 8})).group == 2
    plain = config(objective={"type": "sampled", "task": {}}, rollout={"per_prompt": 4, "batch": 8})
    assert rules(plain).group == 1


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"buffer": {"late": {"type": "freshness", "hard_limit": 2}}},
            "hard_limit is 2 and buffer.max_staleness 2: .*set hard_limit to at least 3",
        ),
        ({"objective": GROUPED}, "per_prompt 1 and rollout.batch 8: .*set per_prompt to 2 or more"),
        (
            {"objective": GROUPED, "rollout": {"per_prompt": 3}},
            "per_prompt 3 and rollout.batch 8: .*batch to a multiple of it",
        ),
        (
            {"weights": {"publish_every": 4}},
            "publish_every is 4 and buffer.max_staleness 2: .*fall 3 steps.*at least 3",
        ),
    ],
)
def test_what_could_not_go_on_is_refused_with_value_rule_and_remedy(
    config: Callable[..., RunConfig], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rules(config(**sections))


def test_a_batch_is_held_for_its_time_and_no_longer() -> None:
    now = [10.0]
    wait = LateWait(5.0, lambda: now[0])
    assert wait.left(3, expiring=0) == 0.0
    now[0] = 12.0
    assert wait.left(3, expiring=2) == 5.0
    now[0] = 16.0
    assert wait.left(3, expiring=1) == 1.0
    assert wait.left(3, expiring=0) == 0.0
    now[0] = 17.0
    assert wait.left(3, expiring=1) == 0.0
    assert wait.left(4, expiring=1) == 5.0
    assert LateWait(0.0).left(3, expiring=9) == 0.0
