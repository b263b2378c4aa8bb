"""The files of docs/tutorials, written and used as their reader does, up to the preflight."""

from __future__ import annotations

import random
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from reference import parsed

from distill.config.loading import load
from distill.environments.python_host import Reply
from distill.preflight_checks import checks
from distill.prompts.stream import Prompt
from distill.tasks import guess
from distill.tasks.sort_letters import STUDENT, TEACHER, letter_tokenizer, untaught
from sync.base.own_code import use_folder

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```(?:python|toml)\n# (\w+\.\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""Name and content of a file."""
COMMAND = re.compile(r"^(distill run \w+\.toml.*)$", re.MULTILINE)
MODELS = {"tiny/student": STUDENT, "tiny/teacher": TEACHER, "other/teacher": TEACHER}


def test_every_configuration_passes_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "tutorial").mkdir()
    monkeypatch.chdir(tmp_path / "tutorial")
    for folder, recipe in MODELS.items():
        untaught(recipe).save_pretrained(folder)
        letter_tokenizer().save_pretrained(folder)
    for name, recipe in {"student": guess.STUDENT, "teacher": guess.TEACHER}.items():
        guess.untaught(recipe).save_pretrained(f"game/{name}")
        guess.guess_tokenizer().save_pretrained(f"game/{name}")
    pages = [*(ROOT / "docs/tutorials").glob("*.md")]
    for page in pages:
        for name, text in BLOCK.findall(page.read_text()):
            Path(name).write_text(text)
    runpy.run_path("make_letters.py")
    lines = [line for page in pages for line in COMMAND.findall(page.read_text().replace("\\\n", ""))]
    commands = {" ".join(line.split()): parsed(shlex.split(line, comments=True)) for line in lines}
    understood = {
        config.run.name: len(checks.check(config).split.train)
        for arguments in commands.values()
        if arguments["config"].is_file()
        for config in [load(arguments["config"], arguments["overrides"])]
    }
    use_folder(None)
    runs = ("crash", "letters", "lora", "rewarded", "two-teachers")
    assert understood == {"game": 1800, "hints": 2000} | dict.fromkeys(runs, 1872)


def test_the_reward_takes_letters_from_both_ends(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorials/own-data.md").read_text()
    reward = {}
    exec(dict(BLOCK.findall(page))["letters_reward.py"], reward)
    prompt = Prompt("1", [], answer="bdkmz")
    right = {text: reward["from_both_ends"](prompt, text) for text in ("bzdmk", "zmbdk", "dbkmz", "bzd")}
    assert right == {"bzdmk": 1.0, "zmbdk": 1.0, "dbkmz": 0.0, "bzd": 0.0}


async def test_the_game_ends_with_the_number_or_after_five_guesses() -> None:
    page, game = (ROOT / "docs/tutorials/environment.md").read_text(), dict[str, Any]()
    exec(dict(BLOCK.findall(page))["own_game.py"], game)
    task = next(task for task in range(1000) if random.Random(task).randint(1, 20) == 7)

    async def plays(*guesses: str) -> tuple[Any, list[str]]:
        left, heard = list(guesses), list[str]()

        class Talk:
            async def say(self, said: str) -> Reply:
                heard.append(said)
                return Reply(left.pop(0), [], "stop")

        return await game["play"](task, Talk()), heard

    won, lost = {"reward": 1.0, "guesses": 3}, {"reward": 0.0, "guesses": 5}
    assert await plays("[10]", "[5]", "[7]") == (won, ["?", "lower", "higher"])
    assert await plays("[1]", "", "[2]", "[20]", "[6]") == (lost, ["?", "higher", "lower", "higher", "lower"])
