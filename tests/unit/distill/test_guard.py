"""Limits on metrics, degenerate completions, and a rollback of a whole run in memory."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from audited import check
from in_memory import MemoryTrainer
from small_config import make_config
from small_record import apply
from virtual_time import LONG

from distill.aio import cancel
from distill.buffer import Bound, Rules
from distill.config import GuardConfig
from distill.interfaces import Hooks
from distill.metrics.summary import ALIKE_STEPS, CUT_OFF_STEPS, END_STEPS, FIRST_STEPS, LITTLE_END, Advice
from distill.record.changes import Checkpointed, LineageOpened, RolledBack
from distill.record.state import RunState
from distill.rollout.validation import repetitive
from distill.trainer_api.guard import Guard, retreat, trouble
from sync.base.errors import RemoteError
from sync.wire import BatchRequest, Heartbeat, TrainerHello, Version, pack

pytestmark = pytest.mark.virtual_time

GOOD = {"loss": 1.0, "grad_norm": 2.0, "reverse_kl": 0.5, "student_entropy": 0.6, "truncation_rate": 0.1}


@pytest.mark.parametrize(
    ("limits", "metrics", "said"),
    [
        ({}, {"loss": math.nan}, "loss is nan, the update was left out"),
        ({}, {"grad_norm": math.inf}, "grad_norm is inf"),
        ({"max_reverse_kl": 1.0}, {"reverse_kl": 1.5}, "reverse_kl is 1.5, above guard.max_reverse_kl = 1"),
        ({"max_grad_norm": 3.0}, {"grad_norm": 4.0}, "above guard.max_grad_norm = 3"),
        ({"max_truncation_rate": 0.5}, {"truncation_rate": 0.6}, "above guard.max_truncation_rate = 0.5"),
        ({"min_entropy": 0.2}, {"student_entropy": 0.1}, "below guard.min_entropy = 0.2"),
        ({"min_end_share": 0.2}, {"student_end": 0.001, "teacher_end": 0.01}, "below guard.min_end_share"),
    ],
)
def test_every_limit_is_named_when_it_is_passed(limits: Any, metrics: Any, said: str) -> None:
    config = GuardConfig(**limits)
    assert trouble(GOOD, config) is None
    assert said in str(trouble({**GOOD, **metrics}, config))


def test_only_bad_steps_in_a_row_count() -> None:
    guard = Guard(GuardConfig(patience=2, max_reverse_kl=1.0))
    bad = {**GOOD, "reverse_kl": 2.0}
    assert [guard.look(step, m) is None for step, m in enumerate([bad, GOOD, bad], 1)] == [True] * 3
    assert "step 4: reverse_kl is 2" in str(guard.look(4, bad))
    assert guard.since == 3


@pytest.mark.parametrize(
    ("tokens", "copies", "period"),
    [
        *(([9, 4, 4, 4], 3, 1), ([4, 7, 4, 7, 4, 7], 3, 2), ([1, 2, 3] * 3, 3, 3), ([4, 4, 4, 4], 4, 1)),
        *(([4, 4, 4, 9], 3, None), ([5, 5], 3, None), ([4, 4, 4, 4], None, None)),
    ],
)
def test_the_shortest_pattern_at_the_end_is_found_where_it_is_looked_for(
    tokens: list[int], copies: int | None, period: int | None
) -> None:
    found = repetitive(pack(np.array(tokens, "i4")), copies)
    assert found == (period and f"ends in {copies} or more copies of {period} tokens")


def diverging(*bad: int) -> Callable[[Version], dict[str, float]]:
    """Metrics with a high reverse KL for the steps `bad`, once."""
    left = {*bad}

    def metrics(version: Version) -> dict[str, float]:
        high = version.step in left
        left.discard(version.step)
        return {"loss": 1.0, "reverse_kl": 9.0 if high else 0.1}

    return metrics


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def built(controller: Any, config: Any, guard: dict[str, Any], hooks: Hooks) -> tuple[Any, MemoryTrainer]:
    settings = config(run={"steps": 12}, guard=guard, trainer={"keep_checkpoints": 3})
    made = controller(settings, hooks)
    return made, MemoryTrainer(made.session, checkpoint_every=2, metrics=diverging(7, 8))


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_rollback_trains_again_without_rollouts_of_bad_steps(
    controller, config, tmp_path, restarted: bool
) -> None:
    """Also where the controller that decided it ends then; a restart does not allow another one."""
    back: list[Version | None] = []
    alerts: list[tuple[str, str]] = []
    guard = {"max_reverse_kl": 1.0, "patience": 2, "action": "rollback", "max_rollbacks": 1}
    hooks = Hooks(set_back=back.append, alert=lambda *alert: alerts.append(alert))
    made, trainer = built(controller, config, guard, hooks)
    running = asyncio.create_task(made.run())
    async with asyncio.timeout(120):
        with pytest.raises(RemoteError, match="this one must leave"):
            await trainer.run()
        ((title, text),) = alerts
        assert (title, text.endswith("bad steps since 7: back to L000-v00000004")) == ("rolled back", True)
        bad = {i for step in (7, 8) for i in trainer.ledger[0][step]}
        if restarted:
            await cancel([running])
            made, _ = built(controller, config, guard, hooks)
            trainer.session, trainer.metrics = made.session, diverging(7, 8)
            running = asyncio.create_task(made.run())
        assert back == [Version(0, 4)] * (1 + restarted)
        with pytest.raises(RemoteError, match="was rolled back to L000-v00000004"):
            await trainer.run()
        trainer.checkpoint = back[0]
        training = asyncio.create_task(trainer.run())
        if restarted:
            await until(lambda: made.dispatcher.paused)
            made.request_stop("enough")
        await training
        summary = await running
    assert len(back) == 1 + restarted
    assert made.record.state.rollbacks == 1
    assert summary["completed"] is not restarted
    assert trainer.welcomes[-1].version == Version(1, 4)
    again = {i for ids in trainer.ledger[1].values() for i in ids}
    assert not again & bad
    report = check(tmp_path, trainer.ledger)
    assert report.ok, report
    assert report.dropped["rolled_back"] >= len(bad)
    resumed = controller(config(run={"steps": 12}))
    assert resumed.record.state.counters.dropped == made.record.state.counters.dropped


async def test_beats_of_a_trainer_are_refused_once_it_was_sent_away_alone(controller) -> None:
    """One that a controller which started anew has not welcomed yet may save a checkpoint."""
    made, beat = controller(), Heartbeat(version=Version(0, 3), rank=0)
    await made.record.open_lineage(None, "model")
    assert not made.session.live
    await made.session.event(beat)
    assert made.heartbeats.since == {}
    made.record.write(RolledBack(None, [], "bad"))
    made.session.dismiss()
    with pytest.raises(RemoteError, match="this one must leave"):
        await made.session.event(beat)


async def test_a_stop_while_a_dead_trainer_is_started_again_waits_for_none(controller) -> None:
    made = controller()
    running = asyncio.create_task(made.run())
    welcome = await made.session.hello(TrainerHello(1, None, "model", "test"))
    asking = asyncio.create_task(made.session.batch(BatchRequest(welcome.version, 0, 1)))
    await asyncio.sleep(0)
    made.withhold("nothing is handed out")
    made.trainer_died()
    with pytest.raises(RemoteError, match="not of the current lineage None"):  # a rank that lingers elsewhere
        await asking
    made.request_stop("a person said so")
    await asyncio.wait_for(running, 10)


def test_a_second_rollback_counts_the_checkpoints_that_the_first_left() -> None:
    state = RunState(Rules(1, Bound(0, 0)))
    apply(state, LineageOpened(0, None, 0, None, 0, "model"))
    for version in (Version(0, 10), Version(0, 20)):
        apply(state, Checkpointed(version, ""))
    first = retreat(state, 19, 2, "bad")
    assert first.to == Version(0, 10), "which removes L000-v00000020"
    apply(state, first)
    apply(state, LineageOpened(1, first.to, 10, 0, 10, "model"))
    apply(state, Checkpointed(Version(1, 20), ""))
    second = retreat(state, 19, 2, "bad")
    assert second.to == Version(0, 10)
    assert retreat(state, 11, 2, "bad") is None


def test_a_lineage_without_checkpoints_goes_back_to_the_model_folder_again() -> None:
    state = RunState(Rules(1, Bound(0, 0)))
    apply(state, LineageOpened(0, None, 0, None, 0, "model"))
    apply(state, Checkpointed(Version(0, 10), ""))
    apply(state, LineageOpened(1, None, 0, None, 0, "model"))
    assert retreat(state, 5, 2, "bad") == RolledBack(None, [], "bad")


@pytest.mark.parametrize(
    "guard",
    [{"patience": 1}, {"patience": 2, "action": "rollback"}],
    ids=["by its action", "for its kept checkpoints may all be bad"],
)
async def test_a_held_run_hands_out_nothing_until_it_is_stopped(controller, config, guard: Any) -> None:
    hooks = Hooks(set_back=lambda to: pytest.fail("no rollback"))
    made, trainer = built(controller, config, guard | {"max_reverse_kl": 1.0}, hooks)
    trainer.checkpoint_every = 1
    async with asyncio.timeout(120):
        ending = asyncio.gather(made.run(), trainer.run())
        await until(lambda: made.dispatcher.paused)
        await asyncio.sleep(LONG)
        most = 7 + guard["patience"]
        assert made.record.state.reached.step <= most, "one batch was handed out before the report came"
        made.request_stop("enough")
        await ending


def working(teacher: float, trainer: float, waited_for: str) -> dict[str, float]:
    """Figures of a step after 100 seconds in which each was busy for so long."""
    busy = {"teacher t": teacher, "trainer": trainer}
    return (
        {f"perf/busy_seconds/{role}": seconds for role, seconds in busy.items()}
        | {f"perf/idle_seconds/{role}": 100.0 - seconds for role, seconds in busy.items()}
        | {f"perf/waited_seconds/trainer/{waited_for}": 40.0, "teacher/t/sequences": 9.0}
        | {"teacher/u/sequences": 5.0, "perf/busy_seconds/teacher u": 1.0}
    )


def without_count(text: str) -> str:
    return re.sub(r"last \d+ steps", "last steps", text)


def said_once(advice: Advice, steps: int, bad: dict[str, float], good: dict[str, float]) -> str:
    """The one line that is said after so many bad steps in a row, where a good one begins the count anew."""
    said = [advice.look(figures) for figures in [*[bad] * (steps - 1), good, *[bad] * steps]]
    assert said[:-1] == [[]] * (2 * steps - 1)
    (line,) = said[-1]
    return line


def test_completions_that_never_end_are_said_once_and_one_that_ends_begins_the_count_anew() -> None:
    advice = Advice(make_config(rollout={"max_tokens": 7}))
    cut, ended = {"train/truncation_rate": 1.0}, {"train/truncation_rate": 0.99}
    line = said_once(advice, CUT_OFF_STEPS, cut, ended)
    assert "of the last 5 steps was cut off at rollout.max_tokens = 7" in line
    assert advice.look(cut) == []
    assert advice.standing == [line.replace("last 5 steps", "last 6 steps")]
    assert (advice.look(ended), advice.standing) == ([], [])


def test_rewards_that_are_all_the_same_are_said_where_they_are_learned_from() -> None:
    same, spread = ({"train/reward_mean": 0.5, "train/reward_std": std} for std in (0.0, 0.1))
    rewarded, other = Advice(make_config(objective={"type": "full", "task": {}})), Advice(make_config())
    line = said_once(rewarded, ALIKE_STEPS, same, spread)
    assert "every rollout of the last 5 steps had the reward 0.5, from which nothing is learned" in line
    assert [other.look(same) for _ in range(2 * ALIKE_STEPS)] == [[]] * 2 * ALIKE_STEPS


def test_a_student_that_ends_far_less_often_than_its_teacher_is_told_the_remedy() -> None:
    advice = Advice(make_config(objective={"type": "full"}))
    lost = {"train/student_end": 4.5e-5, "train/teacher_end": 3.1e-3}
    kept = lost | {"train/student_end": LITTLE_END * 3.1e-3}
    line = said_once(advice, END_STEPS, lost, kept)
    assert "of 4.5e-05 at a token, and for its teacher one of 3.1e-03" in line
    assert "try a term of the ends (objective.ends = 4)" in line
    assert advice.look({"train/student_end": 0.0}) == [], "a teacher that sends no scores for it"
    advice = Advice(make_config(objective={"type": "full", "ends": 4.0, "on_policy": 0.9}))
    (line,) = [advice.look(lost) for _ in range(END_STEPS)][-1]
    assert "the term of the ends brings it back (objective.ends); if not, try more of it, a lower" in line
    advice = Advice(make_config(objective={"type": "jsd"}))
    (line,) = [advice.look(lost) for _ in range(END_STEPS)][-1]
    assert "objective.ends" not in line, "a key that this objective does not have"
    own = {"t": {"path": "t", "tokenizer": "own"}}
    advice = Advice(make_config(objective={"type": "topk"}, teachers=own))
    (line,) = [advice.look(lost) for _ in range(END_STEPS)][-1]
    assert "objective.ends" not in line, "a term that is refused for this teacher"


def test_a_student_whose_held_out_completions_end_less_often_than_chance_explains_is_told_once() -> None:
    advice = Advice(make_config(evaluation={"prompts": 64}))
    by_chance, fewer = ({"eval/ended": 0.0625, "eval/reference/ended": theirs} for theirs in (0.15, 0.5))
    said = [advice.look(figures) for figures in [*[by_chance] * FIRST_STEPS, fewer, fewer]]
    assert said[:-2] == [[]] * FIRST_STEPS
    assert "held-out completions 6.2% end by themselves, and of the teacher's own 50.0%" in said[-2][0]
    assert said[-1] == []


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (working(5.0, 50.0, "replicas"), "teacher t worked 5% of the time and the trainer was idle for 50%"),
        (working(0.0, 50.0, "replicas"), "teacher t has had nothing to score in 20 steps"),
        (working(5.0, 90.0, "replicas"), ""),
        (working(5.0, 50.0, "teachers"), ""),
        (working(15.0, 50.0, "replicas"), ""),
    ],
)
def test_a_teacher_without_work_is_told_after_some_steps(figures: dict[str, float], said: str) -> None:
    advice = Advice(make_config(teachers={"t": {"path": "t"}, "u": {"path": "u", "route": ["x"]}}))
    for step in range(FIRST_STEPS - 1):
        assert advice.look(figures | {"rollout/scored": 1e6 * step}) == []
    last = figures | {"rollout/scored": 1e6 * FIRST_STEPS}
    assert [line.startswith(said) for line in advice.look(last)] == [True] * bool(said)


async def test_a_run_whose_completions_never_end_says_so_and_records_it(controller: Any, config: Any) -> None:
    alerts: list[tuple[str, str]] = []
    run = controller(config(run={"steps": 6}), Hooks(alert=lambda *alert: alerts.append(alert)))
    trainer = MemoryTrainer(run.session, metrics=lambda version: {"truncation_rate": 1.0})
    summary, _ = await asyncio.wait_for(asyncio.gather(run.run(), trainer.run()), LONG)
    assert [*map(without_count, summary["warnings"])] == [without_count(text) for _, text in alerts] != []
