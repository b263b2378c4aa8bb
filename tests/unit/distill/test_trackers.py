"""What wandb and TensorBoard record, read back: wandb's offline file with its own message types."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_config import make_config

from distill.events import Quarantined
from distill.launch.run import _Launcher
from distill.launch.supervise import ChildSpec
from distill.metrics.names import SECTIONS
from distill.metrics.samples import SAMPLES, Sample
from distill.metrics.summary import git_state
from distill.metrics.timeline import Span
from distill.metrics.trackers import MetricsFile, TensorBoard, Wandb
from distill.preflight_checks import checks
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
    section = {"wandb": "offline", "group": "trials", "tags": ["a"], "notes": "first", "table_every": 2}
    config = make_config(
        run={"folder": tmp_path}, student={"path": str(tmp_path / "student")}, tracking=section
    )
    config.run_dir.mkdir(parents=True)
    write_json(config.run_dir / "config.json", config.model_dump(mode="json"))
    return config


def recorded(run: Any, use: Callable[[Wandb], None]) -> list[Any]:
    """Records of a wandb run that is opened, used and closed."""
    lines = JsonLines(run.run_dir / SAMPLES)
    lines.write(
        Sample("L000-v00000002", "0:1:0", 1, "t", [3], [4, 5], [-0.5, -1.0], [-1.5, -1.0], 1.0, False, False)
    )
    lines.close()
    sink = Wandb(run, RunIdentity(run.run.name, "0123abcd"))
    use(sink)
    sink.close()
    (path,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    return wait_for_end(path)


def test_figures_have_the_step_as_axis_and_samples_become_a_table(run: Any) -> None:
    def use(sink: Wandb) -> None:
        for step in (1, 2):
            sink.log(step, {"train/reverse_kl": 1 / step})

    found = recorded(run, use)
    (started,) = (one.run for one in found if one.WhichOneof("record_type") == "run")
    assert started.run_id == f"{run.run.name}-0123abcd"
    assert (started.run_group, list(started.tags), started.notes) == ("trials", ["a"], "first")
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["versions"]["torch"] == torch.__version__
    assert config["git"] == git_state()
    metrics = [one.metric for one in found if one.HasField("metric")]
    axes = {one.glob_name: one.step_metric for one in metrics if one.glob_name}
    assert axes == {f"{section}/*": "step" for section in SECTIONS}
    (kl,) = (one for one in metrics if one.name == "eval/reverse_kl")
    assert (kl.step_metric, kl.summary.min, kl.summary.last) == ("step", True, True)
    history = [values(one.history) for one in found if one.HasField("history")]
    steps = [(one["step"], one["train/reverse_kl"]) for one in history if "train/reverse_kl" in one]
    assert steps == [(1, 1.0), (2, 0.5)]
    (table,) = (one for one in history if TABLE in one)
    assert (table[TABLE], table["samples.ncols"]) == (1, 7)
    (file,) = run.run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    row = json.loads(file.read_text())["data"][0]
    assert row[:4] == ["L000-v00000002", 1, 1.0, 0.5]
    assert len(row[5]) == 2


def test_samples_come_again_after_evaluations_alerts_at_once_and_the_report_at_the_end(run: Any) -> None:
    metrics, spans = MetricsFile(run.run_dir / "metrics.jsonl"), JsonLines(run.run_dir / "timeline.jsonl")
    spans.write(Span("trainer", "train", 1.0, 2.0))

    def use(sink: Wandb) -> None:
        for step in (1, 2, 3, 4):
            for one in (metrics, sink):
                one.log(step, {"eval/reverse_kl": 1 / step})
        sink.alert("rolled back", "step 3: reverse_kl is 9")

    found = recorded(run, use)
    assert [(one.alert.title, one.alert.text, one.alert.level) for one in found if one.HasField("alert")] == [
        ("rolled back", "step 3: reverse_kl is 9", "WARN")
    ]
    keys = [values(one.history) for one in found if one.HasField("history")]
    curve = [one["eval/reverse_kl"] for one in keys if "eval/reverse_kl" in one]
    assert curve == [1 / step for step in (1, 2, 3, 4)]
    assert sum(TABLE in one for one in keys) == 3, "after every second evaluation, and at the end"
    (picture,) = run.run_dir.glob("wandb/offline-run-*/files/media/images/report_*.png")
    assert picture.read_bytes() == (run.run_dir / "report.png").read_bytes()


def test_quarantines_and_restarts_raise_alerts(tmp_path: Path) -> None:
    alerts: list[tuple[str, str]] = []
    written: list[Quarantined] = []
    left_out = SimpleNamespace(write=None, append=None)
    launcher: Any = SimpleNamespace(
        _config=make_config(),
        _quarantine=SimpleNamespace(write=written.append),
        _alert=lambda *alert: alerts.append(alert),
        _folder=SimpleNamespace(logs=tmp_path),
        **dict.fromkeys(("_samples", "_spans", "_roll_back_to"), left_out),
    )
    event: Any = Quarantined(cast(Any, None), "poisoned", "it kills the trainer", [1])
    _Launcher._hooks(launcher).quarantined(event)
    _Launcher._died(launcher, ChildSpec("student-0", ["serve"]))
    assert written == [event]
    assert alerts == [
        ("quarantined: poisoned", "it kills the trainer"),
        ("student-0 is restarted", f"it ended; {tmp_path}/student-0.log has why"),
    ]


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="extra `tensorboard`")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoard(tmp_path)
    sink.log(3, {"train/loss": 0.5, "eval/best": 1.0})
    sink.close()
    (file,) = tmp_path.iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    values = [
        (event.step, one.tag, one.tensor.float_val[0]) for event in events for one in event.summary.value
    ]
    assert values == [(3, "train/loss", 0.5), (3, "eval/best", 1.0)]


def test_tensorboard_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else 1)
    problems = list(checks._others(make_config(tracking={"tensorboard": True})))
    assert len(problems) == 1
    assert "pip install 'onpolicy-distill[tensorboard]'" in problems[0]


def values(history: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def wait_for_end(path: Path) -> list[Any]:
    """Its service writes on behind the end."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        found = list(records(path))
        if any(one.WhichOneof("record_type") == "exit" for one in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end after a minute")
