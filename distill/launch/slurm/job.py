"""What a job's script becomes: one `distill` command, for as long as Slurm lets it, again and again.

    python -m distill.launch.slurm.job run RUN_DIR [--array NAME SCRIPT] -- CONFIG …
    python -m distill.launch.slurm.job replica RUN_DIR -- --index I

    USR1: the time is nearly over, or    → TERM to the command; when it has ended, the job is requeued, unless
      the job is preempted                 the run is complete
    TERM, such as scancel --batch        → TERM to the command, and that is the end
    the command ends                     → the job ends with its exit status; a replica that died is requeued

`run` goes on from the last checkpoint when there is one. The array of replicas lives as long as it does:
SCRIPT is submitted when it starts, and what is called NAME is cancelled when it stops.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from distill.launch.announce import EXIT_REPLACED
from distill.launch.run_folder import holds_run
from distill.registry import CONTROLLER_FILE

MODULE: Final = "distill.launch.slurm.job"
RUN, REPLICA = "run", "replica"
MOST_RESTARTS: Final = 10
"""Starts of a replica's job after which one that dies stays dead."""
_POLL_SECONDS: Final = 1.0
_DISTILL: Final = [sys.executable, "-P", "-m", "distill.cli.main"]


def main(arguments: Sequence[str]) -> int:
    """Run the command of a job; the job's exit status."""
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("kind", choices=[RUN, REPLICA])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--array", nargs=2, metavar=("NAME", "SCRIPT"), default=None)
    parser.add_argument("words", nargs="+")
    options = parser.parse_args(arguments)
    if options.kind == REPLICA:
        return _replica(options.run_dir, options.words)
    return _run(options.run_dir, options.words, options.array)


def _run(run_dir: Path, words: Sequence[str], array: Sequence[str] | None) -> int:
    def cancel() -> None:
        if array is not None:
            _slurm("scancel", f"--name={array[0]}")

    cancel()  # what a machine that failed left
    if array is not None:
        (run_dir / CONTROLLER_FILE).unlink(missing_ok=True)  # for replicas to wait until this start writes it
        if _slurm("sbatch", array[1]) != 0:
            return _said(f"the array of replicas cannot be submitted: see above, and {array[1]}", 1)
    resume = ["--resume"] if holds_run(run_dir) else []
    try:
        status, signals = follow([*_DISTILL, "run", *words, *resume], cancel)
    finally:
        cancel()
    unfinished = status != 0 and signal.SIGUSR1 in signals
    return _requeue(status) if unfinished else status


def _replica(run_dir: Path, words: Sequence[str]) -> int:
    while not (run_dir / CONTROLLER_FILE).is_file():  # the run is starting
        time.sleep(_POLL_SECONDS)
    status, signals = follow([*_DISTILL, "student", str(run_dir), *words])
    died = not signals and status != EXIT_REPLACED
    again = died and int(os.environ.get("SLURM_RESTART_COUNT", "0")) < MOST_RESTARTS
    return _requeue(status) if again or signal.SIGUSR1 in signals else status


def follow(command: Sequence[str], stopping: Callable[[], None] = lambda: None) -> tuple[int, list[int]]:
    """Run a command to its end; TERM and the first USR1 are TERM to it, and then `stopping` is called.

    Returns its status in the shell's way, and the signals that came meanwhile.
    """
    came: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: object) -> None:
        again = number == signal.SIGUSR1 and number in came
        came.append(number)
        if child is not None and not again:
            child.terminate()
            stopping()

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, stop)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    if came:  # before there was one
        child.terminate()
    status = child.wait()
    return status if status >= 0 else 128 - status, came


def _requeue(status: int) -> int:
    """Put this job back into the queue; Slurm ends this process then."""
    job = os.environ["SLURM_JOB_ID"]
    _said(f"job {job} goes back into the queue, and on from where it is")
    if _slurm("scontrol", "requeue", job) != 0:
        return _said("it cannot be requeued: submit its script again", status or 1)
    return status


def _slurm(*command: str) -> int:
    """Exit status of a command of Slurm's, which must not take this job's options for its own."""
    return subprocess.run(command, env=without_job(os.environ), check=False).returncode


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what Slurm says of the job in it."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_"))
    }


def _said(text: str, status: int = 0) -> int:
    """`status`, once `text` is in the job's log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
