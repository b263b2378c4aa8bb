"""`distill slurm`: the scripts of a run's jobs, their submission, and the program that each of them becomes.

That program runs one `distill` command for as long as Slurm lets it, again and again:

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
import hashlib
import math
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from distill.config import RunConfig
from distill.config.cluster import SlurmCluster
from distill.launch.cluster import output_of
from distill.launch.roles import DISTILL
from distill.launch.run_folder import holds_run
from distill.launch.templates import filled
from distill.metrics.trackers import FINISH_SECONDS
from distill.preflight_checks.checks import check_keys
from distill.preflight_checks.placement import Node, needs, place, placed
from distill.registry import EXIT_REFUSED
from sync.base import durable
from sync.base.address import CONTROLLER_FILE, TOKEN_FILE, TOKEN_FILE_VARIABLE, token_from_environment
from sync.base.errors import ConfigError
from sync.base.secrets import redact

MODULE: Final = "distill.launch.slurm.job"
RUN, REPLICA = "run", "replica"
MOST_RESTARTS: Final = 10
"""Starts of a replica's job after which one that dies stays dead."""
_POLL_SECONDS: Final = 1.0
FOLDER: Final = "slurm"
"""The scripts' folder in the run's."""
SPARE_SECONDS: Final = 30
"""A warning comes so much earlier than run.grace_seconds."""
_LONGEST_WARNING: Final = 65535
"""Slurm takes no longer one."""
_TIME: Final = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_OURS: Final = ("--nodes", "-N", "--ntasks", "-n", "--gpus", "-G", "--gres", "--cpus-per", "-c")
"""Options of sbatch that other keys say. --gpus-per-node, moreover, gives every step all GPUs."""


def write(
    config: RunConfig, file: Path, overrides: Sequence[str], out: Path | None = None, resume: bool = False
) -> tuple[Path, list[str]]:
    """Write the scripts of the jobs that run `file` with `overrides`; the one to submit, and a line for each
    machine. Raises ConfigError.

    `out`: folder for them, for the token and the logs; None: FOLDER in the run's folder. All of it must be on
    a file system that the machines share.
    """
    cluster = _checked(config, overrides, resume)
    check_keys(config)
    *shown, _ = placed(config)[1]  # without the sum of GPUs
    folder = (out or config.run_dir / FOLDER).absolute()
    durable.make_folder(folder)
    token, name = _token_file(folder), f"distill-{config.run.name}"
    sets = [word for override in overrides for word in ("--set", override)]
    run = [RUN, str(config.run_dir)]

    def script(path: Path, name: str, words: Sequence[str], array: Mapping[str, int] | None = None) -> Path:
        text = filled(
            "job.sh.jinja",
            path=str(path),
            name=name,
            array=array,
            cluster=cluster,
            folder=folder,
            here=os.getcwd(),
            warning=warning_seconds(config, array is None),
            token=token,
            token_variable=TOKEN_FILE_VARIABLE,
            words=shlex.join([sys.executable, "-P", "-m", MODULE, *words]),
        )
        durable.write(path, text.encode(), mode=0o700)
        return path

    if cluster.replica_partition is not None:
        mark = hashlib.sha256(str(config.run_dir).encode()).hexdigest()[:8]
        array = f"{name}-replicas-{mark}"
        words = [REPLICA, str(config.run_dir), "--"]
        replicas = script(folder / "replicas.sh", array, words, _array(config, cluster))
        shown.append(f"partition {cluster.replica_partition}: {config.student.replicas} replicas")
        run += ["--array", array, str(replicas)]
    job = script(folder / "job.sh", name, [*run, "--", str(file.absolute()), *sets])
    return job, shown


def submit(script: Path) -> str:
    """Have Slurm queue a job; its id. Raises ConfigError or RemoteError."""
    return output_of("sbatch", "--parsable", str(script), timeout=None).strip().partition(";")[0]


def seconds_of(text: str) -> float:
    """Seconds of a time limit in Slurm's form, such as "90", "24:00:00" or "2-12". Raises ConfigError."""
    if text.lower() in ("unlimited", "infinite"):
        return math.inf
    if not (match := _TIME.fullmatch(text)):
        raise ConfigError(
            f"cluster.time = {text!r} is no time limit of Slurm's: write hours:minutes:seconds, such as "
            "24:00:00, or days-hours, such as 2-12"
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = [60, 1] if days is None and len(numbers) < 3 else [3600, 60, 1]
    return 86400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def warning_seconds(config: RunConfig, closes_wandb: bool) -> int:
    """How long before its time limit a job is told to end; the run's, not a replica's, may close wandb."""
    closing = FINISH_SECONDS if closes_wandb and config.tracking.wandb == "online" else 0.0
    return min(math.ceil(config.run.grace_seconds + closing) + SPARE_SECONDS, _LONGEST_WARNING)


def _checked(config: RunConfig, overrides: Sequence[str], resume: bool) -> SlurmCluster:
    cluster = config.cluster
    if not isinstance(cluster, SlurmCluster):
        raise ConfigError(
            f'cluster.type = "{cluster.type}": `distill slurm` writes jobs of Slurm; set it to "slurm"'
            ", or use `distill run`"
        )
    if (limit := seconds_of(cluster.time)) <= (warning := warning_seconds(config, True)):
        raise ConfigError(
            f"cluster.time = {cluster.time!r} is {limit:.0f} s, and the job is told to end {warning} s "
            "before that: allow more, or take a shorter run.grace_seconds, or tracking.wandb = "
            '"offline" if it is online'
        )
    if ours := [option for option in cluster.sbatch if option.startswith(_OURS)]:
        raise ConfigError(
            f"cluster.sbatch has {', '.join(ours)}: leave it out, cluster.nodes, gpus_per_node and "
            "cpus_per_node say it"
        )
    if shown := [override for override in overrides if redact(override) != override]:
        raise ConfigError(
            f"--set {redact(shown[0])} holds a secret, and everybody sees a job's command line: put it into "
            "the configuration file, or into the environment"
        )
    if holds_run(config.run_dir) and not resume:
        raise ConfigError(
            f"run folder {config.run_dir} holds a run already: go on with --resume, or choose "
            "another run.name"
        )
    return cluster


def _array(config: RunConfig, cluster: SlurmCluster) -> dict[str, int]:
    """The jobs of an array of replicas, and what each takes. Raises ConfigError when a machine of the
    partition does not hold one."""
    if config.student.urls:
        raise ConfigError(
            f"cluster.replica_partition = {cluster.replica_partition!r}, and student.urls names replicas "
            "that run already: leave one out"
        )
    need, *_ = needs(config.with_(cluster={"replica_partition": None}), cluster.gpus_per_node > 0)
    place([need], [Node(f"a machine of {cluster.replica_partition}", cluster.gpus_per_node, 0)])
    share = cluster.cpus_per_node * need.gpus // cluster.gpus_per_node if need.gpus else cluster.cpus_per_node
    return {"replicas": config.student.replicas, "cpus": max(share, 1), "gpus": need.gpus}


def _token_file(folder: Path) -> Path | None:
    """The bearer token's file, made unless there is one; None: the environment has the token itself."""
    if named := os.environ.get(TOKEN_FILE_VARIABLE):
        token_from_environment()  # raises when it cannot be read
        return Path(named).absolute()
    if token_from_environment():
        return None
    path = folder / TOKEN_FILE
    if not path.exists():
        durable.write(path, f"{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
    return path


# --- in the job


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
        status, signals = follow([*DISTILL, "run", *words, *resume], cancel)
    finally:
        cancel()
    unfinished = status != 0 and signal.SIGUSR1 in signals
    return _requeue(status) if unfinished else status


def _replica(run_dir: Path, words: Sequence[str]) -> int:
    while not (run_dir / CONTROLLER_FILE).is_file():  # the run is starting
        time.sleep(_POLL_SECONDS)
    status, signals = follow([*DISTILL, "student", str(run_dir), *words])
    died = not signals and status != EXIT_REFUSED
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
    ours = {name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))} - {"SLURM_CONF"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(command, env=env, check=False).returncode


def _said(text: str, status: int = 0) -> int:
    """`status`, once `text` is in the job's log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
