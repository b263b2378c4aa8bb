"""`import distill`: what its functions return, refuse and share with the commands."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from command import left
from small_config import LEAST, make_config

import distill
from distill import api
from distill.launch.run import _Launcher
from distill.launch.run_folder import RunFolder
from distill.metrics.samples import SAMPLES, Sample
from distill.record.resume import record_of
from sync.base.errors import ConfigError
from sync.base.jsonl import JsonLines

ROOT = Path(__file__).parents[3]
FINISHED: dict[str, Any] = {
    "completed": True, "steps": 6, "problems": [], "warnings": [], "error": None, "model": "m",
    "perf": {"waited_seconds": {}, "busy_seconds": {}, "idle_seconds": {}},
    "train": {"tokens_share": 1.0},
    "rollout": {"dropped": {}, "tokens_total": 8},
    "evaluations": [{"version": "L000-v00000006", "reverse_kl": 0.5}],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    run = {"name": "test", "steps": 6, "folder": str(tmp_path / "runs")}
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(LEAST | {"run": run, "student": {"path": "none/here/student"}}))
    return path


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "test"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(FINISHED))
    (folder / "final").mkdir()
    return folder


def test_importing_the_package_imports_nothing_else_and_every_name_is_there() -> None:
    program = (
        "import sys; import distill; heavy = {'pydantic', 'numpy', 'torch', 'rich'} & sys.modules.keys();"
        "import distill.preflight_checks, distill.planning; from distill import *;"
        "from distill import plan, preflight;"
        "print(heavy or 'light', callable(plan), callable(preflight), 'torch' in sys.modules)"
    )
    told = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert told.split() == ["light", "True", "True", "False"]


def test_a_run_that_is_complete_is_shown_and_not_started_again(file: Path, finished: Path, capsys) -> None:
    """The student's folder does not exist: whatever is checked or started would fail."""
    assert left("run", str(file), "--resume") == 0
    assert "is already complete: 6 steps; raise run.steps to train on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "function", "given"),
    [
        (["run", "--resume"], "run", {"resume": True}),
        (["plan", "--device", "cpu"], "plan", {"device": "cpu", "measured": None}),
        (["preflight", "--engines"], "preflight", {"engines": True}),
        (["evaluate", "--model", "m"], "evaluate", {"completions": None}),
    ],
)
def test_the_commands_call_the_same_functions(
    file: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], function: str, given: dict[str, Any]
) -> None:
    calls: list[Any] = []

    def called(config: Any, *more: Any, **named: Any) -> None:
        calls.append((config, named))
        raise ConfigError("called")

    monkeypatch.setattr(api, function, called)
    assert left(words[0], str(file), *words[1:], "--set", "run.steps=9") == 2
    ((config, named),) = calls
    assert config == distill.load_config(file, ["run.steps=9"])
    assert given.items() <= named.items()


async def test_a_call_inside_a_running_loop_is_refused_and_a_thread_may_make_it(file: Path, finished) -> None:
    for name in ("run", "preflight", "evaluate"):
        way_out = rf"write `await asyncio\.to_thread\(distill\.{name}, config\)`"
        with pytest.raises(ConfigError, match=way_out):
            getattr(distill, name)(make_config())
    assert await asyncio.to_thread(distill.run, distill.load_config(file), resume=True) == FINISHED


def test_one_call_at_a_time(file: Path, finished: Path) -> None:
    with api._working, pytest.raises(ConfigError, match="while this process runs, checks or evaluates"):
        distill.preflight(make_config())
    config = distill.load_config(file)
    with pytest.raises(ConfigError, match="does not exist"):
        distill.preflight(config)
    assert distill.run(config, resume=True) == FINISHED, "a call that failed is over"


def test_signals_are_left_alone_beside_the_main_thread() -> None:
    async def inside() -> str:
        with _Launcher._signals(SimpleNamespace(), asyncio.get_running_loop()):  # type: ignore[arg-type]
            return "entered"

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(asyncio.run, inside()).result() == "entered"


def test_a_run_is_read_back_as_plain_python(file: Path) -> None:
    config = distill.load_config(file)
    with RunFolder.open(config, resume=False) as folder:
        folder.keep(record_of(config, {}))
    line = {"step": 1, "time": 2.0, "train/loss": 0.25}
    (config.run_dir / "metrics.jsonl").write_text(json.dumps(line | {"train/grad_norm": None}) + "\n")
    with closing(JsonLines(config.run_dir / SAMPLES)) as samples:
        samples.write(Sample("L000-v00000000", "1", 0, "t", [1], [2], [-0.5], [-0.25], None, False, False))
    going_on = distill.load_run(str(config.run_dir))
    assert (going_on.config, going_on.summary, going_on.evaluations) == (config, {}, [])
    assert going_on.metrics == [line]
    assert [sample["teacher_logprob"] for sample in going_on.samples] == [[-0.25]]
    (config.run_dir / "summary.json").write_text(json.dumps(FINISHED))
    assert distill.load_run(config.run_dir).evaluations == FINISHED["evaluations"]
