"""Every configuration and every example in the tree can be used; every field says what it is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import parsed

from distill.config import RunConfig
from distill.config.loading import load
from student_trainer.config import TrainerConfig
from sync.settings import ReplicaConfig, Settings

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
EXAMPLES = ROOT / "configs/examples"
ROLES = ["control", "evaluator", "student", "student", "teacher", "train"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_in_the_tree_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(path)
    assert config.trainer.deepspeed.is_file()
    assert json.loads(config.trainer.deepspeed.read_text())["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_opens_with_its_command(path: Path) -> None:
    opening = [line for line in path.read_text().splitlines()[:8] if line.startswith("#")]
    assert any("distill " in line or "make " in line for line in opening)


def test_there_are_configurations_to_load() -> None:
    assert len(CONFIGS) >= 6


# --- fields -------------------------------------------------------------------------------------------------


def settings_classes(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for one in base.__subclasses__():
        yield one
        yield from settings_classes(one)


def test_every_field_of_every_section_says_what_it_is() -> None:
    classes = set(settings_classes())
    assert {RunConfig, TrainerConfig, ReplicaConfig} <= classes
    silent = [
        f"{one.__name__}.{name}"
        for one in classes - {RunConfig}  # its fields are sections, and their classes say what they are
        for name, field in one.model_fields.items()
        if name != "type" and not field.description
    ]
    assert sorted(silent) == []


# --- examples -----------------------------------------------------------------------------------------------


def check_command(words: list[str]) -> tuple[str, RunConfig]:
    """The subcommand, and the configuration that it loads with its overrides; unknown options are errors."""
    assert words[0] == "distill"
    name, options = words[1], parsed(words)
    assert name == "control" or options["controller"] == "http://node3:8000"
    return name, load(options["config"], options["overrides"])


def test_the_slurm_example_starts_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself runs, with a scheduler that only notes what it is asked to start."""
    monkeypatch.chdir(ROOT)
    notes, programs = tmp_path / "notes", tmp_path / "bin"
    programs.mkdir()
    notes.mkdir()
    fakes = {
        "scontrol": "printf 'node%s\\n' 0 1 2 3 4",
        # the controller ends last: the script then ends who is left, noted or not
        "srun": f"while [ $1 != distill ]; do shift; done; printf '%s\\0' \"$@\" > {notes}/.$$; "
        f"mv {notes}/.$$ {notes}/$$; [ $2 != control ] || "
        f"until [ $(ls {notes} | wc -l) = {len(ROLES)} ]; do sleep 0.05; done",
    }
    for name, body in fakes.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-4]"}
    environment |= {"RUNS": str(tmp_path / "runs")}
    (tmp_path / "runs/each-role-alone/journal").mkdir(parents=True)
    script = ["bash", str(EXAMPLES / "slurm.sbatch")]
    subprocess.run(script, env=environment, check=True, timeout=60, capture_output=True)
    started = [path.read_text().split("\0")[:-1] for path in notes.iterdir()]
    checked = [check_command(words) for words in started]
    assert sorted(name for name, _ in checked) == ROLES
    for _, config in checked:
        assert config.run.folder == tmp_path / "runs"
    (control,) = (words for words in started if words[1] == "control")
    assert "--resume" in control
