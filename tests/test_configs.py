"""Every example in the tree can be used; every field of a configuration says what it is."""

from __future__ import annotations

import random
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.config import RunConfig
from distill.config.loading import load
from distill.launch.slurm import job
from distill.tasks.sort_letters import EOS_ID, VOCABULARY, make
from student_trainer.config import TrainerConfig
from sync.base.settings import ReplicaConfig, Settings

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "configs/examples"


def test_the_example_of_lm_eval_passes_what_the_task_passes() -> None:
    passes, task = runpy.run_path(str(EXAMPLES / "lm_eval/passes.py"))["passes"], make()
    rng, found = random.Random(0), Counter[bool]()
    for index in range(500):
        prompt = task.held_out(0, index)
        left, said = sorted(prompt.text[:-1]), ""
        while left:
            said += left.pop(rng.choice([0, -1]) if rng.random() < 0.9 else len(left) // 2)
        said = said[: rng.choice([9, 9, len(said) - 1])]
        ids = [VOCABULARY.index(letter) for letter in said]
        right = task.reward(prompt, [*ids, EOS_ID])
        assert passes({"prompt": prompt.text}, [said]) == {"pass_rate": float(right)}
        found[right] += 1
    assert min(found.values()) > 100


def settings_classes(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    """Those of the product: tests that ran before this one may have made some too."""
    for section in base.__subclasses__():
        if "test_" not in section.__module__:
            yield section
        yield from settings_classes(section)


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


def test_the_slurm_example_fills_its_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes for the trainer; teacher, replicas and evaluator fill the others."""
    monkeypatch.chdir(ROOT)
    file = EXAMPLES / "slurm.toml"
    _, lines = job.write(load(file, [f"run.folder={tmp_path}"]), file, [])
    found = {line.partition(":")[0]: sum(map(int, re.findall(r"\((\d+) GPUs?\)", line))) for line in lines}
    assert found == {f"machine {i}": 8 for i in range(4)}
