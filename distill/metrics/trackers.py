"""Sinks of metrics during a run: a protocol, a JSONL file, wandb, TensorBoard; a view of a wandb project."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from distill.config import RunConfig
from distill.metrics.names import SECTIONS
from sync.base import secrets
from sync.base.errors import ConfigError, RemoteError
from sync.base.jsonl import JsonLines
from sync.wire import RunIdentity, Version

log = logging.getLogger(__name__)
TABLE_ROWS = 200
"""Of the newest samples, in wandb."""
ALERT_SECONDS = 600.0
OPEN_SECONDS = 90.0
"""For wandb's server to take the run; then it is recorded offline."""
FINISH_SECONDS = 300.0
"""For the last figures to reach wandb; what they miss is in the run's folder."""
PANELS = {
    "Quality": ("eval/reverse_kl", "eval/pass_rate", "eval/reward", "train/reverse_kl", "train/reward_mean"),
    "Optimizer": ("train/lr", "train/grad_norm", "train/student_entropy", "train/truncation_rate"),
    "Off-policy": ("buffer/age_mean", "train/mismatch_kl", "train/effective_sample_size", "buffer/depth"),
    "Speed": ("train/tokens_total", "train/tokens_share", "perf/wait_seconds", "perf/train_seconds"),
    "Weight sync": ("sync/bytes", "sync/seconds", "sync/pause_seconds"),
}
"""Section of the view of a project → figures (`distill.metrics.names`), a curve over the steps for each."""


class Sink(Protocol):
    """Consumes figures by name. Called in the controller's loop: must not block for long, must not raise."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of one optimizer step, or of an evaluation of the version that it made."""
        ...

    def close(self) -> None:
        """Flush; called once, last. Only `Wandb` may block for long in it."""
        ...


class MetricsFile:
    """One JSON object a line: {"step": …, "lineage": …, "time": seconds since the epoch, name: figure, …}.

    A figure that is not finite, such as the loss of a skipped step, is null.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self.close = self._lines.close

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._lines.write({"step": step, "time": time.time(), **figures})


class Wandb:
    """A wandb run in the run's folder; its id is the run's, so a resume continues it and no namesake does.

    Figures have `step` as axis. What `distill samples` shows is the table `samples`, again after every
    `tracking.table_every` evaluations and at the end; the picture of the report (curves, activity of roles)
    is logged at the end. One thread of its own does all of it, in order; what fails there is a warning.

    What a server that cannot be reached does not take is in the run's folder, for `wandb sync`. Raises
    ConfigError for a key or settings that wandb refuses.
    """

    def __init__(self, config: RunConfig, run: RunIdentity) -> None:
        self._run_dir, self._evaluations = config.run_dir, 0
        self._every, self._worker = config.tracking.table_every, ThreadPoolExecutor(1, "wandb")
        self._run = _open(config, run)
        for axis in ("step", "lineage"):
            self._run.define_metric(axis, hidden=True)
        for section in SECTIONS:
            self._run.define_metric(f"{section}/*", step_metric="step")
        for name, kept in {"reverse_kl": "min", "pass_rate": "max", "reward": "max"}.items():
            self._run.define_metric(f"eval/{name}", step_metric="step", summary=f"{kept},last")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._later(self._run.log, {"step": step, **figures})
        if any(name.startswith("eval/") for name in figures):
            self._evaluations += 1
            if self._every and self._evaluations % self._every == 0:
                self._later(self._log_samples)

    def alert(self, title: str, text: str) -> None:
        """Notify whoever watches the run on wandb; of one title wandb sends one in ALERT_SECONDS."""
        self._later(self._run.alert, title, secrets.redact(text), "WARN", ALERT_SECONDS)

    def close(self) -> None:
        self._later(self._log_samples)
        self._later(self._log_report)
        self._later(self._run.finish)
        self._worker.shutdown()

    def _later(self, work: Callable[..., Any], *args: Any) -> None:
        def warn(done: Future[Any]) -> None:
            if error := done.exception():
                log.warning("wandb does not get everything: %s", error)

        self._worker.submit(work, *args).add_done_callback(warn)

    def _log_samples(self) -> None:
        import wandb

        from distill.metrics.samples import decoder, read_samples, shaded

        if samples := read_samples(self._run_dir)[-TABLE_ROWS:]:
            decode = decoder(self._run_dir)
            columns = ["version", "age", "reward", "reverse_kl"]
            table = wandb.Table([*columns, "prompt", "completion", "by_token"])
            for sample in samples:
                texts = [decode(sample.prompt), decode(sample.tokens)]
                figures = [getattr(sample, column) for column in columns]
                table.add_data(*figures, *texts, wandb.Html(shaded(sample, decode)))
            self._run.log({"samples": table})

    def _log_report(self) -> None:
        import wandb

        from distill.metrics.page import draw
        from distill.metrics.results import read_run

        if (self._run_dir / "metrics.jsonl").is_file():
            self._run.log({"report": wandb.Image(str(draw(read_run(self._run_dir))))})


def _open(config: RunConfig, run: RunIdentity) -> Any:
    """The wandb run; offline, with a warning, when the server does not take it."""
    import wandb

    from distill.metrics.summary import git_state, versions

    tracking, name, mode = config.tracking, config.run.name, wandb_mode(config)
    settings = wandb.Settings(
        silent=True,
        save_code=False,
        disable_git=True,
        console="off",
        init_timeout=OPEN_SECONDS,
        finish_timeout=FINISH_SECONDS,
    )

    def init(mode: Literal["online", "offline", "disabled"]) -> Any:
        return wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            name=name,
            id=f"{name}-{run.id}",
            resume="allow",
            group=tracking.group,
            tags=tracking.tags,
            notes=tracking.notes,
            mode=mode,
            dir=config.run_dir,
            config=secrets.hide(config.model_dump(mode="json"))
            | {"git": git_state(), "versions": versions()},
            settings=settings,
        )

    try:
        return init(mode)
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        raise ConfigError(
            f"wandb refuses the run: {error}; correct WANDB_API_KEY or [tracking], or set tracking.wandb = "
            '"offline"'
        ) from None
    except wandb.errors.CommError as error:
        log.warning(
            "wandb does not take the run (%s): recording offline in %s; send it later with `wandb sync`",
            error,
            config.run_dir / "wandb",
        )
        wandb.teardown()  # its service still holds the id
        return init("offline")


def save_overview(config: RunConfig) -> str:
    """Save a view of PANELS in the project that `[tracking]` names, a new one each time; its URL.

    Raises ConfigError without the package or a key, RemoteError when wandb does not take it.
    """
    try:
        import wandb
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser
    except ImportError:
        raise ConfigError(
            "an overview needs the package wandb-workspaces: pip install 'onpolicy-distill[overview]'"
        ) from None
    panels = {
        name: [LinePlot(x="step", y=[metric], title=metric) for metric in of] for name, of in PANELS.items()
    }
    panels["Samples and report"] = [MediaBrowser(media_keys=["samples"]), MediaBrowser(media_keys=["report"])]
    sections = [workspaces.Section(name=name, panels=of, is_open=True) for name, of in panels.items()]
    tracking = config.tracking
    try:
        wandb.setup(wandb.Settings(silent=True))
        entity = tracking.entity or wandb.Api().default_entity
        view = workspaces.Workspace(
            name="Overview", entity=entity, project=tracking.project, sections=sections
        )
        return str(view.save().url)
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ConfigError(f"wandb refuses the view: {error}; correct WANDB_API_KEY or [tracking]") from None
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise RemoteError(f"wandb does not take the view: {error}") from None


class TensorBoard:
    """A Sink: event files in `tensorboard/` of the run's folder, for `tensorboard --logdir`.

    A new lineage begins with a session start, for which TensorBoard drops what it holds of that step and of
    later ones: steps that a resume or a rollback does again show once.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open = partial(EventFileWriter, str(folder))
        self._writer, self._lineage = self._open(), 0.0

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        events, now = [], time.time()
        if figures["lineage"] > self._lineage:
            start = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=now, step=step, session_log=start))
        values = [Summary.Value(tag=name, simple_value=figure) for name, figure in figures.items()]
        events.append(Event(wall_time=now, step=step, summary=Summary(value=values)))
        try:
            self._writer = self._writer or self._open()
            for event in events:
                self._writer.add_event(event)
            self._lineage = max(self._lineage, figures["lineage"])
        except OSError as error:  # its thread has ended: what it held is lost
            log.warning("TensorBoard does not get everything up to step %d: %s", step, error)
            self._writer = None

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            log.warning("TensorBoard does not get everything: %s", error)


def wandb_mode(config: RunConfig) -> Literal["online", "offline", "disabled"]:
    """The configured mode, but offline (with a warning) when online is asked for without an API key.

    A key is in the environment or in a netrc file; wandb itself refuses a malformed one.
    """
    if config.tracking.wandb != "online" or os.environ.get("WANDB_API_KEY"):
        return config.tracking.wandb
    import wandb
    from wandb.sdk.lib.wbauth import read_netrc_auth

    try:
        if read_netrc_auth(host=wandb.setup().settings.base_url) is not None:
            return "online"
    except wandb.errors.AuthenticationError:
        return "online"
    except UnicodeDecodeError:
        log.debug("the netrc file is no text")
    log.warning('tracking.wandb is "online" and there is no WANDB_API_KEY: recording offline instead')
    return "offline"


def log_all(sinks: Sequence[Sink], version: Version, figures: Mapping[str, Any]) -> None:
    """Log the figures that are numbers, and the version's lineage, to every sink."""
    numbers = {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
    for sink in sinks:
        sink.log(version.step, {"lineage": version.lineage, **numbers})
