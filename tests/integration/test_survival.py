"""One real run that is killed −9, and stopped, in every part, one after the other; random tiny models.

The run is made once; each test looks at one thing that must be true of it afterwards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from kill_target import DEEPSPEED, ENGINE_OF, KillTarget
from recorded import rows_of
from run_on_letters import BATCH, CHECKPOINT_EVERY, NAME, command

from distill.record.audit import audit
from distill.topology import EVALUATOR

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
STEPS = 8
"""From the launcher's death to the end: until then the run takes as many as come."""
SERVERS = ["student-0", "teacher-only"]
LIMITS = ("run.health_timeout_seconds=20", "rollout.stall_timeout_seconds=40", "run.restarts=20")
EVALUATED = "evaluation={prompts=8}"
ENGINE = ENGINE_OF + "student-0"


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillTarget]:
    """Killed: student, teacher, one rank; a guardian; the launcher, resumed to the end.

    Stopped: student, teacher, evaluator, the deepspeed launcher and one rank, and once more vLLM's engine.
    """
    folder = tmp_path_factory.mktemp("survival")
    rng = random.Random(0)
    with KillTarget(command(folder, 100_000, *LIMITS, EVALUATED), folder / NAME) as kill_target:
        kill_target.start()
        kill_target.wait(lambda: kill_target.step() >= 2, "step 2")
        for stopped, killed, unguarded in (
            ([], [*SERVERS, "trainer"], None),
            ([*SERVERS, EVALUATOR, DEEPSPEED, "trainer"], [], None),
            ([ENGINE], [], "teacher-only"),
        ):
            for role in stopped:
                kill_target.suspend(role, rng)
            for role in killed:
                kill_target.kill(role, rng)
            kill_target.orphans += kill_target.kill_guardian(unguarded) if unguarded else 0
            struck = {*stopped, *killed, *filter(None, [unguarded])} - {DEEPSPEED}
            kill_target.wait_at_work([role.removeprefix(ENGINE_OF) for role in struck])
        kill_target.kill_launcher()
        kill_target.resume(STEPS)
        kill_target.end()
        yield kill_target


@pytest.fixture(scope="module")
def said(survivor: KillTarget) -> str:
    """By the launcher."""
    return (survivor.run_dir / "logs" / "launcher.log").read_text()


def test_the_run_completes_with_every_guarantee_kept_and_leaves_no_process(survivor: KillTarget) -> None:
    report, summary = audit(survivor.run_dir), survivor.summary()
    assert report.ok, report
    assert summary["completed"]
    assert 0 < report.trained <= summary["steps"] * BATCH, "one that kills two trainers is trained in parts"
    assert report.open_prompts == [], "every rollout was trained once, or dropped with its reason"
    assert report.oldest <= 2
    assert report.again > 0
    assert report.differing == [], "steps that were trained again gave the same weights bit for bit"
    assert summary["weights_identical"], "the replica holds the trainer's"
    assert survivor.orphans == 0, "of a launcher and of a guardian"


@pytest.mark.parametrize("role", ["student-0", "teacher-only", EVALUATOR])
def test_a_server_that_is_stopped_is_told_with_the_rule_and_killed(said: str, role: str) -> None:
    assert f"{role}: /health has not answered for run.health_timeout_seconds = 20 s" in said
    kills = said.count(f"{role} is killed, to be restarted")
    assert kills >= (2 if role == "student-0" else 1), "the student's once more for its engine"


def test_a_trainer_without_all_heartbeats_and_a_stopped_engine_are_told_with_the_rule(said: str) -> None:
    assert re.search(r"no heartbeat of trainer rank [01] for run.health_timeout_seconds", said)
    assert "trainer is killed, to be restarted" in said
    assert "generated no token for rollout.stall_timeout_seconds = 40 s" in said


def test_every_death_of_the_trainer_costs_at_most_the_steps_since_a_checkpoint(survivor: KillTarget) -> None:
    (first, *_), *others = rows_of(survivor.run_dir, "SELECT from_step, start, branch FROM lineage")
    assert first is None
    assert len(others) >= 3
    for checkpoint, start, branch in others:
        assert start == (checkpoint or 0)
        assert branch - start <= CHECKPOINT_EVERY + 2
