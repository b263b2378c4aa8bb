"""A role on its own: `distill student`, `teacher`, `environment`, `evaluator` and `train`.

Each function prepares one process, behind `use_folder`. A server that is told where the controller is
registers there and renews that for as long as it answers /health (`serve`):

    start ─▶ /health answers ─▶ register ─▶ renew ─▶ … ─▶ the server ends: leave, with its exit status
                                    └── replaced (410): end the server, exit EXIT_REPLACED

The controller is asked where it is again and again: one that was started elsewhere has written its new URL
into the run's folder. While it cannot be reached the server goes on. A server that is told nothing is what
the process becomes (`replace_process`), for a controller whose file has its URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Final, NoReturn
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.launch.preflight import prepare_role
from distill.launch.roles import Ports, server, trainer_process, url_of
from distill.launch.supervise import ChildSpec, guarded
from distill.registry import EXIT_REPLACED
from distill.topology import KINDS, process_of, processes
from sync.base.address import (
    TOKEN_FILE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    controller_url,
    is_loopback,
    own_address,
    token_from_environment,
)
from sync.base.errors import ConfigError, DistillError, Replaced
from sync.base.retry import retrying
from sync.base.settings import Placement
from sync.wire import ServerLease, ServerLeaves, ServerRegisters, Servers
from sync.wire.client import Peer

log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0

Controller = Callable[[], str]
"""Says where a run's controller is now: its URL. Raises ConfigError."""


def joining(config: RunConfig, folder: Path | None, url: str | None) -> tuple[RunConfig, Controller | None]:
    """The configuration for a server that registers, listening where the controller's network reaches it, and
    what says where the controller is.

    `folder`: of the run, when the role was given that; its token is used unless there is another. Raises
    ConfigError when neither it nor `url` says where the controller is; without both, nothing registers.
    """
    if folder is None and url is None:
        return config, None
    if folder is not None and (folder / TOKEN_FILE).is_file() and not os.environ.get(TOKEN_VARIABLE):
        os.environ.setdefault(TOKEN_FILE_VARIABLE, str(folder / TOKEN_FILE))
    run_dir = folder or config.run_dir

    def controller() -> str:
        return url or controller_url(run_dir)

    def note(error: BaseException) -> None:  # its name, or where it is, is known once it has been started
        log.warning("%s; asking again for run.start_seconds = %g s", error, config.run.start_seconds)

    pause, seconds = RETRY_SECONDS, config.run.start_seconds
    asking = retrying(ConfigError, within=seconds, first=pause, longest=pause, note=note)
    host = asking(lambda: own_address(controller()))

    def moved(_: str, place: Placement) -> Placement:
        return place.model_copy(update={"host": host}) if is_loopback(place.host) else place

    return config.with_places(moved), controller


def serve(config: RunConfig, child: ChildSpec, controller: Controller | None) -> NoReturn:
    """Become the server, or run and register it until it ends; leaves with its exit status."""
    if controller is None:
        replace_process(child)
    url = urlsplit(str(child.url))
    host = own_address(controller()) if is_loopback(url.hostname or "") else str(url.hostname)
    place = url_of(host, url.port or 0)
    run, token = config.run, token_from_environment()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(asyncio.run(run_registered(child, place, run.name, controller, token, run.grace_seconds)))


def replace_process(child: ChildSpec) -> NoReturn:
    """Become this process; never returns."""
    os.execvpe(child.argv[0], list(child.argv), {**os.environ, **child.env})


def serving(
    config: RunConfig, section: str, index: int = 0, port: int = 0, controller: Controller | None = None
) -> ChildSpec:
    """Server `index` of a section, listening as that says; at `port` unless that is 0. Raises ConfigError.

    `controller`: says to the evaluator where the servers without `urls` are.
    """
    process = process_of(config, section, index)
    config = prepare_role(config, process, registers=controller is not None)
    at = controller() if controller and section == "evaluation.placement" else None
    # held by the process that replaces this one
    return server(config, process, Ports(keep_through_exec=True, only=port), at)


def section_of(config: RunConfig, kind: str, name: str = "") -> str:
    """The section of what a command serves: `kind` of teachers, environments, evaluation.replica and
    evaluation.placement; "" as name stands for the only one. Raises ConfigError when there is none."""
    places = config.places()
    if kind in places:
        return kind
    if "{name}" not in KINDS[kind].command:
        reason = "evaluation is off" if kind == "evaluation.placement" else f"{kind} is not set"
        raise ConfigError(f"{reason} in this configuration: there is nothing to serve")
    names = [section.partition(".")[2] for section in places if section.startswith(f"{kind}.")]
    if not name and len(names) == 1:
        (name,) = names
    if name not in names:
        what = KINDS[kind].command.split()[0]
        raise ConfigError(f"--name {name!r} is no {what}: choose one of {', '.join(names) or 'none'}")
    return f"{kind}.{name}"


def train(config: RunConfig, controller_url: str, node: int = 0) -> ChildSpec:
    """The deepspeed launcher of this machine's ranks, talking to the controller at that URL.

    `node`: which of trainer.nodes this machine is. Raises ConfigError.
    """
    if not 0 <= node < config.trainer.nodes:
        raise ConfigError(
            f"--node {node}: trainer.nodes is {config.trainer.nodes}, and machines count from 0"
        )
    *_, process = processes(config)
    return trainer_process(prepare_role(config, process, registers=True), controller_url, node)


REGISTER_SECONDS: Final = 1.0
CALL_SECONDS: Final = 3.0
LEAVE_SECONDS: Final = 2.0


async def run_registered(
    child: ChildSpec, url: str, run: str, controller: Callable[[], str], token: str | None, grace: float
) -> int:
    """Run `child` and register it at `url` with the controller of `run`; its exit status, or EXIT_REPLACED.

    SIGTERM and SIGINT are for the child, which has `grace` seconds.
    """
    read_end, write_end = os.pipe()
    ending = asyncio.Event()
    registration = ServerRegisters(run=run, name=child.name, url=url, boot=token_hex(16))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    process = await guarded(child, read_end)
    tasks = [
        asyncio.create_task(process.wait()),
        asyncio.create_task(ending.wait()),
        asyncio.create_task(_registered(registration, controller, token)),
    ]
    exit_, _, registered = tasks
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    registered.cancel()
    replaced = None if registered.cancelled() or not registered.done() else registered.exception()
    if replaced is None:
        with contextlib.suppress(DistillError, TimeoutError):
            async with Peer(controller(), token, LEAVE_SECONDS) as peer:
                leaves = ServerLeaves(name=child.name, boot=registration.boot)
                await peer.call("/v1/servers/leave", leaves, Servers)
    else:
        log.error("%s", replaced)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    await asyncio.wait([exit_], timeout=grace)
    os.write(write_end, b"k")  # the guardian kills what is left
    status = await process.wait()
    return status if replaced is None else EXIT_REPLACED


async def _registered(
    registration: ServerRegisters, controller: Callable[[], str], token: str | None
) -> None:
    """Register while the server answers. Raises Replaced once another process has its name."""
    said = ""
    async with contextlib.AsyncExitStack() as closing:
        server = await closing.enter_async_context(Peer(registration.url))
        peer: Peer | None = None
        while True:
            pause = REGISTER_SECONDS
            line = f"{registration.name} does not answer {registration.url}/health yet"
            if await server.alive():
                try:
                    there = controller()
                    if peer is None or peer.url != there:
                        peer = await closing.enter_async_context(Peer(there, token, CALL_SECONDS))
                    pause = (await peer.call("/v1/servers", registration, ServerLease)).seconds / 3
                    place = f"{registration.name} at {registration.url}"
                    line = f"{place} is registered with the controller at {there}"
                except Replaced:
                    raise
                except DistillError as error:
                    line = f"{registration.name} is not registered: {error}"
            if line != said:
                log.warning("%s", line)
            said = line
            await asyncio.sleep(pause)
