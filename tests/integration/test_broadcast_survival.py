"""Real runs over gloo whose replicas are killed −9 in the middle of a broadcast, and between two.

A broadcast of a tiny model takes milliseconds, so the victim is stopped (SIGSTOP) as soon as the trainer has
announced one, and killed when that broadcast has not come to its end. Time-outs are an hour: what is waited
for here is only ever the word that the replica is gone.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import NAME, command

from distill.bench.patient import Patient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
BROADCASTS = (
    'weights={road="broadcast", timeout_seconds=3600.0}',
    "trainer.checkpoint_every=0",
    'trainer.overrides={"optimizer.params.lr"=1e-4}',
)


def running(folder: Path, steps: int, replicas: int) -> Patient:
    """`distill run` over broadcasts."""
    words = command(folder, steps, *BROADCASTS, f"student.replicas={replicas}")
    return Patient(words, folder / NAME)


def said(patient: Patient, words: str) -> int:
    """How often the trainer said it."""
    log = patient.run_dir / "logs" / "trainer.log"
    return log.read_text().count(words) if log.is_file() else 0


def kill_in_a_broadcast(patient: Patient, victim: str, audience: int) -> None:
    """Stop the victim while a broadcast to `audience` replicas is under way, then kill it."""
    announced = f"goes to {audience} replicas"
    for _ in range(50):
        seen = said(patient, announced)
        deadline = time.monotonic() + 120
        while said(patient, announced) == seen and time.monotonic() < deadline:
            time.sleep(0.001)
        patient.signal(victim, signal.SIGSTOP)
        time.sleep(1.0)
        if said(patient, "goes to") > said(patient, "went to"):
            patient.kill(victim, random.Random(0))
            return
        patient.signal(victim, signal.SIGCONT)
    raise AssertionError("every broadcast was over before its replica could be stopped")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Patient]:
    """A run that goes on until it is stopped."""
    with running(tmp_path, 100_000, replicas=2) as patient:
        yield patient


def test_the_trainer_goes_on_with_the_other_replica_and_takes_the_lost_one_back(pair: Patient) -> None:
    pair.start()
    pair.wait(lambda: pair.step() >= 2, "step 2")
    kill_in_a_broadcast(pair, "student-1", audience=2)
    step = pair.step()
    pair.wait(lambda: pair.step() >= step + 3, "three steps more")
    assert said(pair, "went to 1 replicas") > 0
    pair.wait_at_work(["student-1"])
    pair.kill("student-0", random.Random(0))  # between two broadcasts, or wherever that is
    step = pair.step()
    pair.wait(lambda: pair.step() >= step + 3, "three steps with the one that came back")
    pair.wait_at_work(["student-0"])
    pair.stop()
    summary = pair.summary()
    assert summary["weights_identical_by_replica"] == {"student-0": True, "student-1": True}
    assert summary["weights_identical"] is True
    assert summary["replica_joins"] == {"student-0": 2, "student-1": 2}
    assert pair.orphans() == 0


def test_the_only_replica_comes_back_and_the_run_completes(tmp_path: Path) -> None:
    with running(tmp_path, 24, replicas=1) as patient:
        patient.start()
        patient.wait(lambda: patient.step() >= 2, "step 2")
        kill_in_a_broadcast(patient, "student-0", audience=1)
        patient.end()
        summary = patient.summary()
    assert summary["completed"]
    assert summary["steps"] == 24
    assert summary["weights_identical"] is True
    assert summary["replica_joins"] == {"student-0": 2}
