"""Who is killed, how it is found, and what the figures say."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from distill.bench.chaos import ALL, _choose, figures, holds, table
from distill.bench.patient import CONTROLLER, kind_of
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


def test_every_kind_of_role_is_chosen_whatever_its_number() -> None:
    rng = random.Random(0)
    roles = ["student-0", "student-1", "student-2", "teacher-a", "trainer", "evaluator"]
    chosen = [_choose(rng, roles) for _ in range(600)]
    kinds = {kind: sum(1 for one in chosen if kind_of(one) == kind) for kind in map(kind_of, chosen)}
    assert set(kinds) == {"student", "teacher", "trainer rank", "evaluator", CONTROLLER, ALL}
    assert min(kinds.values()) > 60
    assert set(roles) <= set(chosen)


async def test_processes_are_found_by_their_role(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    supervisor = Supervisor([ChildSpec("student-0", sleeper), ChildSpec("evaluator", sleeper)], tmp_path, 0)
    await supervisor.start()
    async with asyncio.timeout(20):
        while len(found := players(os.getpid())) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert set(found) == {"student-0", "evaluator"}
    guardians = {child.process.pid for child in supervisor.children.values()}
    assert {process.ppid() for processes in found.values() for process in processes} == guardians
    await supervisor.stop(1)
    assert not guardians & {process.pid for process in descendants(os.getpid())}
