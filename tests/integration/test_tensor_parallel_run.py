"""A whole run of a replica and a teacher with two tensor-parallel workers each, and of two ZeRO-3 ranks; the
teacher is killed while the trainer needs scores that only it keeps."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from kill_target import KillTarget
from recorded import rows_of
from run_on_words import prepare
from whole_run import DISTILL, ended_well, over

from distill.record.audit import audit
from sync.base.jsonl import read_lines

pytestmark = [pytest.mark.engine, pytest.mark.wide, pytest.mark.filterwarnings("ignore")]
STEPS, TEACHER = 12, "teacher-teacher"
SETTINGS = (
    "student.engine_args.tensor-parallel-size=2",
    "student.engine_args.num-gpu-blocks-override=64",
    'teachers.teacher.engine="vllm"',
    "teachers.teacher.engine_args={tensor_parallel_size=2, enforce_eager=true}",
    "teachers.teacher.engine_args.kv_cache_memory_bytes=67108864",
    "teachers.teacher.threads=1",
    'teachers.teacher.env.VLLM_CPU_OMP_THREADS_BIND="nobind"',
    'objective={type="full"}',
    'buffer.scores="reference"',
    "evaluation=false",
    "run.start_seconds=900",
)


def open_references(run_dir: Path) -> int:
    """Rollouts whose scores the teacher keeps and that are in no batch yet, so that no rank has them."""
    waiting = "SELECT count(*) FROM rollout WHERE kept IS NOT NULL AND id NOT IN (SELECT rollout FROM member)"
    return rows_of(run_dir, waiting)[0]


def test_parallel_replica_teacher_and_ranks_end_with_the_same_weights_though_references_were_lost(
    tmp_path: Path,
) -> None:
    config = prepare(tmp_path, "parallel", STEPS, trainer={"ranks": 2})
    command = [*DISTILL, "run", str(config), *over(*SETTINGS)]
    rng = random.Random(0)
    with KillTarget(command, tmp_path / "runs/parallel", timeout=900) as run:
        run.start()
        run.wait(lambda: run.step() >= 2, "step 2")
        run.signal(TEACHER, signal.SIGSTOP)  # it gives nothing away any more
        while not open_references(run.run_dir):
            run.signal(TEACHER, signal.SIGCONT)
            run.wait(lambda: open_references(run.run_dir) > 0, "kept scores that no rank has")
            run.signal(TEACHER, signal.SIGSTOP)
        run.kill(TEACHER, rng)
        run.wait_at_work([TEACHER])
        run.end()
    ended_well(run.run_dir, STEPS)
    steps = read_lines(run.run_dir / "metrics.jsonl")
    assert sum(step.get("train/rescored", 0) for step in steps) > 0
    report = audit(run.run_dir)
    assert (report.trained, report.open_prompts, run.orphans) == (STEPS * 16, [], 0)
