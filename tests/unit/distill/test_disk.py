"""What disk a run is said to need, against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from distill.config import RunConfig
from distill.preflight_checks import machine as disk
from sync.base.errors import ConfigError

PARAMETERS = 1000
WIDTH = 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config and a tensor; the trainer's JSON beside it."""
    config = {"model_type": "llama", "hidden_size": WIDTH, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros(PARAMETERS, "f2")}, tmp_path / "model.safetensors")
    zero = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    return tmp_path


def configured(model: Path, config: Any, **sections: dict[str, Any]) -> RunConfig:
    trainer = {"deepspeed": str(model / "ds.json"), "keep_checkpoints": 2} | sections.pop("trainer", {})
    fixed = {
        "run": {"name": "x", "folder": str(model), "steps": 10**6, "min_free_disk_gib": 0},
        "student": {"path": str(model), "replicas": 3},
        "teachers": {"t": {"path": str(model)}},
        "rollout": {"batch": 4, "max_tokens": 10},
        "objective": {"type": "full"},
    }
    return config(**fixed | sections, trainer=trainer)


def test_the_record_of_full_inline_is_mostly_hidden_states(model: Path, config: Any) -> None:
    full = disk.estimate(configured(model, config, buffer={"scores": "inline"}))
    assert full.token == 4 + 4 + 4 + 2 * WIDTH
    assert disk.estimate(configured(model, config)).token == 4 + 4 + 4, "hidden states stay at the teacher"
    topk = configured(model, config, objective={"type": "topk", "k": 8})
    own = configured(model, config, objective={"type": "student_topk", "k": 8})
    assert disk.bytes_per_token(own) == 12 + 4 + 8 * (4 + 2), "the student's ids, too"
    assert disk.bytes_per_token(topk) == 12 + 4 + 8 * (4 + 2), "ids, log-probabilities, entropy"


MIRRORS, ANCHOR_AND_FINAL = 2 * (3 + 1), 2
BROADCASTS, BUCKET = {"transport": "broadcast"}, {"store": {"type": "bucket", "bucket": "a/b"}}


@pytest.mark.parametrize(
    ("sections", "store"),
    [
        ({}, 3 * (1 + 4)),
        ({"weights": BROADCASTS, "evaluation": {"every": 0}}, 2 + 1),
        ({"weights": BROADCASTS, "evaluation": {"every": 20}}, 2 + 7),
        ({"weights": BUCKET}, 0),
    ],
    ids=["deltas", "broadcasts", "broadcasts, of which some are evaluated", "elsewhere"],
)
def test_what_is_needed_at_once_is_checkpoints_versions_and_mirrors(
    model: Path, config: Any, sections: dict[str, Any], store: int
) -> None:
    found = disk.estimate(configured(model, config, **sections))
    checkpoint = (2 + 4 + 4 + 4) * PARAMETERS
    versions = (store + MIRRORS + ANCHOR_AND_FINAL) * 2 * PARAMETERS
    assert (found.checkpoint, found.fixed, found.store) == (checkpoint, 3 * checkpoint + versions, 0)


def published(model: Path, config: Any, **sections: Any) -> float:
    """Of what is needed at once, versions and mirrors: bytes."""
    found = disk.estimate(configured(model, config, **sections))
    return found.fixed - 3 * found.checkpoint


def test_with_lora_versions_and_mirrors_are_adapters(model: Path, config: Any) -> None:
    width, inner = WIDTH, 11008  # of transformers' default Llama, of 32 layers
    adapters = 2 * 4 * 32 * (4 * (width + width) + 3 * (width + inner))
    lora = {"lora": {"rank": 4}}
    for weights, store in (({}, 2 + 140), ({"publish_every": 4, "keep_anchors": 1}, 1 + 35)):
        found = published(model, config, trainer=lora, weights=weights) / adapters
        assert found == store + MIRRORS + ANCHOR_AND_FINAL, "anchors kept, and 70 minutes of 30 s"
    few = published(model, config, trainer=lora, run={"name": "x", "folder": str(model), "steps": 5})
    assert few == (1 + 5 + 1 + MIRRORS + ANCHOR_AND_FINAL) * adapters, "first, each step's, and the last"
    assert disk.estimate(configured(model, config, trainer=lora)).checkpoint == 2 * PARAMETERS


@pytest.mark.parametrize("kind", ["directory", "xet"])
def test_versions_of_a_local_store_are_counted_on_the_disk_of_its_path_and_one_too_small_is_refused(
    model: Path, config: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.parent / "apart" / "store"
    settings = configured(model, config, weights={"store": {"type": kind, "path": str(path)}})
    inside = disk.estimate(configured(model, config))
    assert disk.estimate(settings) == inside, "one disk"
    monkeypatch.setattr(disk, "_disk", lambda folder: "apart" in folder.parts)
    versions = 3 * (1 + 4) * 2 * PARAMETERS
    apart = disk.estimate(settings)
    assert (apart.fixed, apart.store) == (inside.fixed - versions, versions)
    assert "disk of the store: 0.00 GiB for published versions at 30 s" in disk.lines(settings, apart)[1]
    free = {model.parent: versions, model: apart.fixed}
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    disk.check_room(settings, apart)
    free[model.parent] -= 1
    with pytest.raises(ConfigError, match=r"published versions .* set weights\.store\.path to another disk"):
        disk.check_room(settings, apart)
    free[model] -= 1
    with pytest.raises(ConfigError, match=r"take 0\.00 GiB at once: set run\.folder to another disk"):
        disk.check_room(settings, apart)


def test_each_process_of_the_run_that_follows_the_weights_has_a_mirror(model: Path, config: Any) -> None:
    few = published(model, config, evaluation={"placement": {"urls": ["http://there:1"]}})
    teacher = {"path": str(model), "follow_student_every": 1, "replicas": 2}
    more = {"teachers": {"t": teacher}, "objective": {"type": "topk"}, "evaluation": {"replica": {}}}
    many = published(model, config, **more)
    replica_evaluator_teachers = 1 + 1 + 2
    assert many - few == 2 * replica_evaluator_teachers * 2 * PARAMETERS


def test_the_estimate_is_told_per_million_tokens_and_per_day(model: Path, config: Any) -> None:
    settings = configured(model, config, buffer={"scores": "inline"})
    text = "\n".join(disk.lines(settings, disk.estimate(settings)))
    assert "8,204 bytes a token, 7.64 GiB a million tokens" in text
    assert "a day at 1,000 tokens/s: 660 GiB written to the record" in text
