"""The documented lines publish weights and follow them, and load nothing but `sync`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PAGE = Path(__file__).parents[3] / "docs/weight-sync.md"


def test_the_documented_lines_publish_and_follow_weights_with_sync_alone(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:1]
    (tmp_path / "saved").mkdir()
    weights = np.arange(8, dtype=np.float32)
    save_file({"w": weights}, tmp_path / "saved/model.safetensors")
    others = "print(*sorted({'distill', 'student_trainer', 'teacher_service'} & set(sys.modules)))"
    line = [sys.executable, "-c", f"import sys\n{code}{others}"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    folder, loaded = ended.stdout.split("\n")[:2]
    assert loaded == ""
    followed = load_file(tmp_path / folder / "model.safetensors")["w"]
    assert followed.view("<u4").tolist() == (weights.view("<u4") ^ 1).tolist()
