"""One real run that is killed −9 in every part, one after the other, and stopped; random tiny models.

The run is made once; each test looks at one thing that must be true of it afterwards.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.bench.patient import Patient
from distill.control.audit import AuditReport, audit
from distill.control.records import Checkpointed, LineageOpened, Record
from distill.control.segments import read_all
from distill.tasks.making import STUDENT, TEACHER, letter_tokenizer, untaught

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
STEPS, BATCH, CHECKPOINT_EVERY = 24, 8, 4
SERVERS = ["student-0", "teacher-only"]
CONFIG = """
[run]
name = "survivor"
folder = "{folder}"
steps = {steps}
grace_seconds = 30
start_seconds = 240
[student]
path = "{folder}/student"
engine_args = {{ max-model-len = 64, max-num-seqs = 32, enforce-eager = true }}
[teachers.only]
path = "{folder}/teacher"
threads = 1
env = {{ OMP_NUM_THREADS = "1" }}
[prompts]
type = "task"
task = "both_ends"
[rollout]
batch = {batch}
max_tokens = 12
max_in_flight = 32
[buffer]
max_staleness = 2
[trainer]
ranks = 2
deepspeed = "{root}/configs/deepspeed/zero3_cpu.json"
overrides = {{ "optimizer.params.lr" = 2e-3 }}
threads = 1
checkpoint_every = {checkpoint_every}
[tracking]
wandb = "disabled"
"""


@dataclass
class Survivor:
    """What is left of the run."""

    report: AuditReport
    summary: dict[str, Any]
    records: list[Record]
    stopped_with: int
    orphans: int

    def records_of(self, kind: type[Record]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """Killed: student, teacher, one rank, launcher; stopped by SIGTERM; resumed to the end."""
    folder = tmp_path_factory.mktemp("survival")
    with Patient(command(folder), folder / "survivor") as patient:
        patient.start()
        patient.wait(lambda: patient.step() >= 2, "step 2")
        for victims in (SERVERS, ["trainer"]):
            for victim in victims:
                patient.kill(victim, random.Random(0))
            patient.wait_at_work(victims)
        patient.kill_launcher()
        patient.start(resume=True)
        patient.wait_at_work([*SERVERS, "trainer"])
        status = patient.stop()
        patient.start(resume=True)
        patient.end()
        records = [record for *_, record in read_all(patient.run_dir / "journal")]
        yield Survivor(audit(patient.run_dir), patient.summary(), records, status, patient.orphans())


def command(folder: Path) -> list[str]:
    """`distill run` of a configuration in `folder`, its models beside it."""
    torch.manual_seed(0)
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        untaught(recipe).to(torch.bfloat16).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
    sizes = {"steps": STEPS, "batch": BATCH, "checkpoint_every": CHECKPOINT_EVERY}
    path = folder / "survivor.toml"
    path.write_text(CONFIG.format(folder=folder, root=ROOT, **sizes))
    return [sys.executable, "-m", "distill.cli.main", "run", str(path), "--set", "evaluation=false"]


def test_the_run_completes_with_every_guarantee_kept(survivor: Survivor) -> None:
    assert survivor.report.ok, survivor.report
    assert survivor.summary["completed"]
    assert survivor.report.trained == STEPS * BATCH
    assert survivor.report.open_prompts == []
    assert survivor.report.oldest <= 2


def test_the_replica_holds_the_trainers_weights_at_the_end(survivor: Survivor) -> None:
    assert survivor.summary["weights_identical"]


def test_no_process_outlives_a_launcher(survivor: Survivor) -> None:
    assert survivor.orphans == 0


def test_every_death_of_the_trainer_costs_at_most_the_steps_since_a_checkpoint(survivor: Survivor) -> None:
    first, *others = survivor.records_of(LineageOpened)
    assert first.checkpoint is None
    assert len(others) == 3
    for opened in others:
        assert opened.start == 0 if opened.checkpoint is None else opened.checkpoint.step
        assert opened.branch - opened.start <= CHECKPOINT_EVERY + 2


def test_a_stop_signal_leaves_a_checkpoint_of_the_last_step(survivor: Survivor) -> None:
    assert survivor.stopped_with == 130
    opened = survivor.records_of(LineageOpened)[-1]
    assert opened.checkpoint in [record.version for record in survivor.records_of(Checkpointed)]
    assert opened.branch <= opened.start + 1, "at most one batch was composed ahead of the last step"
