"""What a configuration says about late rollouts and groups, and how long a batch is held."""

from __future__ import annotations

from typing import Any

import pytest
from random_history import opened, scored
from small_config import make_config
from virtual_time import advance

from distill.batching.batcher import LateWait
from distill.buffer import Bound, Rules, rules
from distill.record.changes import Stepped
from sync.base.errors import ConfigError
from sync.wire import Version

GROUPED = {"type": "sampled", "task": {"baseline": "group"}}


def test_the_limit_is_the_bound_unless_freshness_moves_it_and_nothing_is_grouped() -> None:
    assert rules(make_config()) == Rules(8, Bound(2, 2), group=1, max_attempts=5)
    assert rules(make_config(buffer={"late": {"type": "wait", "seconds": 3}})).bound == Bound(2, 2)
    assert rules(make_config(weights={"publish_every": 3})).bound == Bound(2, 2), "as far behind as may be"
    assert rules(make_config(rollout={"max_attempts": 2})).max_attempts == 2
    late = {"type": "freshness", "hard_limit": 6, "half_life": 2}
    assert rules(make_config(buffer={"late": late})).bound == Bound(2, 6, 2.0)


def test_a_group_baseline_asks_for_whole_groups() -> None:
    grouped = make_config(objective=GROUPED, rollout={"per_prompt": 4, "batch": 8})
    assert rules(grouped).group == 4
    assert rules(make_config(objective=GROUPED, rollout={"per_prompt": 2, "batch": 8})).group == 2
    plain = make_config(objective={"type": "sampled", "task": {}}, rollout={"per_prompt": 4, "batch": 8})
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
def test_what_could_not_go_on_is_refused_with_value_rule_and_remedy(sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rules(make_config(**sections))


async def test_a_group_expires_with_its_oldest_member_and_one_that_is_broken_is_not_awaited(tmp_path) -> None:
    record = opened(tmp_path, Rules(4, Bound(2, 2), group=2))
    await record.open_lineage(None, "model")
    late, other, *broken = record.issue(4)
    record.state.sent([rollout.id for rollout in (late, other, *broken)], Version(0, 0))
    record.admit(scored(other, Version(0, 0)))
    record.drop([broken[0].id], "empty", "a completion without tokens")
    for step in range(2):
        for rollout in record.issue(4):
            record.admit(scored(rollout, Version(0, step)))
        assert await record.form_batch() is not None
        record.write(Stepped(Version(0, step + 1)))
    assert record.state.expiring() == 1
    record.requeue(late, "replica_lost")
    assert record.state.expiring() == 0, "it is not in flight"
    record.state.sent([late.id], Version(0, 2))
    assert record.state.expiring() == 1
    record.store.close()


@pytest.mark.virtual_time
async def test_a_batch_is_held_for_its_time_and_no_longer() -> None:
    wait = LateWait(5.0)
    assert wait.left(3, expiring=0) == 0.0
    advance(2.0)
    assert wait.left(3, expiring=2) == 5.0
    advance(4.0)
    assert wait.left(3, expiring=1) == 1.0
    assert wait.left(3, expiring=0) == 0.0
    advance(1.0)
    assert wait.left(3, expiring=1) == 0.0
    assert wait.left(4, expiring=1) == 5.0
    assert LateWait(0.0).left(3, expiring=9) == 0.0
