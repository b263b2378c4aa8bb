"""Sinks of metrics during a run: one small protocol, a JSONL file, wandb. `console` has the display."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from distill.config import RunConfig
from sync import secrets
from sync.jsonl import JsonLines

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Consumes figures by name. Called in the controller's loop: must not block for long, must not raise."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of one optimizer step, or of an evaluation of the version that it made."""
        ...

    def close(self) -> None:
        """Flush; called once, last."""
        ...


class MetricsFile:
    """One JSON object a line: {"step": …, "time": seconds since the epoch, name: figure, …}.

    A figure that is not finite, such as the loss of a skipped step, is null.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._lines.write({"step": step, "time": time.time(), **figures})

    def close(self) -> None:
        self._lines.close()


class Wandb:
    """A wandb run in the run's folder; a resumed run continues under the same id."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        tracking = config.tracking
        self._run = wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            name=config.run.name,
            id=config.run.name,
            resume="allow",
            tags=tracking.tags,
            mode=wandb_mode(config),
            dir=config.run_dir,
            config=secrets.hide(config.model_dump(mode="json")),
            settings=wandb.Settings(silent=True, save_code=False, disable_git=True, console="off"),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


def wandb_mode(config: RunConfig) -> Literal["online", "offline", "disabled"]:
    """The configured mode, but offline (with a warning) when online is asked for without an API key."""
    mode = config.tracking.wandb
    netrc = Path("~/.netrc").expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    if mode == "online" and not has_key:
        log.warning('tracking.wandb is "online" and there is no WANDB_API_KEY: recording offline instead')
        return "offline"
    return mode


def log_all(sinks: Sequence[Sink], step: int, figures: Mapping[str, Any]) -> None:
    """Log the figures that are numbers to every sink."""
    numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    for sink in sinks:
        sink.log(step, numbers)
