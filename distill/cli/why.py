"""`distill why`: what a run waits for, asked of its controller; of a run that has ended, how it did."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Final

from distill.metrics.results import read_summary
from sync.base.address import controller_url, token_of_run
from sync.base.errors import ConfigError, RemoteError, Unreachable, WireError
from sync.wire import Why
from sync.wire.client import BlockingPeer

SECONDS: Final = 10.0
"""Limit of the controller's answer, which it has at once."""


def lines(run_dir: Path) -> list[str]:
    """What the run waits for, or how it ended. Raises ConfigError without a run, RemoteError when a run that
    has not ended does not answer."""
    if (run_dir / "summary.json").is_file():
        summary = read_summary(run_dir)
        end = summary["error"] or summary["stop_reason"]
        return [f"nothing: the run has ended at step {summary['steps']}: {end}"]
    if not (run_dir / "config.json").is_file():
        raise ConfigError(f"{run_dir} holds no run: name the folder of one")
    try:
        peer = BlockingPeer(controller_url(run_dir), token_of_run(run_dir), SECONDS)
        return peer.call("/v1/why", None, Why, SECONDS).lines
    except (Unreachable, WireError, ConfigError) as error:
        with (run_dir / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:  # its process is there, on this machine or another
                holder = lock.read().strip() or "unknown"
            else:
                end = "its process is gone and wrote no summary, as after a kill: go on with --resume"
                return [f"nothing: the run has ended: {end}"]
        raise RemoteError(
            f"process {holder} has the run in {run_dir} and its controller does not answer: look whether it "
            f"is stopped or starting, and at logs/ there; {error}"
        ) from None
