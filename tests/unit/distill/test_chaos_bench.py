"""Which faults hit which targets, how processes are found, and what the figures say."""

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
from distill.bench.chaos import ALL, DISK, KINDS, chosen, figures, holds, table, targets
from distill.bench.kill_target import CONTROLLER, DEEPSPEED, Tail, descendants, kind_of, role_processes
from distill.launch.supervise import ChildSpec, Supervisor
from distill.run_log.audit import AuditReport
from sync.base.errors import ConfigError, DistillError

SUMMARY = {"weights_identical": True, "completed": True, "steps": 40}
HITS = [("kill", "student-0", 9.0), ("kill", "student-1", 11.0), ("kill", "student-0", 16.0)]
HITS += [("kill", CONTROLLER, 20.0), ("stop", "student-0", 30.0)]
SECONDS = [{"kind": kind, "target": target, "seconds": took} for kind, target, took in HITS]
COUNTED = {"events_asked": 5, "orphans": 0, "seconds": 90.0}


def test_the_table_has_the_median_and_the_longest_recovery_of_each_kind_and_target() -> None:
    found = figures(AuditReport(trained=320), SECONDS, SUMMARY) | COUNTED
    lines = table(found).splitlines()
    assert "| kill | student | 3 | 11.0 | 16.0 |" in lines
    assert "| kill | controller | 1 | 20.0 | 20.0 |" in lines
    assert "| stop | student | 1 | 30.0 | 30.0 |" in lines
    assert "events             5 of 5" in lines
    assert holds(found)


def test_one_broken_guarantee_is_enough_to_fail() -> None:
    whole = figures(AuditReport(), SECONDS, SUMMARY) | COUNTED
    assert not holds(figures(AuditReport(violations={"lost": ["0:1:0"]}), SECONDS, SUMMARY) | COUNTED)
    assert not holds(whole | {"orphans": 1})
    assert not holds(whole | {"weights_identical": False})
    assert not holds(whole | {"completed": False})
    assert not holds(whole | {"events": []}), "nothing was injected"


@pytest.mark.parametrize("broken", ["not_as_batched", "wrong_weight", "wrong_generator"])
def test_the_table_counts_every_broken_guarantee(broken: str) -> None:
    found = figures(AuditReport(violations={broken: ["0:1:0"]}), SECONDS, SUMMARY) | COUNTED
    assert not holds(found)
    assert "otherwise wrong    1" in table(found).splitlines()


def test_every_kind_hits_every_target_once_before_any_again_whatever_the_number_of_its_processes() -> None:
    roles = ["student-0", "student-1", "student-2", "teacher-a", "trainer", "evaluator"]
    helpers = [DEEPSPEED, "engine of student-1"]
    chosen = list(itertools.islice(targets(random.Random(1), KINDS, roles, helpers), 25 * 8))
    role_processes, servers = (
        {"student", "teacher", "trainer rank", "evaluator"},
        {"student", "teacher", "evaluator"},
    )
    pairs = {
        *(("kill", target) for target in {*role_processes, CONTROLLER, ALL}),
        *(("stop", target) for target in {*role_processes, CONTROLLER, DEEPSPEED, "engine of student"}),
        *(("slow", target) for target in {*role_processes, CONTROLLER}),
        *(("cut", target) for target in {*servers, CONTROLLER}),
        *(("malformed", target) for target in ("student", "teacher")),
        ("disk", DISK),
    }
    rounds = [[(kind, kind_of(one)) for kind, one in chosen[i : i + 25]] for i in range(0, len(chosen), 25)]
    assert all(set(one) == pairs for one in rounds)
    assert len({tuple(one) for one in rounds}) == 8
    assert {*roles, *helpers} <= {target for _, target in chosen}


def test_kinds_are_chosen_by_name_and_others_are_refused() -> None:
    assert chosen("stop, disk") == ["stop", "disk"]
    assert {
        kind for kind, _ in itertools.islice(targets(random.Random(0), ["cut"], ["student-0"], []), 9)
    } == {"cut"}
    with pytest.raises(ConfigError, match="--kinds has melt: choose of kill,stop,slow,cut,malformed,disk"):
        chosen("kill,melt")


class Immortal:
    """A KillTarget that is at work at once, and counts what is done to it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.injected, self.resumed, self.steps = run_dir, [], [], 0
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY))

    def __enter__(self) -> Immortal:
        return self

    def __exit__(self, *_: object) -> None: ...
    def start(self, resume: bool = False) -> None:
        self.resumed.append(resume)
        (self.run_dir / "journal").mkdir(exist_ok=True)

    def kill(self, role: str, rng: random.Random) -> None:
        self.injected.append(("kill", role))

    def kill_launcher(self, everything: bool = False) -> None:
        self.injected.append(("kill", ALL if everything else CONTROLLER))

    def suspend(self, role: str, rng: random.Random) -> None:
        self.injected.append(("stop", role))

    def pause(self, role: str, seconds: float) -> None:
        self.injected.append(("stop", role))

    def slow(self, role: str, seconds: float) -> None:
        self.injected.append(("slow", role))

    def relay(self, role: str, fault: str) -> None:
        self.injected.append((fault, role))

    def fill_disk(self, seconds: float) -> None:
        self.injected.append(("disk", DISK))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        assert condition(), what

    def wait_at_work(self, roles: list[str], anew: bool = True) -> None: ...
    def end(self) -> None: ...
    def roles(self) -> list[str]:
        return ["evaluator", "student-0", "teacher-a", "trainer"]

    def helpers(self) -> list[str]:
        return [DEEPSPEED]

    def processes(self) -> set[int]:
        return set()

    def over(self) -> bool:
        return False

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def orphans(self) -> int:
        return 0

    def summary(self) -> dict:
        return SUMMARY


def test_every_event_is_injected_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(chaos, "audit", lambda run_dir: AuditReport())
    target = Immortal(tmp_path)
    found = chaos.run(target, 24, seed=3, kinds=KINDS, report=lambda line: None)
    assert target.resumed[0] is False
    assert sum(one["times"] for one in found["events"]) == 24
    lines = [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    told = [(line["kind"], line["target"]) for line in lines]
    assert [one for one in target.injected if one != ("kill", "trainer")] == [
        one for one in told if one != ("kill", "trainer")
    ]


def test_a_continued_controller_that_kills_healthy_processes_is_reported(tmp_path: Path) -> None:
    kill_target = Immortal(tmp_path)
    kill_target.processes = iter([{1, 2}, {1, 3}]).__next__  # type: ignore[method-assign]
    with pytest.raises(DistillError, match=r"when continued it killed \{2\}"):
        chaos.INJECT["stop"](kill_target, random.Random(0), CONTROLLER)


def test_lines_are_returned_once_and_whole(tmp_path: Path) -> None:
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
        while len(found := role_processes(os.getpid())) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert set(found) == {"student-0", "evaluator"}
    guardians = {child.process.pid for child in supervisor.children.values()}
    assert {process.ppid() for processes in found.values() for process in processes} == guardians
    await supervisor.stop(1)
    assert not guardians & {process.pid for process in descendants(os.getpid())}
