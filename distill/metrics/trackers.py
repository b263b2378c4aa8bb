"""Where figures go while a run goes on: one small protocol, a file, a display, wandb."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from distill.config import RunConfig
from distill.metrics.timeline import Span
from sync import secrets
from sync.durable import append

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes figures by name. Called in the controller's loop: must not block for long, must not raise."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of one optimizer step, or of an evaluation of the version that it made."""
        ...

    def close(self) -> None:
        """Write what is left; called once, last."""
        ...


class Lines:
    """A file that grows by whole lines; a last one that a crash cut off is removed.

    What a full disk refuses is kept and written with the next line; what it still refuses at the end is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, b""
        if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)

    def write(self, line: str) -> None:
        """Append one line, given without its end."""
        self._waiting += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what waits, if there is room."""
        if self._waiting and append(self._path, self._waiting):
            self._waiting = b""

    def close(self) -> None:
        """Try for the last time."""
        self.flush()
        if self._waiting:
            log.error("disk full: %d bytes of %s are lost", len(self._waiting), self._path)


class JsonLines:
    """One JSON object a line: {"step": …, "time": seconds since the epoch, name: figure, …}.

    A figure that is not finite, as the loss of a step that was left out, is null: JSON has no NaN.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._lines.write(json.dumps({"step": step, "time": time.time(), **finite}))

    def close(self) -> None:
        self._lines.close()


class Spans:
    """timeline.jsonl: one JSON object a line with role, what, start, end (seconds since the epoch)."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def write(self, span: Span) -> None:
        """Append one stretch of work or waiting."""
        self._lines.write(json.dumps(span._asdict()))

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()


class Memory:
    """Keeps everything; for tests and notebooks."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.lines.append((step, dict(figures)))

    def close(self) -> None:
        self.closed = True


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
    """online only with a key; says so when it is turned down."""
    mode = config.tracking.wandb
    netrc = Path("~/.netrc").expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    if mode == "online" and not has_key:
        log.warning('tracking.wandb is "online" and there is no WANDB_API_KEY: recording offline instead')
        return "offline"
    return mode


def log_all(sinks: Sequence[Sink], step: int, figures: Mapping[str, Any]) -> None:
    """Give the figures that are numbers to every sink."""
    numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    for sink in sinks:
        sink.log(step, numbers)
