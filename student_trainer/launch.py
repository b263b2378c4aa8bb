"""How the ranks are started and asked to stop, through the deepspeed launcher.

    python -m student_trainer.launch --num_accelerators 2 … --module student_trainer --config FILE

runs the deepspeed launcher in this process, with SIGTERM and SIGINT blocked for itself and for its children.
Left alone, the launcher dies of a signal, and its child kills ranks that need 30 seconds and exits 1. Here a
signal, to this process or to its group, reaches the ranks only: they finish their step, save a checkpoint and
exit 0, and so does the launcher. Ranks unblock the signals for themselves (`heed_signals`).
They leave when the launcher is killed (`LAUNCHER` tells them who it is): its child, their parent, stays.
With a hostfile the launcher does as it does: ranks stop when the controller says so.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from student_trainer.config import TrainerConfig, TrainerSettings
from student_trainer.hostfile import ENVIRONMENT_VARIABLE, HERE, check_reach, read_hosts, write_environment
from sync import secrets
from sync.client import TOKEN_FILE_VARIABLE
from sync.errors import ConfigError
from sync.server import ON_LOOPBACK

_MODULE = "student_trainer"
_LOOK_SECONDS = 0.2
_STOPPING = {signal.SIGTERM, signal.SIGINT}
LAUNCHER = "STUDENT_TRAINER_LAUNCHER"
"""Environment variable with the launcher's process id; not set with a hostfile."""
_INHERITED: Final = ("OMP_WAIT_POLICY", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", TOKEN_FILE_VARIABLE)
"""Variables of this process that ranks on other machines need too."""
RENDEZVOUS: Final = "STUDENT_TRAINER_RENDEZVOUS"
"""Environment variable with the file at which the ranks of one machine meet, in a folder that only this user
can enter: nothing listens. Not set with a hostfile: they meet at a port, chosen anew at every start."""
TITLE = "distill trainer"
"""What a rank's process title begins with."""


def command(config: TrainerConfig, path: Path) -> tuple[list[str], dict[str, str]]:
    """(arguments, whole environment) that start every rank with the configuration at `path`.

    Raises ConfigError for a hostfile that would not work.
    """
    settings = config.trainer
    argv = [sys.executable, "-m", "student_trainer.launch"]
    argv += ["--hostfile", str(settings.hostfile or os.devnull), *_placement(settings)]
    argv += ["--log_level", "warning", *settings.launcher_args, "--module", _MODULE, "--config", str(path)]
    given = secrets.environment(config.model_dump(mode="json"))
    environment = _environment(settings) | given
    if settings.hostfile is not None:
        check_reach(settings.hostfile, config.controller_url, environment)
        names = [*_fixed(settings), *settings.env, *_INHERITED]
        told = {name: environment[name] for name in names if name in environment}
        environment[ENVIRONMENT_VARIABLE] = str(write_environment(path.with_suffix(".env"), told))
        if given and not set(read_hosts(settings.hostfile)) <= HERE:
            places = ", ".join(json.loads(given[secrets.VARIABLE]))
            raise ConfigError(
                f"trainer.hostfile names other machines, and {places} would be shown on the launcher's "
                "command line: leave it out and set the variable of the client that reads it "
                "(AWS_SECRET_ACCESS_KEY, HF_TOKEN, …) on each machine"
            )
    return argv, environment


def _placement(settings: TrainerSettings) -> list[str]:
    """Which devices. Given only a number, the launcher ignores CUDA_VISIBLE_DEVICES and takes the first."""
    visible = settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible or settings.hostfile is not None:
        return ["--num_accelerators", str(settings.ranks)]
    devices = visible.split(",")
    if len(devices) < settings.ranks:
        raise ConfigError(
            f"trainer.ranks is {settings.ranks} and CUDA_VISIBLE_DEVICES is {visible!r}: "
            "every rank needs a device of its own"
        )
    return ["--include", f"localhost:{','.join(devices[: settings.ranks])}"]


def _environment(settings: TrainerSettings) -> dict[str, str]:
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | _fixed(settings)
    if settings.hostfile is None:
        environment |= ON_LOOPBACK
    return environment | settings.env


def _fixed(settings: TrainerSettings) -> dict[str, str]:
    """Variables that every rank is given, whatever this process has."""
    environment = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = settings.devices
    return environment


def _free_port() -> int:
    """A port that was free a moment ago, for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Rank processes below the launcher's process id, on this machine."""
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank, before or after it took its title."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return any(part.startswith(("--local_rank=", TITLE)) for part in line)


def ask_to_stop(launcher: int) -> int:
    """Send SIGTERM to every rank below the launcher; how many there were."""
    ranks = ranks_of(launcher)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    return len(ranks)


def heed_signals() -> None:
    """Let a rank receive what its launcher blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _forward() -> None:
    """Hand every stop signal of this process on to the ranks, as soon as there are any."""
    while True:
        signal.sigwait(_STOPPING)
        while ask_to_stop(os.getpid()) == 0:
            time.sleep(_LOOK_SECONDS)


def main() -> None:
    """Run the deepspeed launcher with the arguments of this process; leaves with its exit status."""
    arguments = sys.argv[1:]
    if arguments[arguments.index("--hostfile") + 1] != os.devnull:
        _launch(["--master_port", str(_free_port()), *arguments])
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    os.environ[LAUNCHER] = str(os.getpid())
    threading.Thread(target=_forward, name="signals", daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="student-trainer-") as folder:
        os.environ[RENDEZVOUS] = f"file://{folder}/store"
        _launch(arguments)


def _launch(arguments: list[str]) -> None:
    from deepspeed.launcher import runner

    runner.main(arguments)


if __name__ == "__main__":
    main()
