"""One real run that is killed −9 in every part, one after the other; random tiny models.

The run is made once; each test looks at one thing that must be true of it afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_run import BATCH, CHECKPOINT_EVERY, NAME, command

from distill.bench.patient import Patient
from distill.control.audit import AuditReport, audit
from distill.control.records import LineageOpened
from distill.control.segments import read_all

pytestmark = [
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 32
SERVERS = ["student-0", "teacher-only"]


@dataclass
class Survivor:
    """What is left of the run."""

    report: AuditReport
    summary: dict[str, Any]
    lineages: list[LineageOpened]
    orphans: int


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """Killed: student, teacher, one rank, guardians, launcher; resumed to the end."""
    folder = tmp_path_factory.mktemp("survival")
    with Patient(command(folder, STEPS), folder / NAME) as patient:
        patient.start()
        patient.wait(lambda: patient.step() >= 2, "step 2")
        left = 0
        for killed, unguarded in ((SERVERS, "trainer"), (["trainer"], "student-0")):
            for role in killed:
                patient.kill(role, random.Random(0))
            left += patient.kill_guardian(unguarded)
            patient.wait_at_work([*killed, unguarded])
        patient.kill_launcher()
        patient.start(resume=True)
        patient.end()
        records = [record for *_, record in read_all(patient.run_dir / "journal")]
        lineages = [record for record in records if isinstance(record, LineageOpened)]
        yield Survivor(audit(patient.run_dir), patient.summary(), lineages, left + patient.orphans())


def test_the_run_completes_with_every_guarantee_kept(survivor: Survivor) -> None:
    assert survivor.report.ok, survivor.report
    assert survivor.summary["completed"]
    assert survivor.report.trained == STEPS * BATCH
    assert survivor.report.open_prompts == []
    assert survivor.report.oldest <= 2


def test_the_replica_holds_the_trainers_weights_at_the_end(survivor: Survivor) -> None:
    assert survivor.summary["weights_identical"]


def test_no_process_outlives_a_launcher_or_a_guardian(survivor: Survivor) -> None:
    assert survivor.orphans == 0


def test_every_death_of_the_trainer_costs_at_most_the_steps_since_a_checkpoint(survivor: Survivor) -> None:
    first, *others = survivor.lineages
    assert first.checkpoint is None
    assert len(others) == 3
    for opened in others:
        assert opened.start == 0 if opened.checkpoint is None else opened.checkpoint.step
        assert opened.branch - opened.start <= CHECKPOINT_EVERY + 2


def test_steps_that_were_trained_again_gave_the_same_weights_bit_for_bit(survivor: Survivor) -> None:
    assert survivor.report.again > 0
    assert survivor.report.differing == []
