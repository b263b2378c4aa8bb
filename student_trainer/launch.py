"""How the ranks are started (the deepspeed launcher's command line and environment) and asked to stop.

Run the command in a session of its own. `ask_to_stop` reaches the ranks alone: they finish their step, save
a checkpoint and exit 0, and so does the launcher. A signal to the whole session also works, but then the
launcher exits 1, and kills ranks that need more than 30 seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import psutil

from student_trainer.config import TrainerConfig, TrainerSettings
from sync.errors import ConfigError

_MODULE = "student_trainer"
TITLE = "distill trainer"
"""What a rank's process title begins with."""


def command(config: TrainerConfig, path: Path) -> tuple[list[str], dict[str, str]]:
    """(arguments, whole environment) that start every rank with the configuration at `path`."""
    settings = config.trainer
    argv = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if settings.hostfile is None:
        argv += ["--hostfile", os.devnull]
    else:
        argv += ["--hostfile", str(settings.hostfile)]
    argv += [*_placement(settings), "--master_port", str(_free_port()), "--log_level", "warning"]
    argv += [*settings.launcher_args, "--module", _MODULE, "--config", str(path)]
    return argv, _environment(config)


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


def _environment(config: TrainerConfig) -> dict[str, str]:
    settings = config.trainer
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment |= {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = settings.devices
    return environment | settings.env


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
