"""What a run shows while it lasts: a panel in a terminal, elsewhere a line now and then.

    log, say, log lines of the process ──▶ queue ──▶ thread ──▶ panel, and lines above it

The thread alone prints, so neither a terminal that accepts no output nor an error in here holds up the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distill.buffer import rules
from distill.config import RunConfig
from distill.metrics.summary import clock, dropped_words
from sync.base import secrets

logger = logging.getLogger(__name__)
LINES_WITHOUT_TERMINAL: Final = 12
"""Over a whole run."""
WINDOW: Final = 40
"""Newest steps, over which rates and busy shares are taken."""
REFRESH_SECONDS: Final = 0.5
STILL_SECONDS: Final = 10.0
"""Without a step, after which the panel says what the run waits for."""
CLOSE_SECONDS: Final = 5.0
"""Longest wait at the end for a terminal that accepts no output."""
MOST_NAMES: Final = 8
DROPPED: Final = "rollout/dropped/"
"""Before the reason, in names of figures."""
BARS: Final = "▁▂▃▄▅▆▇█"
Status = Callable[[], Mapping[str, tuple[str, int]]]
"""Child process → its phase, and how often it was restarted."""
ROWS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "training": (
        ("learning rate {:.2g}", "train/lr"),
        ("{:,.0f} tokens/s", "tokens_per_second"),
        ("{:.0%} of generated tokens trained", "train/tokens_share"),
        ("reward {:.3f}", "train/reward_mean"),
    ),
    "age": (("mean {:.1f}", "buffer/age_mean"), ("bound {:.0f}", "buffer/age_limit")),
    "rollouts": (("{:.0f} in the buffer", "buffer/size"), ("{:.0f} in flight", "rollout/in_flight")),
    "weight sync": (
        ("step {:.0f}", "sync/step"),
        ("{:,.0f} bytes", "sync/bytes"),
        ("{:.2f} s", "sync/seconds"),
    ),
}
"""Row of the panel → how each of its figures is shown, and its name; one that is missing is left out."""
LINE: Final = (
    ("reverse KL {:.3f}", "train/reverse_kl"),
    ("reward {:.3f}", "train/reward_mean"),
    ("learning rate {:.2g}", "train/lr"),
    ("age {:.1f}", "buffer/age_mean"),
    ("waited {:.2f} s", "perf/wait_seconds"),
    ("{:,.0f} tokens/s", "tokens_per_second"),
    ("trained {:.0%}", "train/tokens_share"),
)
"""The same of the line of a step."""


class Logged(NamedTuple):
    """Figures of one step, "step" among them."""

    at: float
    """Monotonic seconds."""
    step: int
    figures: Mapping[str, float]


@dataclass
class Shown:
    """What is known of the run."""

    config: RunConfig
    status: Status = dict
    root: Callable[[], str] = str
    """What the run waits for at last, in words."""
    began: float = field(default_factory=time.monotonic)
    """Monotonic seconds; of a resumed run so long before its newest start as the earlier ones took."""
    steps: deque[Logged] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    """The newest, in order; one lineage's."""
    evaluation: str = ""

    def add(self, logged: Logged) -> None:
        """Add a step; one at or before the last begins anew, after a rollback."""
        if self.steps and logged.step <= self.steps[-1].step:
            self.steps.clear()
        self.steps.append(logged)

    def per_second(self, name: str) -> float | None:
        """Growth of a counter over the window; None: unknown."""
        first, last = self.steps[0], self.steps[-1]
        if first is last or name not in first.figures.keys() & last.figures.keys():
            return None
        return (last.figures[name] - first.figures[name]) / max(1e-9, last.at - first.at)

    def seconds_left(self) -> float | None:
        """Until the last step, at the window's pace; None: unknown."""
        pace = self.per_second("step")
        return (self.config.run.steps - self.steps[-1].step) / pace if pace else None


class ProgressDisplay:
    """A Sink that shows a run. Order: `start`, then `log` and `say` from any thread, then `close`."""

    def __init__(self, config: RunConfig, console: Console, earlier: float = 0.0) -> None:
        """`earlier`: seconds of the run's earlier starts."""
        self._console, self._shown = console, Shown(config, began=time.monotonic() - earlier)
        self._events: SimpleQueue[Logged | str | None] = SimpleQueue()
        self._every = max(1, config.run.steps // LINES_WITHOUT_TERMINAL)
        self._terminal = console.is_terminal and not console.is_dumb_terminal
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)

    def start(self, status: Status = dict, root: Callable[[], str] = str) -> None:
        """Begin to show; `status`: of the processes that were started for the run, `root`: see Shown."""
        self._shown.status, self._shown.root = status, root
        if not self._terminal and (names := status()):
            self.say(f"starting: {', '.join(names)}")
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._events.put(secrets.redact(text))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._events.put(Logged(time.monotonic(), step, figures))

    def close(self) -> None:
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def write(self, text: str) -> None:
        """For log handlers, which take this for their stream."""
        self.say(text.rstrip("\n"))

    def flush(self) -> None:
        """See `write`."""

    # --- the thread ---------------------------------------------------------------------------------------

    def _show(self) -> None:
        try:
            if self._terminal:
                self._live()
            else:
                while (event := self._events.get()) is not None:
                    self._handle(event)
        except Exception:  # edge of a thread
            logger.exception("the run goes on and is no longer shown here: see metrics.jsonl in its folder")
            while self._events.get() is not None:  # else they pile up for the rest of the run
                pass

    def _live(self) -> None:
        live = Live(
            self._panel(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        with self._log_lines_above(), live:
            refresh = time.monotonic() + REFRESH_SECONDS
            while True:
                try:
                    event = self._events.get(timeout=max(0.0, refresh - time.monotonic()))
                except Empty:
                    live.update(self._panel(), refresh=True)
                    refresh = time.monotonic() + REFRESH_SECONDS
                    continue
                if event is None:
                    return
                self._handle(event)

    @contextlib.contextmanager
    def _log_lines_above(self) -> Iterator[None]:
        """Have what is logged to the terminal, such as the last lines of a role that died, printed here."""
        stream = sys.stderr
        ours = [
            handler
            for handler in logging.getLogger().handlers
            if stream.isatty() and isinstance(handler, logging.StreamHandler) and handler.stream is stream
        ]
        for handler in ours:
            handler.setStream(self)
        try:
            yield
        finally:
            for handler in ours:
                handler.setStream(stream)

    def _handle(self, event: Logged | str) -> None:
        if isinstance(event, str):
            self._console.print(event, markup=False, highlight=False, soft_wrap=True)
        elif any(name.startswith("eval/") for name in event.figures):
            self._shown.evaluation = evaluation_line(event.step, event.figures)
            self._handle(self._shown.evaluation)
        else:
            self._shown.add(event)
            last = event.step == (steps := self._shown.config.run.steps)
            if not self._terminal and (event.step % self._every == 0 or last):
                rate, left = self._shown.per_second("train/tokens_total"), self._shown.seconds_left()
                self._handle(f"step {event.step}/{steps}  {step_line(event.figures, rate, left)}")

    def _panel(self) -> Panel:
        return panel(self._shown, time.monotonic(), "" if self._console.options.ascii_only else BARS)


def panel(shown: Shown, now: float, bars: str = BARS) -> Panel:
    """The panel at monotonic time `now`; `bars`: characters of the sparkline, from low to high."""
    run = shown.config.run
    rows, whole = Table.grid(padding=(0, 2)), Table.grid(expand=True)
    for name, text in _rows(shown, now, bars):
        if text:
            rows.add_row(Text(name, style="dim"), Text(text))
    whole.add_row(ProgressBar(run.steps, shown.steps[-1].step if shown.steps else 0))
    whole.add_row(rows)
    return Panel(whole, title=Text(run.name))


def _rows(shown: Shown, now: float, bars: str) -> Iterator[tuple[str, str]]:
    """(name, text); without a text nothing is known of it."""
    phases: dict[str, list[str]] = defaultdict(list)
    status = shown.status()
    for name, (phase, _) in status.items():
        phases[phase].append(name)
    starting = [*phases["starting"], *phases["restarting"]]
    progress = f"starting: {_listed(starting)}" if starting else "waiting for the first step"
    if shown.steps:
        newest, left = shown.steps[-1], shown.seconds_left()
        progress = f"step {newest.step} of {shown.config.run.steps}, {clock(now - newest.at)} ago"
        progress += "" if left is None else f", {clock(left)} left"
    yield "progress", f"{progress}, {clock(now - shown.began)} elapsed"
    last = shown.steps[-1].at if shown.steps else shown.began
    yield "stands still", shown.root() if now - last > STILL_SECONDS and not starting else ""
    if shown.steps:
        figures, rate = dict(shown.steps[-1].figures), shown.per_second("train/tokens_total")
        figures |= {"buffer/age_limit": rules(shown.config).bound.hard}
        figures |= {} if rate is None else {"tokens_per_second": rate}
        taught = bool(shown.config.teachers)
        name, learned = ("reverse KL", "train/reverse_kl") if taught else ("reward", "train/reward_mean")
        values = [step.figures[learned] for step in shown.steps if learned in step.figures]
        yield name, f"{values[-1]:.3f}  {sparkline(values, bars)}" if values else ""
        for name, parts in ROWS.items():
            yield name, ", ".join(_shown(figures, parts))
        yield "busy", _busy(shown)
    yield "evaluation", shown.evaluation
    restarts = sum(count for _, count in status.values())
    rows = [f"{phase}: {_listed(names)}" for phase, names in phases.items() if names]
    yield "processes", "; ".join([*rows, *([f"restarts: {restarts}"] if restarts else [])])


def _shown(figures: Mapping[str, float], parts: Iterable[tuple[str, str]]) -> list[str]:
    return [form.format(figures[name]) for form, name in parts if name in figures]


def _busy(shown: Shown) -> str:
    """Roles and the share of the window in which each worked, the busiest first."""
    prefix = "perf/busy_seconds/"
    shares = {
        name.removeprefix(prefix): share
        for name in shown.steps[-1].figures
        if name.startswith(prefix) and (share := shown.per_second(name)) is not None
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return _listed([f"{role} {min(1.0, max(0.0, share)):.0%}" for role, share in ordered])


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


def sparkline(values: Iterable[float], bars: str = BARS) -> str:
    """A bar per value, scaled from the least to the greatest; values that are not finite are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or not bars:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(bars[round((value - low) / span * (len(bars) - 1))] for value in finite)


def step_line(
    figures: Mapping[str, float], tokens_per_second: float | None, seconds_left: float | None = None
) -> str:
    """The main figures of one step."""
    rate = {"tokens_per_second": tokens_per_second} if tokens_per_second else {}
    parts = [
        *_shown({**figures, **rate}, LINE),
        dropped_words({n.removeprefix(DROPPED): c for n, c in figures.items() if n.startswith(DROPPED)}),
        "" if seconds_left is None else f"{clock(seconds_left)} left",
    ]
    return "  ".join(part for part in parts if part)


def evaluation_line(step: int, figures: Mapping[str, float]) -> str:
    """One evaluation, distinguishable from a step's own figures."""

    def of_each(first: str, last: str) -> list[str]:
        names = [name for name in figures if name.startswith(first) and name.endswith(last)]
        return [f"{name[len(first) : -len(last)]} {figures[name]:.3f}" for name in names]

    parts, passed = list[str](), figures.get("eval/pass_rate")
    if (value := figures.get("eval/reverse_kl")) is not None:
        sources = _listed(of_each("eval/source/", "/reverse_kl"))
        parts.append(f"reverse KL {value:.3f} nats per token" + (f" ({sources})" if sources else ""))
    if passed is not None:
        parts.append(f"pass rate {passed:.1%}")
    if (reward := figures.get("eval/reward")) not in (None, passed):
        parts.append(f"reward {reward:.3f}")
    parts += of_each("eval/", "/average")
    return f"step {step}, held out: {', '.join(parts)}"
