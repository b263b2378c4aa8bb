"""Who is killed, how it is found, and what the figures say."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distill.bench import chaos
from distill.bench.chaos import ALL, _targets, figures, holds, table
from distill.bench.patient import CONTROLLER, Tail, kind_of
from distill.control.audit import AuditReport
from distill.launch.processes import descendants, players
from distill.launch.supervise import ChildSpec, Supervisor

SUMMARY = {"weights_identical": True, "completed": True, "steps": 40}
SECONDS = {"student": [9.0, 11.0, 16.0], CONTROLLER: [20.0]}
COUNTED = {"kills_asked": 4, "orphans": 0, "seconds": 90.0}


def test_the_table_has_the_median_and_the_longest_recovery_of_each_kind() -> None:
    found = figures(AuditReport(trained=320), SECONDS, SUMMARY) | COUNTED
    lines = table(found).splitlines()
    assert "| student | 3 | 11.0 | 16.0 |" in lines
    assert "| controller | 1 | 20.0 | 20.0 |" in lines
    assert "kills              4 of 4" in lines
    assert holds(found)


def test_one_broken_guarantee_is_enough_to_fail() -> None:
    whole = figures(AuditReport(), SECONDS, SUMMARY) | COUNTED
    assert not holds(figures(AuditReport(lost=["0:1:0"]), SECONDS, SUMMARY) | COUNTED)
    assert not holds(whole | {"orphans": 1})
    assert not holds(whole | {"weights_identical": False})
    assert not holds(whole | {"completed": False})


@pytest.mark.parametrize("broken", ["not_as_composed", "wrong_weight", "wrong_generator"])
def test_the_table_counts_every_broken_guarantee(broken: str) -> None:
    found = figures(AuditReport(**{broken: ["0:1:0"]}), SECONDS, SUMMARY) | COUNTED
    assert not holds(found)
    assert "otherwise wrong    1" in table(found).splitlines()


def test_every_kind_dies_once_before_any_dies_again_whatever_the_number_of_its_processes() -> None:
    roles = ["student-0", "student-1", "student-2", "teacher-a", "trainer", "evaluator"]
    chosen = list(itertools.islice(_targets(random.Random(1), roles), 60))
    kinds = {"student", "teacher", "trainer rank", "evaluator", CONTROLLER, ALL}
    rounds = [[kind_of(one) for one in chosen[i : i + 6]] for i in range(0, 60, 6)]
    assert all(set(one) == kinds for one in rounds)
    assert len({tuple(one) for one in rounds}) > 5
    assert set(roles) <= set(chosen)


class Immortal:
    """A Patient that is at work at once, and counts what is done to it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.killed, self.resumed, self.steps = run_dir, [], [], 0
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY))

    def __enter__(self) -> Immortal:
        return self

    def __exit__(self, *_: object) -> None: ...
    def start(self, resume: bool = False) -> None:
        self.resumed.append(resume)
        (self.run_dir / "journal").mkdir(exist_ok=True)

    def kill(self, role: str, rng: random.Random) -> None:
        self.killed.append(role)

    def kill_launcher(self, everything: bool = False) -> None:
        self.killed.append(ALL if everything else CONTROLLER)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        assert condition(), what

    def wait_at_work(self, roles: list[str]) -> None: ...
    def end(self) -> None: ...
    def roles(self) -> list[str]:
        return ["evaluator", "student-0", "teacher-a", "trainer"]

    def over(self) -> bool:
        return False

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def orphans(self) -> int:
        return 0

    def summary(self) -> dict:
        return SUMMARY


def test_chaos_that_was_stopped_goes_on_with_the_next_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "LONGEST_CALM_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "audit", lambda run_dir: AuditReport())
    first, second, whole = (Immortal(_folder(tmp_path, name)) for name in ("run", "run", "whole"))
    chaos.run(first, 5, seed=3)
    found = chaos.run(second, 12, seed=3)
    chaos.run(whole, 12, seed=3)
    assert (first.resumed[0], second.resumed[0]) == (False, True)
    assert [*first.killed, *second.killed] == whole.killed
    assert found["kills"] == dict.fromkeys(
        ["all at once", "controller", "evaluator", "student", "teacher", "trainer rank"], 2
    )


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(exist_ok=True)
    return parent / name


def test_lines_are_given_out_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a":')
    assert tail.new() == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert tail.new() == [{"a": 3}]
    assert tail.new() == []


async def test_processes_are_found_by_their_role(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    supervisor = Supervisor([ChildSpec("student-0", sleeper), ChildSpec("evaluator", sleeper)], tmp_path, 0)
    await supervisor.start()
    async with asyncio.timeout(120):
        while len(found := players(os.getpid())) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert set(found) == {"student-0", "evaluator"}
    guardians = {child.process.pid for child in supervisor.children.values()}
    assert {process.ppid() for processes in found.values() for process in processes} == guardians
    await supervisor.stop(1)
    assert not guardians & {process.pid for process in descendants(os.getpid())}
