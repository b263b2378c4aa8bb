"""Start the ranks, and ask them to stop, through the deepspeed launcher.

    python -m student_trainer.launch --world_info … --module student_trainer --config FILE

runs `deepspeed.launcher.launch`, which starts the ranks of one machine, in this process, with SIGTERM and
SIGINT blocked for itself and for its children. By default the launcher of a signal kills ranks that need 30
seconds and exits 1. Here a signal, to this process or to its group, reaches the ranks only, which unblock it
for themselves: they finish their step, save a checkpoint and exit 0, and so does the launcher. They leave
when the launcher is killed (`LAUNCHER` is its process id); when a rank dies of a signal, it ends by the same.

On several machines without ssh each has a launcher of its own, which is told where all ranks meet
(`--master_addr`): who starts it (`distill train`) has met the others at the controller.

With a hostfile this is `deepspeed.launcher.runner`, and its own behaviour stays: ranks stop when the
controller sends Stop. It starts them over ssh and passes only the environment variables of a list, on a
command line that every user of those machines can read. Settings travel that way; secrets do not.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # before numpy starts threads: one that does not block a signal would be given it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

import base64
import ctypes
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from student_trainer.config import TrainerConfig, TrainerSettings
from sync.base import secrets
from sync.base.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, is_loopback, own_address
from sync.base.errors import ConfigError
from sync.base.memory import sharing
from sync.base.own_code import CODE_VARIABLE
from sync.wire.server import ON_LOOPBACK, hold_port

log = logging.getLogger(__name__)
TITLE: Final = "distill trainer"
"""What a rank's process title begins with."""
LAUNCHER: Final = "STUDENT_TRAINER_LAUNCHER"  # its process id; not set with a hostfile
RENDEZVOUS: Final = "STUDENT_TRAINER_RENDEZVOUS"
"""Variable with the file at which the ranks of one machine meet, in a folder that only this user can enter.
Not set with a hostfile: they meet at a port, chosen anew at every start."""
HOSTFILE: Final = "--hostfile"
MEETING: Final = "--master_addr"
"""First argument of a launcher whose ranks meet those of other machines."""
_ENVIRONMENT_FILE: Final = "DS_ENV_FILE"  # of the deepspeed launcher: variables for the ranks
_INHERITED: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", TOKEN_FILE_VARIABLE, CODE_VARIABLE)
"""Variables of this process that ranks on other machines need too."""
_LOOK_SECONDS: Final = 0.3
_PR_SET_PDEATHSIG: Final = 1
_STOPPING: Final = {signal.SIGTERM, signal.SIGINT}


def command(
    config: TrainerConfig, path: Path, node: int = 0, meeting: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """(arguments, whole environment) that start every rank with the configuration at `path`.

    With several trainer.nodes: every rank of machine `node`; all meet at `meeting`, a URL. Raises ConfigError
    for a hostfile that would not work.
    """
    settings = config.trainer
    argv, interface = [sys.executable, "-m", "student_trainer.launch"], dict[str, str]()
    if settings.nodes > 1:
        assert meeting is not None, "machines have met before ranks are started"
        there, each = urlsplit(meeting), list[Sequence[object]]([range(settings.ranks)] * settings.nodes)
        each[node] = visible_devices(settings) or each[node]
        argv += [MEETING, str(there.hostname), "--master_port", str(there.port), *world(each, node)]
        interface = interface_towards(config.controller_url)
    elif settings.hostfile is not None:
        argv += [HOSTFILE, str(settings.hostfile), "--num_accelerators", str(settings.ranks)]
    else:
        argv += world([visible_devices(settings) or range(settings.ranks)])
    argv += ["--log_level", "warning", *settings.launcher_args]
    argv += ["--module", "student_trainer", "--config", str(path)]
    secret_env = secrets.environment(config.model_dump(mode="json"))
    on_loopback = ON_LOOPBACK if settings.hostfile is None and settings.nodes == 1 else {}
    environment = interface | os.environ | _fixed(settings) | on_loopback | settings.env | secret_env
    if settings.hostfile is not None:
        check_reach(settings.hostfile, config.controller_url, environment)
        names = [*_fixed(settings), *settings.env, *_INHERITED]
        passed = {name: environment[name] for name in names if name in environment}
        environment[_ENVIRONMENT_FILE] = str(write_environment(path.with_suffix(".env"), passed))
        if secret_env and names_others(settings.hostfile):
            places = ", ".join(json.loads(secret_env[secrets.VARIABLE]))
            raise ConfigError(
                f"trainer.hostfile names other machines, and {places} would be shown on the launcher's "
                "command line: leave it out and set the variable of the client that reads it "
                "(AWS_SECRET_ACCESS_KEY, HF_TOKEN, …) on each machine"
            )
    return argv, environment


def world(devices: Sequence[Sequence[object]], index: int = 0) -> list[str]:
    """Arguments of `deepspeed.launcher.launch` for machine `index`: devices of each machine, one a rank."""
    machines = {f"node-{i}": [str(device) for device in gpus] for i, gpus in enumerate(devices)}
    encoded = base64.urlsafe_b64encode(json.dumps(machines).encode()).decode()
    return ["--world_info", encoded, "--node_rank", str(index)]


def visible_devices(settings: TrainerSettings) -> list[str]:
    """One for each rank of this machine; empty: the accelerator's first. Raises ConfigError for too few."""
    visible = settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else []
    if devices and len(devices) < settings.ranks and settings.hostfile is None:
        raise ConfigError(
            f"trainer.ranks is {settings.ranks} and CUDA_VISIBLE_DEVICES is {visible!r}: "
            "every rank needs a device of its own"
        )
    return devices[: settings.ranks]


def _fixed(settings: TrainerSettings) -> dict[str, str]:
    """Variables that every rank is given, whatever this process has."""
    environment = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    devices = {} if settings.devices is None else {"CUDA_VISIBLE_DEVICES": settings.devices}
    return environment | sharing(settings.threads) | devices


# --- several machines ---------------------------------------------------------------------------------------


def read_hosts(hostfile: Path) -> set[str]:
    """Names of the machines in a DeepSpeed hostfile, whose syntax the launcher checks. Raises ConfigError.

    The launcher itself takes this machine alone when the file is missing.
    """
    try:
        lines = [line.partition("#")[0].split() for line in hostfile.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"trainer.hostfile {hostfile} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trainer.hostfile {hostfile} is no UTF-8 text: {error}") from None
    return {words[0] for words in lines if words}


def interface_towards(url: str) -> dict[str, str]:
    """Variables that keep gloo and NCCL on the network by which this machine reaches a server. Raises
    ConfigError when there is no way to it."""
    here = own_address(url)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == here for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def machines(settings: TrainerSettings) -> int:
    """How many have ranks. Raises ConfigError."""
    return settings.nodes if settings.hostfile is None else len(read_hosts(settings.hostfile))


def names_others(hostfile: Path) -> bool:
    """Whether it names other machines than this one. Raises ConfigError."""
    return not all(map(is_loopback, read_hosts(hostfile)))


def check_reach(hostfile: Path, controller_url: str, environment: Mapping[str, str]) -> None:
    """Refuse what ranks on other machines could not use."""
    if not names_others(hostfile):
        return
    if is_loopback(urlsplit(controller_url).hostname or ""):
        raise ConfigError(
            f"trainer.hostfile names other machines, and {controller_url} is this machine's loopback: set "
            "controller.host to an address that they reach (or controller.url)"
        )
    if environment.get(TOKEN_VARIABLE) and not environment.get(TOKEN_FILE_VARIABLE):
        raise ConfigError(
            f"trainer.hostfile names other machines, and {TOKEN_VARIABLE} does not reach them: put the token "
            f"into a file that every machine can read, mode 600, and set {TOKEN_FILE_VARIABLE} to its path"
        )


def write_environment(path: Path, variables: Mapping[str, str]) -> Path:
    """Write the variables that the launcher passes to every rank. Raises ConfigError for a secret."""
    for name, value in variables.items():
        if secrets.is_secret(name) or secrets.redact(value) != value:
            raise ConfigError(
                f"trainer.env.{name} looks like a secret, and the launcher would show it to every user: "
                "set it in the environment of each machine instead"
            )
        if "\n" in value:
            raise ConfigError(f"trainer.env.{name} has a line break, which the launcher cannot pass on")
    path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return path.absolute()


# --- a rank's process ---------------------------------------------------------------------------------------


def bind_to_launcher() -> None:
    """Receive the stop signals that the launcher blocked, and end when it, this process's parent, is gone."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        log.error("the launcher is gone, this rank leaves")
        os._exit(1)


def catch_stop_signals(stopping: threading.Event, local_ranks: int) -> threading.Event:
    """Set `stopping` at SIGTERM or SIGINT, even while the main thread is inside a collective.

        training ──signal──▶ stopping (the step ends, a checkpoint is saved) ──▶ finished
                                └── another rank of this machine is gone ──▶ exit 1 at once

    The launcher sends SIGTERM both to end a run in order and after a rank died; in the second case the others
    can never finish, and must not keep the machine. Returns `finished`: set it when everything is saved on
    every rank. Call it in the main thread.
    """
    finished, (pipe, writer) = threading.Event(), socket.socketpair()

    def watch() -> None:
        received = pipe.recv(1)
        log.warning("asked to stop by %s", signal.Signals(received[0]).name)
        stopping.set()
        while not finished.wait(_LOOK_SECONDS):
            alive = 0
            with suppress(psutil.Error):
                siblings = psutil.Process(os.getppid()).children()
                alive = sum(rank.status() != psutil.STATUS_ZOMBIE for rank in siblings)
            if alive < local_ranks:
                log.error("another rank ended, this one cannot go on")
                os._exit(1)

    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in _STOPPING:
        signal.signal(number, lambda *_: None)  # the thread acts: it needs no main thread
    threading.Thread(target=watch, name="signals", daemon=True).start()
    return finished


# --- the launcher's process ---------------------------------------------------------------------------------


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Rank processes below the launcher's process id, on this machine."""
    processes = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error):
                if any(part.startswith(("--local_rank=", TITLE)) for part in child.cmdline()):
                    processes.append(child)
    return processes


def _catch_for_ranks() -> None:
    """Forward every stop signal of this process to the ranks, from a thread."""

    def forward() -> None:
        while True:
            signal.sigwait(_STOPPING)
            while not (ranks := ranks_of(os.getpid())):  # they may still be being started
                time.sleep(_LOOK_SECONDS)
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.terminate()

    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    os.environ[LAUNCHER] = str(os.getpid())
    threading.Thread(target=forward, name="signals", daemon=True).start()


def main() -> None:
    """Run the deepspeed launcher with the arguments of this process; leaves with its exit status."""
    arguments = sys.argv[1:]
    try:
        if arguments[0] == HOSTFILE:
            from deepspeed.launcher import runner

            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            with hold_port("", 0) as reserved:  # for rank 0, where that is one of this machine
                runner.main(["--master_port", str(reserved.getsockname()[1]), *arguments])
            return
        _catch_for_ranks()
        with tempfile.TemporaryDirectory(prefix="student-trainer-") as folder:
            if arguments[0] != MEETING:
                os.environ[RENDEZVOUS] = f"file://{folder}/store"
            from deepspeed.launcher import launch

            launch.main()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code < 0:  # of a rank's process: the signal that it died of
            os.kill(os.getpid(), -end.code)
        raise


if __name__ == "__main__":
    main()
