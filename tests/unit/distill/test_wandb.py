"""What wandb records: read back from its offline file with wandb's own message types."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_config import make_config

from distill.metrics.samples import SAMPLES, Sample
from distill.metrics.trackers import Wandb
from distill.tasks.sort_letters import letter_tokenizer
from sync.durable import write_json
from sync.jsonl import JsonLines
from sync.wire import RunIdentity

TABLE = "samples.nrows"
BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")


def records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: LevelDB's log format behind a header of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), FILE_HEADER, b""
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        whole += data[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (1, 4):  # whole, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    letter_tokenizer().save_pretrained(tmp_path / "student")
    section = {"wandb": "offline", "group": "trials", "tags": ["a"], "notes": "first"}
    config = make_config(
        run={"folder": tmp_path}, student={"path": str(tmp_path / "student")}, tracking=section
    )
    config.run_dir.mkdir(parents=True)
    write_json(config.run_dir / "config.json", config.model_dump(mode="json"))
    return config


def test_figures_have_the_step_as_axis_and_samples_become_a_table(run: Any) -> None:
    lines = JsonLines(run.run_dir / SAMPLES)
    lines.write(
        Sample("L000-v00000002", "0:1:0", 1, "t", [3], [4, 5], [-0.5, -1.0], [-1.5, -1.0], 1.0, False, False)
    )
    lines.close()
    sink = Wandb(run, RunIdentity(run.run.name, "0123abcd"))
    for step in (1, 2):
        sink.log(step, {"train/reverse_kl": 1 / step})
    sink.close()
    (path,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    found = wait_for_end(path)
    (started,) = (one.run for one in found if one.WhichOneof("record_type") == "run")
    assert started.run_id == f"{run.run.name}-0123abcd"
    assert (started.run_group, list(started.tags), started.notes) == ("trials", ["a"], "first")
    axes = {one.metric.glob_name: one.metric.step_metric for one in found if one.HasField("metric")}
    assert axes["*"] == "step"
    history = [values(one.history) for one in found if one.HasField("history")]
    assert [(one["step"], one["train/reverse_kl"]) for one in history if "train/reverse_kl" in one] == [
        (1, 1.0),
        (2, 0.5),
    ]
    (table,) = (one for one in history if TABLE in one)
    assert (table[TABLE], table["samples.ncols"]) == (1, 7)
    (file,) = run.run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    row = json.loads(file.read_text())["data"][0]
    assert row[:4] == ["L000-v00000002", 1, 1.0, 0.5]
    assert len(row[5]) == 2


def values(history: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def wait_for_end(path: Path) -> list[Any]:
    """Its service writes on behind the end."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        found = list(records(path))
        if any(TABLE in values(one.history) for one in found if one.HasField("history")):
            return found
        time.sleep(0.1)
    return list(records(path))
