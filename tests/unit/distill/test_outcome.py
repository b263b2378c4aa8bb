"""The end of a run: stop signals until its figures are written, and files that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import left
from rich.console import Console
from small_config import make_config
from small_record import checkpoint

from distill.aio import in_daemon
from distill.cli.options import guarded
from distill.launch import run as launched
from distill.launch.run import STOP_SIGNALS, _Launcher
from distill.metrics.results import Earlier, earlier_starts
from distill.preflight_checks.checks import Checked
from sync.base.errors import Interrupted
from sync.wire import Version


def stoppable(over: bool = False) -> Any:
    """What `_signals` needs of a launcher; `asked`: why it is to stop."""
    asked: list[str] = []
    session = SimpleNamespace(final=None)
    controller = SimpleNamespace(session=session, request_stop=asked.append, trainer_left=lambda: None)
    run = SimpleNamespace(grace_seconds=1000.0)
    display, config = SimpleNamespace(say=lambda text: None), SimpleNamespace(run=run)
    return SimpleNamespace(
        _over=over, stopped_by="", _controller=controller, _config=config, _display=display, asked=asked
    )


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """Whether or not the tests were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def signalled(launcher: Any, *numbers: signal.Signals) -> None:
    with _Launcher._signals(launcher, asyncio.get_running_loop()):
        for number in numbers:
            signal.raise_signal(number)  # to this thread: the loop has it when this returns
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", STOP_SIGNALS)
async def test_a_first_signal_asks_the_trainer_to_stop_and_a_second_one_cancels(
    number: signal.Signals,
) -> None:
    launcher = stoppable()
    await signalled(launcher, number)
    assert (launcher.stopped_by, launcher.asked) == (number.name, [number.name])
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(signalled(stoppable(), number, number))


async def test_a_signal_after_the_run_stops_nothing_until_a_second_one(caplog) -> None:
    launcher = stoppable(over=True)
    await signalled(launcher, signal.SIGTERM)
    assert (launcher.stopped_by, launcher.asked) == ("", [])
    assert "SIGTERM: the run is over and writes its figures" in caplog.text
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(signalled(launcher, signal.SIGTERM, signal.SIGTERM))


async def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher = stoppable()
    await signalled(launcher, signal.SIGHUP)
    assert launcher.asked == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_work_in_a_daemon_that_hangs_does_not_hold_up_the_end_of_the_loop() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(600)
        ended.set()

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_daemon(work)

    asyncio.run(main())
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(600)


async def test_what_work_in_a_daemon_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_daemon(fail)


def running(
    monkeypatch: pytest.MonkeyPatch, config: Any, completed: bool, stopped_by: str = "", wandb: Any = None
) -> Any:
    """A run with nothing to start."""

    class Launcher(_Launcher):
        def __init__(self, *_: object) -> None:
            self._wandb, self.stopped_by = wandb, stopped_by

        async def run(self, signals: contextlib.ExitStack) -> dict[str, Any]:
            return {"steps": 0, "error": None, "completed": completed, "problems": []}

    monkeypatch.setattr(launched, "_Launcher", Launcher)
    ready = Checked(config, SimpleNamespace(train=None), [], {}, [])  # type: ignore[arg-type]
    monkeypatch.setattr(launched, "prepare", lambda *_: ready)
    monkeypatch.setattr(launched, "Start", SimpleNamespace(of=lambda *_: None))
    start = SimpleNamespace(notes=[], config={}, streams={}, earlier=Earlier())
    monkeypatch.setattr(launched, "goes_on_from", lambda *_: start)
    monkeypatch.setattr(launched, "keep_position", lambda *_: None)
    monkeypatch.setattr(launched, "describe", lambda *_: None)
    return launched.run(config, console=Console(quiet=True))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    return make_config(run={"name": "r", "steps": 1, "folder": tmp_path}, cluster={"type": "external"})


@pytest.mark.parametrize("completed", [True, False])
async def test_a_run_that_is_stopped_when_all_is_done_has_nothing_to_go_on_with(
    alone, monkeypatch, completed: bool
) -> None:
    run = running(monkeypatch, alone, completed, "SIGTERM")
    with contextlib.nullcontext() if completed else pytest.raises(Interrupted, match="stopped by SIGTERM"):
        assert (await run)["completed"]


async def test_a_run_whose_wandb_hangs_has_its_figures(alone, monkeypatch) -> None:
    closing, over = threading.Event(), threading.Event()

    def hang() -> None:
        closing.set()
        over.wait(600)

    wandb = SimpleNamespace(close=hang)
    run = asyncio.create_task(running(monkeypatch, alone, completed=True, wandb=wandb))
    try:
        assert await asyncio.to_thread(closing.wait, 60.0)
        assert json.loads((alone.run_dir / "summary.json").read_text())["steps"] == 0
        assert not run.done(), "the loop turns meanwhile"
    finally:
        over.set()
    await run


def test_a_card_or_page_that_cannot_be_written_is_said_and_no_more(tmp_path: Path) -> None:
    said: list[str] = []
    config = make_config(run={"folder": tmp_path}, student={"path": str(tmp_path)})
    (config.run_dir / "final" / "README.md").mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    summary: dict[str, Any] = {"steps": 1, "evaluations": [], "version": None, "seconds": {"distill": 1.0}}
    summary |= {key: {"tokens_total": 1} for key in ("train", "rollout")}
    launched.describe(config, summary, "", said.append)
    card, page = said
    assert card.startswith(f"no card in {config.run_dir / 'final'}: ")
    assert page.startswith("no report.html: ")
    launched.describe(config, summary, "SIGTERM", said.append)
    assert len(said) == 3, "a run that was stopped has no model to describe"


def test_figures_are_asked_for_in_a_file(tmp_path, capsys) -> None:
    assert left("audit", str(tmp_path), "--json", "") == 2
    assert "--json '.' is a folder: name a file" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2.0, "train/loss": 0.5}\n')
    (tmp_path / "timeline.jsonl").write_text(
        '{"role": "trainer", "what": "train", "start": 1.0, "end": 2.0}\n'
    )
    (tmp_path / "trace.json").mkdir()
    assert left("trace", str(tmp_path)) == 1
    assert capsys.readouterr().err == f"distill: {tmp_path / 'trace.json'}: Is a directory\n"


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        (4, "L000-v00000004 is saved: go on with --resume"),
        (5, "L000-v00000004 is saved, step 5 of the trainer, which outlasted run.grace_seconds"),
        (7, "L000-v00000004 is saved, steps 5 to 7 of the trainer, which outlasted run.grace_seconds"),
    ],
)
def test_a_run_that_is_stopped_says_which_checkpoint_is_saved(tmp_path, reached: int, said: str) -> None:
    config = make_config(run={"folder": str(tmp_path)})
    checkpoint(config.run_dir, Version(0, 4))
    with pytest.raises(Interrupted, match=f"stopped by SIGINT at step {reached}; .*{said}"):
        launched.check_end(config, {"error": "", "steps": reached, "problems": []}, "SIGINT")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_listens_to_it_is_named(number: int, capsys) -> None:
    assert guarded(lambda: signal.raise_signal(number)) == 128 + number
    assert f"distill: stopped by {signal.Signals(number).name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_seconds_are_those_of_the_later_of_two_files_and_altered_figures_stop_no_resume(
    name: str, tmp_path, caplog
) -> None:
    """A start that was killed counts, and wrote no summary."""
    line = {"step": 1, "time": 2.0, "lineage": 0, "perf/run_seconds": 7.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert earlier_starts(tmp_path) == ({"run_seconds": 7.0}, 7.0)
    for total, seconds in ((9.0, 9.0), (5.0, 7.0)):
        (tmp_path / "summary.json").write_text(json.dumps({"seconds": {"total": total}}))
        assert earlier_starts(tmp_path) == ({"run_seconds": 7.0}, seconds)
    (tmp_path / name).write_text('{"step"\n{"step": 2}\n')
    assert earlier_starts(tmp_path) == ({}, 0.0)
    assert name in caplog.text
    assert "the seconds of earlier starts are left out" in caplog.text
