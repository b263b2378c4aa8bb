"""How a run has ended: whether nothing is left to do, what its folder says of it, and what is raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distill.config import RunConfig
from distill.metrics.card import write_card
from distill.metrics.page import REPORT, write_page
from distill.metrics.results import read_summary
from student_trainer.checkpoint_files import CHECKPOINTS, choose
from sync.base.errors import DataError, DistillError, Interrupted, RemoteError
from sync.wire import Version


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a run that made all its steps and ended well; None: there is something left to do."""
    with suppress(OSError, DistillError, KeyError, TypeError):
        summary = read_summary(config.run_dir)
        ended_well = summary["completed"] and not summary["error"] and not summary["problems"]
        exported = config.controller.trainer != "launch" or (config.run_dir / "final").is_dir()
        if ended_well and exported and summary["steps"] >= config.run.steps:
            return summary
    return None


def describe(config: RunConfig, summary: dict[str, Any], stopped_by: str, say: Callable[[str], None]) -> None:
    """Write the card of the exported model, and the page; what cannot be written is said: the run is over."""
    folder, final = config.run_dir, config.run_dir / "final"
    try:
        if not stopped_by and final.is_dir():
            write_card(final, config, summary, summary["version"])
    except (OSError, DistillError) as error:
        say(f"no card in {final}: {error}")
    try:
        if summary["steps"] or summary["evaluations"]:
            write_page([folder], folder / REPORT)
    except (OSError, DistillError) as error:  # such as figures from before a resume, of an earlier version
        say(f"no {REPORT}: {error}")


def check(config: RunConfig, summary: dict[str, Any], stopped_by: str) -> None:
    """Raises RemoteError for a run that failed, Interrupted for one that was stopped."""
    if summary["error"]:
        raise RemoteError(f"{summary['error']}; fix it, then go on with --resume")
    if stopped_by:
        saved = _saved(config, summary["steps"])
        raise Interrupted(
            f"stopped by {stopped_by} at step {summary['steps']}; "
            + "; ".join([f"{saved}: go on with --resume", *summary["problems"]])
        )


def _saved(config: RunConfig, steps: int) -> str:
    """What a resume goes on from, and which steps a trainer that was killed makes again."""
    if config.controller.trainer != "launch" or not steps:
        return f"{config.run_dir} holds {'the run' if steps else 'no step yet'}"
    try:
        path = choose(config.run_dir / CHECKPOINTS).path
    except DataError as error:
        return str(error)
    step = Version.parse(path.name).step if path else 0
    again = f"step{'s' * (steps - step > 1)} {step + 1}" + f" to {steps}" * (steps - step > 1)
    rest = f", {again} of the trainer, which outlasted run.grace_seconds, will be made again" * (step < steps)
    return f"{path or 'no checkpoint'} is saved{rest}"
