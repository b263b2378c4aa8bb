"""Every figure has one documented name: what runs log, the code's table and the documents' table agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from in_memory import MemoryEvaluator, MemoryTrainer
from msgspec.structs import replace

from distill.buffer import Bound, Rules
from distill.interfaces import Hooks
from distill.metrics.names import FIGURES, SECTIONS, unknown
from distill.metrics.summary import flat, of_evaluation, totals
from distill.metrics.timeline import Timeline
from distill.record.state import RunState
from student_trainer.objectives.token_statistics import MEANS
from sync.wire import Behaviour, Estimate, EvalReport, PartReport, SetReport, Version

ROOT = Path(__file__).parents[3]
NAMES = [row.name for row in FIGURES]


def rows_of(name: str) -> list[str]:
    return [row.name for row in FIGURES if row.names(name)]


def undocumented(names: Iterable[str]) -> dict[str, list[str]]:
    """Names without a row, or with more than one."""
    return {name: rows for name in names if len(rows := rows_of(name)) != 1}


OCCASIONAL = (
    r"train/(?!tokens_(total|share)).*|perf/checkpoint_seconds|.*(REASON|SET|SOURCE).*|eval/teacher/.*|"
    r"eval/(.*_error|.*_rate|reward)|rollout/turns"
)
"""Of the trainer, of which a run in memory has none; of what need not happen."""


@pytest.mark.virtual_time
async def test_a_run_logs_documented_names_and_all_of_them(controller: Any, config: Any) -> None:
    logged: set[str] = set()
    hooks = Hooks(
        step=lambda _, figures: logged.update(figures),
        evaluated=lambda report, best: logged.update(of_evaluation(report, best)),
    )
    run = controller(config(evaluation={"every": 2}), hooks, evaluator=MemoryEvaluator())
    summary, _ = await asyncio.wait_for(asyncio.gather(run.run(), MemoryTrainer(run.session).run()), 60)
    logged |= flat({section: summary[section] for section in SECTIONS if section in summary}).keys()
    assert undocumented(logged - {"step"}) == {}
    found = {row for name in logged for row in rows_of(name)}
    assert [name for name in NAMES if name not in found and not re.fullmatch(OCCASIONAL, name)] == []


def test_figures_of_sets_and_of_the_trainer_are_documented() -> None:
    value = Estimate(0.5, 0.4, 0.6)
    one = SetReport(1, 1, 1, 0.0, 0, value, value, value)
    part = PartReport(1, 1, 2.0, None, 0.5, 0.25)
    plain = EvalReport(Version(0, 1), 1.0, None, 1, 1, 0.0, 0.0)
    report = replace(
        plain, reverse_kl_error=0.1, pass_rate=0.5, reward=0.5, sets={"gsm8k": one},
        sources={"open/maths": part}, teachers={"large": part},
        behaviour=Behaviour(0.5, 2.0, 3.0, 0.0, 1.0), reference=Behaviour(0.5, 2.0, 3.0, 0.0, 1.0),
    )  # fmt: skip
    found = of_evaluation(report, True)
    assert (found["eval/gsm8k/majority"], found["eval/best"]) == (0.5, 1.0)
    assert (found["eval/source/open_maths/reverse_kl"], found["eval/teacher/large/reward"]) == (2.0, 0.25)
    assert {row for name in found for row in rows_of(name)} == {n for n in NAMES if n.startswith("eval/")}
    assert of_evaluation(plain, False).keys() == {"eval/reverse_kl", "eval/truncated", "eval/best"}
    assert undocumented(f"train/{name}" for name in MEANS.keys() - {"rho_squared_mean"}) == {}
    assert undocumented(["train/reverse_kl/math", "rollout/dropped/too_old", "teacher/t/tokens"]) == {}


def test_turns_are_the_mean_over_episodes_and_left_out_without_them() -> None:
    state = RunState(Rules(1, Bound(0, 0)))
    assert "rollout/turns" not in flat(totals(state, Timeline()))
    state.counters.episodes, state.counters.turns = 2, 5
    assert flat(totals(state, Timeline()))["rollout/turns"] == 2.5


def test_names_of_earlier_versions_are_told_apart() -> None:
    old = ("loss", "staleness/mean", "seconds/wait", "tokens/trained", "rollouts/late", "teachers/t/tokens")
    assert all(unknown(name) for name in old)
    assert not [name for name in NAMES if unknown(name)]
