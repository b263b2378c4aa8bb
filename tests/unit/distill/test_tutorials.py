"""The files of docs/tutorials, written and used as their reader does, up to the preflight."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from distill.config.loading import load
from distill.preflight_checks import checks
from distill.prompts.stream import Prompt
from distill.tasks.sort_letters import STUDENT, TEACHER, letter_tokenizer, untaught
from sync.own_code import use_folder

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```(?:python|toml)\n# (\w+\.\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""Name and content of a file."""
MODELS = {"tiny/student": STUDENT, "tiny/teacher": TEACHER, "other/teacher": TEACHER}


def test_every_configuration_passes_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tutorial").mkdir()
    monkeypatch.chdir(tmp_path / "tutorial")
    for folder, recipe in MODELS.items():
        untaught(recipe).save_pretrained(folder)
        letter_tokenizer().save_pretrained(folder)
    for page in (ROOT / "docs/tutorials").glob("*.md"):
        for name, text in BLOCK.findall(page.read_text()):
            Path(name).write_text(text)
    runpy.run_path("make_letters.py")
    files = sorted(Path().glob("*.toml"))
    found = {file.stem: checks.check(load(file)) for file in files}
    use_folder(None)
    assert {name: len(one.split.train) for name, one in found.items()} == {  # type: ignore[arg-type]
        "hints": 2000,
        "letters": 1872,
        "two_teachers": 1872,
    }


def test_the_reward_takes_letters_from_both_ends(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/own-data.md").read_text()
    reward = {}
    exec(dict(BLOCK.findall(page))["letters_reward.py"], reward)
    prompt = Prompt("1", [], answer="bdkmz")
    right = {text: reward["from_both_ends"](prompt, text) for text in ("bzdmk", "zmbdk", "dbkmz", "bzd")}
    assert right == {"bzdmk": 1.0, "zmbdk": 1.0, "dbkmz": 0.0, "bzd": 0.0}
