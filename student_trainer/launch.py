"""How the ranks are started: the deepspeed launcher's command line and environment, and how they are asked to stop.

Run the command in a session of its own. `ask_to_stop` reaches the ranks alone: they finish their step, save a
checkpoint and exit 0, and so does the launcher. A signal to the whole session also works, but then the launcher waits
30 seconds at most before it kills, and exits 1.
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
    """Which devices. Given a number alone, the launcher ignores CUDA_VISIBLE_DEVICES and takes the first ones."""
    visible = settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible or settings.hostfile is not None:
        return ["--num_accelerators", str(settings.ranks)]
    devices = visible.split(",")
    if len(devices) < settings.ranks:
        raise ConfigError(
            f"trainer.ranks is {settings.ranks} and CUDA_VISIBLE_DEVICES is {visible!r}: every rank needs a device"
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
    try:
        return "LOCAL_RANK" in process.environ() and process.ppid() != 1
    except psutil.Error:
        return False


def ask_to_stop(launcher: int) -> int:
    """Send SIGTERM to every rank below the launcher; how many there were."""
    ranks = ranks_of(launcher)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    return len(ranks)
