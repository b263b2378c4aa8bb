"""`distill chat` with a real teacher process for the student and for the teacher."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_on_letters import NAME, ROOT, command

from distill.config.loading import load

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def test_piped_prompts_get_two_answers_each_and_no_process_is_left(tmp_path: Path) -> None:
    command(tmp_path, 1)
    run = tmp_path / NAME
    shutil.copytree(tmp_path / "student", run / "final")
    config = load(tmp_path / f"{NAME}.toml").model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "distill.cli.main", "chat", str(run), "--max-tokens", "5"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "60"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write("kdzmb>\n\n")
    process.stdin.flush()
    family: set[psutil.Process] = set()
    while len(family) < 4:  # two servers with their guardians
        family |= set(psutil.Process(process.pid).children(recursive=True))
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    output, errors = process.communicate("abcde>\n/quit\nqwert>\n", timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert [line.strip() for line in output.splitlines() if ">" in line] == ["kdzmb>", "abcde>"]
    heads = [line.strip("┃ ").split() for line in output.splitlines() if "student" in line]
    assert heads == [["student-final", "┃", "only"]] * 2
    assert "(" not in output, "a model refused"
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
