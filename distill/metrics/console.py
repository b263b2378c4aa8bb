"""Progress on the console: one updating line of figures, or without a terminal a line now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sync.secrets import redact

LINES_WITHOUT_TERMINAL = 12
"""Over a whole run."""


class ProgressDisplay:
    """A Sink (see `trackers`) that shows the newest step's figures; evaluations stay on the screen."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting engines", total=steps, figures="")
        self._every = max(1, steps // LINES_WITHOUT_TERMINAL)
        self._began: tuple[float, float] | None = None
        self._bar.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(redact(text), markup=False, highlight=False, soft_wrap=True)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if "eval/reverse_kl" in figures:
            self.say(evaluation_line(step, figures))
            return
        line = step_line(figures, self._tokens_per_second(figures))
        self._bar.update(self._task, completed=step, description="distilling", figures=line)
        if not self._console.is_terminal and (step % self._every == 0 or step == self._steps):
            self.say(f"step {step}/{self._steps}  {line}")

    def close(self) -> None:
        self._bar.stop()

    def _tokens_per_second(self, figures: Mapping[str, float]) -> float | None:
        """Trained tokens per second since the first step that was seen."""
        now, trained = time.monotonic(), figures.get("tokens/trained", 0.0)
        if self._began is None:
            self._began = now, trained
            return None
        return (trained - self._began[1]) / max(1e-9, now - self._began[0])


def step_line(figures: Mapping[str, float], tokens_per_second: float | None) -> str:
    """The main figures of one step."""
    parts = [
        f"reverse KL {figures['reverse_kl']:.3f}" if "reverse_kl" in figures else "",
        f"age {figures.get('staleness/mean', 0.0):.1f}",
        f"waited {figures.get('seconds/wait', 0.0):.2f} s",
        f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second else "",
        f"trained {figures['tokens/trained_share']:.0%}" if "tokens/trained_share" in figures else "",
        dropped_words({name[8:]: count for name, count in figures.items() if name.startswith("dropped/")}),
    ]
    return "  ".join(part for part in parts if part)


def dropped_words(dropped: Mapping[str, float]) -> str:
    """Rollouts that were not trained on, by reason, most first; empty: none."""
    parts = [f"{count:.0f} {reason}" for reason, count in sorted(dropped.items(), key=lambda one: -one[1])]
    return f"dropped {', '.join(parts)}" if parts else ""


def evaluation_line(step: int, figures: Mapping[str, float]) -> str:
    """One evaluation, distinguishable from a step's own figures."""
    passed = figures.get("eval/pass_rate")
    rate = "" if passed is None else f", pass rate {passed:.1%}"
    return f"step {step}, held out: reverse KL {figures['eval/reverse_kl']:.3f} nats a token{rate}"
