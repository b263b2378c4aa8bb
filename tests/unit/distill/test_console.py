"""What a run shows while it lasts: the panel of a terminal, plain lines elsewhere, lines of logs."""

from __future__ import annotations

import io
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import left
from rich.console import Console
from small_config import make_config
from waiting import until

from distill.cli.main import role_lines
from distill.cli.options import working
from distill.launch.supervise import last_lines
from distill.metrics import console as module
from distill.metrics.console import (
    WINDOW,
    Logged,
    ProgressDisplay,
    Shown,
    evaluation_line,
    panel,
    sparkline,
    step_line,
)

CONFIG = make_config(run={"name": "toy", "steps": 120})


@pytest.fixture(autouse=True)
def an_ordinary_terminal(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def step(number: int) -> dict[str, float]:
    """Figures of a step, the controller's gauges among them."""
    return {
        "step": number,
        "train/reverse_kl": 1 / number,
        "train/lr": 2e-4,
        "buffer/age_mean": 1.5,
        "perf/wait_seconds": 0.25,
        "train/tokens_total": 1000.0 * number,
        "train/tokens_share": 0.9,
        "buffer/size": 12.0,
        "rollout/in_flight": 4.0,
        "perf/busy_seconds/trainer": 0.5 * number,
        "perf/busy_seconds/student-0": 1.75 * number,
        "sync/step": number - 1.0,
        "sync/bytes": 12345.0,
        "sync/seconds": 0.125,
    }


def text_of(shown: Shown, now: float) -> str:
    console = Console(record=True, force_terminal=True, width=160, file=io.StringIO())
    console.print(panel(shown, now))
    return console.export_text()


def test_the_panel_holds_the_figures_of_the_newest_steps() -> None:
    phases = {"student-0": ("ready", 2), "teacher-t": ("restarting", 1), "trainer": ("ready", 0)}
    shown = Shown(CONFIG, lambda: phases, began=0.0)
    for number in range(1, 61):
        shown.add(Logged(2.0 * number, number, step(number)))
    found = {"eval/reverse_kl": 0.5, "eval/pass_rate": 0.8, "eval/again/average": 0.25}
    shown.evaluation = evaluation_line(40, found)
    text = text_of(shown, 123.0)
    for line in (
        "step 60 of 120, 0:00:03 ago, 0:02:00 left, 0:02:03 elapsed",
        "learning rate 0.0002, 500 tokens/s, 90% of generated tokens trained",
        "mean 1.5, bound 2",
        "12 in the buffer, 4 in flight",
        "step 59, 12,345 bytes, 0.12 s",
        "student-0 88%, trainer 25%",
        "step 40, held out: reverse KL 0.500 nats per token, pass rate 80.0%, again 0.250",
        "ready: student-0, trainer; restarting: teacher-t; restarts: 3",
    ):
        assert line in text
    assert "0.017  █▇" in text
    assert len(shown.steps) == WINDOW + 1


def test_a_resumed_run_shows_the_time_of_its_earlier_starts_too(monkeypatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    display = ProgressDisplay(CONFIG, Console(file=io.StringIO()), earlier=3600.0)
    assert text_of(display._shown, 100.0).count(" 1:00:00 elapsed") == 1


def test_the_panel_says_what_a_run_waits_for_that_makes_no_step_for_ten_seconds() -> None:
    shown = Shown(CONFIG, root=lambda: "scoring waits 12 s for teacher t: 4 rollouts", began=0.0)
    shown.add(Logged(100.0, 1, step(1)))
    assert "stands still" not in text_of(shown, 109.0)
    assert "stands still  scoring waits 12 s for teacher t: 4 rollouts" in text_of(shown, 112.0)


def test_the_panel_names_what_the_run_waits_for_before_its_first_step() -> None:
    phases = {f"student-{i}": ("starting", 0) for i in range(10)} | {"trainer": ("ready", 0)}
    shown = Shown(CONFIG, lambda: phases, began=0.0)
    names = ", ".join(f"student-{i}" for i in range(8))
    assert f"starting: {names}, 2 more, 0:00:09 elapsed" in text_of(shown, 9.0)
    assert "waiting for the first step" in text_of(Shown(CONFIG), 0.0)


def test_after_a_rollback_the_window_begins_anew() -> None:
    shown = Shown(CONFIG)
    for at, number in enumerate((1, 2, 3, 2)):
        shown.add(Logged(at, number, step(number)))
    assert [one.step for one in shown.steps] == [2]
    assert (shown.per_second("step"), shown.seconds_left()) == (None, None)


def test_a_sparkline_goes_from_the_least_to_the_greatest_value() -> None:
    assert sparkline([1, 3, 2, float("nan"), 2.7]) == "▁█▅▇"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == sparkline([1, 2], "") == ""


class Terminal(io.StringIO):
    """stderr of a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_terminal_evaluations_and_log_lines_stay_above_the_panel(monkeypatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    console = Console(force_terminal=True, width=110, file=(shown := io.StringIO()))
    display = ProgressDisplay(CONFIG, console)
    try:
        display.start(lambda: {"trainer": ("ready", 0)})
        until(lambda: handler.stream is display)
        display.log(1, step(1))
        display.log(0, {"eval/reverse_kl": 1.25})
        logging.getLogger("distill").warning("teacher-t ended; the end of its log:\n    no such model")
        until(lambda: "step 1 of 120" in shown.getvalue())
    finally:
        display.close()
        logging.getLogger().removeHandler(handler)
    assert "step 0, held out: reverse KL 1.250 nats per token\n" in shown.getvalue()
    assert "the end of its log:\n    no such model\n" in shown.getvalue()
    assert handler.stream is sys.stderr is stderr
    assert stderr.getvalue() == ""


def test_elsewhere_a_run_prints_a_plain_line_now_and_then(monkeypatch) -> None:
    clock = map(float, range(1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.__next__))
    console = Console(file=(shown := io.StringIO()), width=20)
    display = ProgressDisplay(CONFIG, console)
    display.start(lambda: {"student-0": ("starting", 0), "trainer": ("starting", 0)})
    for number in range(1, 21):
        display.log(number, step(number))
    display.log(20, {"eval/reverse_kl": 0.5, "eval/pass_rate": 0.75})
    display.close()
    rest = "learning rate 0.0002  age 1.5  waited 0.25 s  1,000 tokens/s  trained 90%"
    assert shown.getvalue().splitlines() == [
        "starting: student-0, trainer",
        f"step 10/120  reverse KL 0.100  {rest}  0:01:50 left",
        f"step 20/120  reverse KL 0.050  {rest}  0:01:40 left",
        "step 20, held out: reverse KL 0.500 nats per token, pass rate 75.0%",
    ]


def test_an_error_of_the_panel_does_not_reach_the_run(caplog) -> None:
    def broken() -> dict[str, tuple[str, int]]:
        raise RuntimeError("no status")

    display = ProgressDisplay(CONFIG, Console(force_terminal=True, file=io.StringIO()))
    display.start(broken)
    until(lambda: "no longer shown" in caplog.text)
    display.log(1, step(1))
    display.say("on it goes")
    until(display._events.empty)  # what nobody shows does not pile up
    display.close()


def test_a_terminal_that_accepts_no_output_does_not_hold_up_the_run(monkeypatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    writing, accepts = threading.Event(), threading.Event()

    class Paused(io.StringIO):
        def write(self, text: str) -> int:
            writing.set()
            accepts.wait(600)
            return len(text)

    display = ProgressDisplay(CONFIG, Console(force_terminal=True, file=Paused()))
    display.start()
    assert writing.wait(600)
    display.log(1, step(1))
    display.close()
    accepts.set()
    display._thread.join(600)  # it puts sys.stdout back, which is another test's later
    assert not display._thread.is_alive()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_command_shows_its_stage_on_the_terminal_alone(monkeypatch, capsys, terminal: bool) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with working("distill evaluate") as say:
        say("starting [student-0]")
        print("figures")  # noqa: T201
        until(lambda: not terminal or "distill evaluate: starting [student-0]" in stderr.getvalue())
    assert terminal or stderr.getvalue() == ""
    assert capsys.readouterr().out == "figures\n"


def test_lines_for_people_hold_the_figures() -> None:
    more = {"train/tokens_share": 0.914, "rollout/dropped/too_old": 3.0, "rollout/dropped/straggler": 5.0}
    assert step_line(more, None) == "trained 91%  dropped 5 straggler, 3 too_old"
    learnt = {"train/reward_mean": 0.25, "train/lr": 3e-6}
    assert step_line(learnt, None) == "reward 0.250  learning rate 3e-06"
    by_source = {"eval/source/maths/reverse_kl": 0.2, "eval/source/code/reverse_kl": 0.7}
    more = {"eval/reverse_kl": 0.5, **by_source, "eval/pass_rate": 0.5, "eval/reward": 0.25}
    expected = "nats per token (maths 0.200, code 0.700), pass rate 50.0%, reward 0.250"
    assert evaluation_line(60, more).endswith(expected)
    assert "reward" not in evaluation_line(60, more | {"eval/reward": 0.5}), "it is the pass rate"


# --- `distill logs`: the last lines of every role's log, then those that follow


def test_lines_of_all_roles_or_of_one_stand_behind_the_roles_name(tmp_path, capsys) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "trainer.log").write_text("one\ntwo\nthree\n")
    (folder / "student-0.log").write_text("up\n")
    for words, expected in (
        ([], ["student-0    up", "trainer      two", "trainer      three"]),
        (["trainer"], ["trainer      two", "trainer      three"]),
    ):
        assert left("logs", str(tmp_path), *words, "-n", "2") == 0
        assert capsys.readouterr().out.splitlines() == expected
    assert left("logs", str(tmp_path), "teacher") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("logs holds no log of teacher: roles with a log are student-0, trainer")


def test_as_many_lines_as_are_asked_for_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("".join(f"{number} {'x' * 100}\n\n" for number in range(3000)))
    for count in (1, 150, 2999, 3000, 5000):
        numbers = [int(line.split()[0]) for line in last_lines(path, count)]
        assert numbers == [*range(3000)][-count:]
    assert last_lines(tmp_path / "none.log") == []


def test_whole_lines_follow_and_those_of_a_role_that_starts_later(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer.log"
    trainer.write_text("one\nhal")
    lines = role_lines(tmp_path, "", 1, follow=True)
    assert next(lines) == "trainer      hal"
    with trainer.open("a") as file:
        file.write("f\nthree\nfo")
    (tmp_path / "student-0.log").write_text("up\n")
    assert [next(lines) for _ in range(3)] == ["student-0    up", "trainer      f", "trainer      three"]
    with trainer.open("a") as file:
        file.write("ur\n")
    assert next(lines) == "trainer      four"
