"""A run of a base student with its instruct teacher's tokens: other special ids, another end, more ids; and a
resume of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_on_words import over, prepare
from tiny_models import save_words
from vllm_replica import VOCABULARY, save_model

from distill.record.audit import audit

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
MORE, STUDENT_END, TEACHER_END = 8, 62, 1
TABLES = "samples_every = 1\nsamples = 16\n[evaluation]\nevery = 1\nprompts = 8\n"


def test_a_base_student_learns_its_teachers_end_and_never_samples_ids_of_its_own(tmp_path: Path) -> None:
    config = prepare(tmp_path, "base", 2, more=TABLES)
    save_model("Qwen3", 0, tmp_path / "student", padding=MORE)
    own = {"eos_token": f"w{STUDENT_END}", "pad_token": f"w{STUDENT_END}", "bos_token": "w63"}
    save_words(tmp_path / "student", (f"w{i}" for i in range(VOCABULARY + MORE)), **own)
    for more in ([], [*over("run.steps=4"), "--resume"]):
        command = [sys.executable, "-m", "distill.cli.main", "run", str(config), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "are the student's alone" in done.stdout
        assert "1 is learnt (rollout.stop_token_ids)" in done.stdout
    run = tmp_path / "runs/base"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    sampled = [sample["tokens"] for sample in samples]
    assert max(max(ids) for ids in sampled) < VOCABULARY, (
        "an eighth of all tokens would be, if they were sampled"
    )
    ends = {ids[-1] for ids in sampled if len(ids) < 16}
    assert ends == {TEACHER_END, STUDENT_END}
    assert not any({TEACHER_END, STUDENT_END} & {*ids[:-1]} for ids in sampled)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["completed"], summary["steps"], summary["weights_identical"]) == (True, 4, True)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= step["train/reverse_kl"] < 20 for step in steps if "train/reverse_kl" in step)
    assert audit(run).ok
