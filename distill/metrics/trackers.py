"""Sinks of metrics during a run: one small protocol, a JSONL file, wandb."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from distill.config import RunConfig
from sync import secrets
from sync.errors import DistillError
from sync.jsonl import JsonLines
from sync.wire import RunIdentity

log = logging.getLogger(__name__)
TABLE_ROWS = 200
"""Of the newest samples, in wandb."""


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
        self.close = self._lines.close

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._lines.write({"step": step, "time": time.time(), **figures})


class Wandb:
    """A wandb run in the run's folder; a resumed run continues under the same id.

    Figures have `step` as their axis; what distill samples shows is logged as the table `samples` at the end.
    """

    def __init__(self, config: RunConfig, run: RunIdentity) -> None:
        import wandb

        tracking, name = config.tracking, config.run.name
        self._run_dir = config.run_dir
        self._run = wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            name=name,
            id=f"{name}-{run.id}",
            resume="allow",
            group=tracking.group,
            tags=tracking.tags,
            notes=tracking.notes,
            mode=wandb_mode(config),
            dir=config.run_dir,
            config=secrets.hide(config.model_dump(mode="json")),
            settings=wandb.Settings(silent=True, save_code=False, disable_git=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        try:
            self._log_samples()
        except DistillError as error:
            log.warning("wandb gets no samples: %s", error)
        self._run.finish()

    def _log_samples(self) -> None:
        import wandb

        from distill.metrics.samples import Decoder, read_samples, shaded

        if found := read_samples(self._run_dir)[-TABLE_ROWS:]:
            decoder = Decoder(self._run_dir)
            table = wandb.Table(
                ["version", "age", "reward", "reverse_kl", "prompt", "completion", "by_token"]
            )
            for one in found:
                text, tokens = decoder.text(one.tokens), wandb.Html(shaded(one, decoder))
                prompt = decoder.text(one.prompt)
                table.add_data(one.version, one.age, one.reward, one.reverse_kl, prompt, text, tokens)
            self._run.log({"samples": table})


def wandb_mode(config: RunConfig) -> Literal["online", "offline", "disabled"]:
    """The configured mode, but offline (with a warning) when online is asked for without an API key."""
    netrc = Path("~/.netrc").expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    if config.tracking.wandb == "online" and not has_key:
        log.warning('tracking.wandb is "online" and there is no WANDB_API_KEY: recording offline instead')
        return "offline"
    return config.tracking.wandb


def log_all(sinks: Sequence[Sink], step: int, figures: Mapping[str, Any]) -> None:
    """Log the figures that are numbers to every sink."""
    numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    for sink in sinks:
        sink.log(step, numbers)
