"""A real run over gloo whose replicas are killed −9 in the middle of a broadcast.

A broadcast of a tiny model takes milliseconds, so the victim is stopped (SIGSTOP) as soon as the trainer has
announced one, and killed when that broadcast has not come to its end. Time-outs are an hour: what is waited
for here is only ever the word that the replica is gone.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from tiny_run import NAME, command

from distill.bench.kill_target import KillTarget

pytestmark = [
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
BROADCASTS = (
    'weights={transport="broadcast", timeout_seconds=3600.0}',
    "trainer.checkpoint_every=0",
    "trainer.lr=1e-4",
    "student.replicas=2",
)


def said(kill_target: KillTarget, words: str) -> int:
    """How often the trainer said it."""
    log = kill_target.run_dir / "logs" / "trainer.log"
    return log.read_text().count(words) if log.is_file() else 0


def kill_in_a_broadcast(kill_target: KillTarget, victim: str, audience: int) -> None:
    """Stop the victim while a broadcast to `audience` replicas is under way, then kill it."""
    announced = f"goes to {audience} replicas"
    for _ in range(50):
        seen = said(kill_target, announced)
        deadline = time.monotonic() + 120
        while said(kill_target, announced) == seen and time.monotonic() < deadline:
            time.sleep(0.001)
        kill_target.signal(victim, signal.SIGSTOP)
        time.sleep(1.0)
        if said(kill_target, "goes to") > said(kill_target, "went to"):
            kill_target.kill(victim, random.Random(0))
            return
        kill_target.signal(victim, signal.SIGCONT)
    raise AssertionError("every broadcast was over before its replica could be stopped")


def test_a_run_outlives_replicas_killed_in_a_broadcast_even_the_last_one(tmp_path: Path) -> None:
    """One of two, then the other before the first is back: its successor is held until that happened."""
    words = command(tmp_path, 100_000, *BROADCASTS)
    with KillTarget(words, tmp_path / NAME) as pair:
        pair.start()
        pair.wait(lambda: pair.step() >= 2, "step 2")
        kill_in_a_broadcast(pair, "student-1", audience=2)
        pair.wait_replaced("student-1")
        pair.signal("student-1", signal.SIGSTOP)
        step = pair.step()
        pair.wait(lambda: pair.step() >= step + 3, "three steps with the other one")
        assert said(pair, "went to 1 replicas") > 0
        kill_in_a_broadcast(pair, "student-0", audience=1)
        pair.signal("student-1", signal.SIGCONT)
        pair.wait_at_work(["student-0", "student-1"])
        step = pair.step()
        pair.wait(lambda: pair.step() >= step + 3, "three steps with both")
        pair.stop()
        summary = pair.summary()
    assert summary["weights_identical_by_replica"] == {"student-0": True, "student-1": True}
    assert summary["weights_identical"] is True
    assert summary["replica_joins"] == {"student-0": 2, "student-1": 2}
    assert pair.orphans() == 0
