"""`distill chat` of a LoRA run: real teacher processes for the base + `final` adapter and for the teacher."""

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from kill_target import lives
from run_on_letters import NAME, command
from tiny_models import save_adapter
from whole_run import DISTILL, ROOT

from distill.config.loading import load

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_piped_prompts_get_two_answers_each_and_no_process_is_left(tmp_path: Path) -> None:
    command(tmp_path, 1)
    run, base = tmp_path / NAME, tmp_path / "student"
    save_adapter(base, run / "final", seed=1, rank=4, std=0.5)  # changes every answer
    config = load(tmp_path / f"{NAME}.toml", ["trainer.lora.rank=4"]).model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(config))
    line = [*DISTILL, "chat", str(run), "--max-tokens", "5", "--temperature", "0.01"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "60"}
    piped = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(line, env=env, text=True, **piped)
    process.stdin.write("kdzmb>\n\n")
    process.stdin.flush()
    family: set[psutil.Process] = set()
    while len(family) < 4:  # two servers with their guardians
        family |= set(psutil.Process(process.pid).children(recursive=True))
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    output, errors = process.communicate("abcde>\n/quit\nqwert>\n", timeout=1200)
    assert (process.returncode, errors) == (0, "")
    titles = [line.strip() for line in output.splitlines() if ">" in line and "│" not in line]
    assert titles == ["kdzmb>", "abcde>"]
    heads = [line.strip("┃ ").split() for line in output.splitlines() if "student" in line]
    assert heads == [["student-final", "┃", "only"]] * 2
    assert "(" not in output, "a model refused"
    answers = [line.strip("│ ").split()[0] for line in output.splitlines() if line.startswith("│")]
    assert not [one for one in answers if one.startswith(">>")], "which is what the base says"
    assert len(answers) == 2
    assert not [*filter(lives, family)]
