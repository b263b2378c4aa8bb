"""What wandb and TensorBoard record, read back: wandb's offline file by its own `wandb leet inspect`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import left
from disks import fill, free, mounted
from ports import Handler, served
from small_config import make_config, run_of_letters

from distill.launch.run import _Launcher
from distill.launch.supervise import ChildSpec
from distill.metrics import trackers
from distill.metrics.names import FIGURES, SECTIONS
from distill.metrics.samples import SAMPLES, Quarantine, Sample
from distill.metrics.summary import git_state
from distill.metrics.timeline import Span
from distill.metrics.trackers import MetricsFile, TensorBoard, Wandb
from distill.preflight_checks import checks
from sync.base.errors import ConfigError
from sync.base.jsonl import JsonLines
from sync.wire import RunIdentity


@pytest.fixture
def run(tmp_path: Path) -> Any:
    section = {"wandb": "offline", "group": "trials", "tags": ["a"], "notes": "first", "table_every": 2}
    return run_of_letters(tmp_path, tracking=section)


def recorded(run: Any, use: Callable[[Wandb], None]) -> list[dict[str, Any]]:
    """Records of a wandb run that is opened, used and closed."""
    lines, logprobs = JsonLines(run.run_dir / SAMPLES), ([-0.5, -1.0], [-1.5, -1.0])
    lines.write(Sample("L000-v00000002", "0:1:0", 1, "t", [3], [4, 5], *logprobs, 1.0, False, False))
    lines.close()
    sink = Wandb(run, RunIdentity(run.run.name, "0123abcd"))
    use(sink)
    sink.close()
    (path,) = run.run_dir.glob("wandb/offline-run-*/*.wandb")
    words = "leet", "inspect", "--json", "--follow", "--idle-timeout", "60s"
    command = [sys.executable, "-m", "wandb", *words, str(path)]  # to the record that ends the run
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1]["type"] == "exit"
    return records


def of(kind: str, records: list[dict[str, Any]]) -> list[Any]:
    """The records of one kind."""
    return [record[kind] for record in records if record["type"] == kind]


def logged(records: list[dict[str, Any]], figure: str) -> list[tuple[Any, Any]]:
    """(step, value) each time that a figure was logged."""
    rows = [history["item"] for history in of("history", records)]
    return [(row.get("step"), row[figure]) for row in rows if figure in row]


def test_figures_have_the_step_as_axis_samples_become_a_table_and_alerts_and_the_report_are_there(
    run: Any,
) -> None:
    metrics, spans = MetricsFile(run.run_dir / "metrics.jsonl"), JsonLines(run.run_dir / "timeline.jsonl")
    spans.write(Span("trainer", "train", 1.0, 2.0))

    def use(sink: Wandb) -> None:
        for step in (1, 2, 3, 4):
            for each in (metrics, sink):
                each.log(step, {"eval/reverse_kl": 1 / step})
        sink.alert("rolled back", "step 3: reverse_kl is 9")

    found = recorded(run, use)
    (started,) = of("run", found)
    assert started["run_id"] == f"{run.run.name}-0123abcd"
    assert (started["run_group"], started["tags"], started["notes"]) == ("trials", ["a"], "first")
    config = started["config"]["update"]
    assert config["versions"]["torch"] == torch.__version__
    assert config["git"] == git_state()
    defined = of("metric", found)
    axes = {metric["glob_name"]: metric["step_metric"] for metric in defined if "glob_name" in metric}
    assert axes == {f"{section}/*": "step" for section in SECTIONS}
    (kl,) = (metric for metric in defined if metric.get("name") == "eval/reverse_kl")
    assert (kl["step_metric"], kl["summary"]) == ("step", {"min": True, "last": True})
    assert logged(found, "eval/reverse_kl") == [(step, 1 / step) for step in (1, 2, 3, 4)]
    every = [(None, 1)] * 3, [(None, 7)] * 3  # after every second evaluation, and at the end
    assert (logged(found, "samples.nrows"), logged(found, "samples.ncols")) == every
    *_, file = run.run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    row = json.loads(file.read_text())["data"][0]
    assert row[:4] == ["L000-v00000002", 1, 1.0, 0.5]
    assert len(row[5]) == 2
    (alert,) = of("alert", found)
    said = [alert[key] for key in ("title", "text", "level")]
    assert said == ["rolled back", "step 3: reverse_kl is 9", "WARN"]
    (picture,) = run.run_dir.glob("wandb/offline-run-*/files/media/images/report_*.png")
    assert picture.read_bytes() == (run.run_dir / "report.png").read_bytes()


def test_quarantines_and_restarts_raise_alerts(tmp_path: Path) -> None:
    alerts: list[tuple[str, str]] = []
    written: list[Quarantine] = []
    left_out = SimpleNamespace(write=None, append=None)
    launcher: Any = SimpleNamespace(
        _config=make_config(),
        _display=SimpleNamespace(say=None),
        _quarantine=SimpleNamespace(write=written.append),
        _alert=lambda *alert: alerts.append(alert),
        _folder=SimpleNamespace(logs=tmp_path),
        **dict.fromkeys(("_samples", "_spans", "_roll_back_to"), left_out),
    )
    poisoned = Quarantine("0:7", [3], [1], "poisoned", "it kills the trainer")
    _Launcher._hooks(launcher).quarantined(poisoned)
    _Launcher._died(launcher, ChildSpec("student-0", ["serve"]))
    assert written == [poisoned]
    assert alerts == [
        ("quarantined: poisoned", "it kills the trainer"),
        ("student-0 is restarted", f"it ended; {tmp_path}/student-0.log has why"),
    ]


def shown_by_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_shows_every_figure_and_a_repeated_step_once(tmp_path: Path) -> None:
    first, resumed = TensorBoard(tmp_path), TensorBoard(tmp_path)
    for step, loss in enumerate([0.5, 0.4, 0.3]):
        first.log(step, {"lineage": 1, "train/loss": loss})
    first.close()
    resumed.log(1, {"lineage": 2, "train/loss": 0.45})
    resumed.log(2, {"lineage": 2, "train/loss": 0.35})
    resumed.log(3, {"lineage": 1, "eval/best": 1.0})
    resumed.log(2, {"lineage": 3, "train/loss": 0.25})
    resumed.close()
    shown = shown_by_tensorboard(tmp_path)
    assert shown.Tags()["scalars"] == ["lineage", "train/loss", "eval/best"]
    losses = [(event.step, round(event.value, 2)) for event in shown.Scalars("train/loss")]
    assert losses == [(0, 0.5), (1, 0.45), (2, 0.25)]
    assert shown.Scalars("eval/best") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its own thread
def test_tensorboard_goes_on_when_a_full_disk_has_room_again(tmp_path, caplog) -> None:
    before = set(threading.enumerate())
    with mounted(tmp_path / "small", 64) as small:
        sink = TensorBoard(small)
        sink.log(0, {"lineage": 0, "train/loss": 0.5})
        fill(small)
        step = 0
        while "TensorBoard does not get everything" not in caplog.text:  # its thread finds the disk full
            step += 1
            sink.log(step, {"lineage": 0, "train/loss": 0.4})
        free(small)
        sink.log(step + 1, {"lineage": 0, "train/loss": 0.25})
        sink.close()
        event = shown_by_tensorboard(small).Scalars("train/loss")[-1]
        assert (event.step, event.value) == (step + 1, 0.25)
        for thread in set(threading.enumerate()) - before:  # one that failed says so in this test
            thread.join(600)


def test_a_wandb_server_that_is_not_there_leaves_the_run_to_be_recorded_offline(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 2.0)
    found = recorded(
        run.with_(tracking={"wandb": "online"}), lambda sink: sink.log(1, {"train/reverse_kl": 0.5})
    )
    assert logged(found, "train/reverse_kl") == [(1, 0.5)]
    assert "recording offline in" in caplog.text


@pytest.mark.parametrize(
    ("machine", "key", "mode"),
    [
        ("models.acme.test", "0" * 40, "online"),
        ("models.acme.test", "malformed", "online"),
        ("wandb.other.test", "0" * 40, "offline"),
        ("\udcff", "0" * 40, "offline"),
    ],
)
def test_a_key_is_looked_for_where_wandb_keeps_it(
    machine: str, key: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(base_url="https://models.acme.test")
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=settings))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = f"machine {machine}\n  login user\n  password {key}\n"
    (tmp_path / ".netrc").write_bytes(text.encode(errors="surrogateescape"))
    assert trackers.wandb_mode(make_config(tracking={"wandb": "online"})) == mode


class WandbServer(ThreadingHTTPServer):
    """What `distill overview` needs of wandb's. `views`: variables of every mutation that saved one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Views)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.views: list[dict[str, Any]] = []


class Views(Handler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.body()
        data: dict[str, Any] = {"viewer": {"id": "1", "entity": "acme", "username": "a", "flags": "{}"}}
        if self.path == "/graphql":  # the rest is telemetry
            asked = json.loads(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            if "upsertView" in asked["query"]:
                self.server.views.append(asked["variables"])
                data = {"upsertView": {"view": {"id": "2", "name": "nw-saved-v"}, "inserted": True}}
        self.answer(200, json.dumps({"data": data}).encode(), {"content-type": "application/json"})


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
def test_an_overview_of_a_project_has_a_curve_for_each_figure(run: Any, monkeypatch, capsys) -> None:
    with served(WandbServer()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        assert left("overview", str(run.run_dir)) == 0
    assert capsys.readouterr().out == f"{server.url}/acme/{run.tracking.project}?nw=saved\n"
    (view,) = server.views
    assert (view["entityName"], view["projectName"]) == ("acme", run.tracking.project)
    *curves, media = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    of_section = lambda one: tuple(panel["config"]["metrics"][0] for panel in one["panels"])  # noqa: E731
    assert {section["name"]: of_section(section) for section in curves} == trackers.PANELS
    names = [name for of_section in trackers.PANELS.values() for name in of_section]
    assert all(any(figure.names(name) for figure in FIGURES) for name in names)
    assert [panel["config"]["mediaKeys"] for panel in media["panels"]] == [["samples"], ["report"]]


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
def test_a_key_that_wandb_refuses_and_a_package_that_is_missing_are_the_users_to_correct(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    online = run.with_(tracking={"wandb": "online"})
    with pytest.raises(ConfigError, match=r"wandb refuses the run: .*correct WANDB_API_KEY"):
        Wandb(online, RunIdentity(run.run.name, "0123abcd"))
    with pytest.raises(ConfigError, match=r"wandb refuses the view: .*correct WANDB_API_KEY"):
        trackers.save_overview(run)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(ConfigError, match=r"pip install 'onpolicy-distill\[overview\]'"):
        trackers.save_overview(run)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else 1)
    (problem,) = checks._packages(make_config(tracking={"tensorboard": True}))
    assert "pip install 'onpolicy-distill[tensorboard]'" in problem
