"""A role on its own: `distill student`, `teacher`, `environment`, `evaluator` and `train`.

Each function prepares one process, behind `use_folder`. A server that is told where the controller is, and
each machine of the trainer, register there and renew that (`run_registered`, `run_machine`):

    server      start ─▶ /health answers ─▶ register ─▶ renew ─▶ … ─▶ it ends: leave, with its exit status
                  └── refused                     └── replaced (410): end it, exit EXIT_REFUSED
    machine     register ─▶ all are there ─▶ start the ranks ─▶ renew ─▶ … ─▶ they end well: leave
                  └── refused                               └── another machine is lost (410): kill them

The controller is asked where it is again and again: one that was started elsewhere has written its new URL
into the run's folder. While it cannot be reached the process goes on. A refusal, though, ends a process that
was never admitted, before it loads anything. A server that is told nothing, for a controller whose file has
its URL, registers nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import msgspec

from distill.aio import cancel
from distill.config import RunConfig
from distill.launch.preflight import prepare_role
from distill.launch.roles import Ports, server, trainer_process, url_of
from distill.launch.supervise import ChildSpec, guarded
from distill.registry import EXIT_REFUSED, machine_name
from distill.topology import KINDS, process_of, processes
from student_trainer.launch import visible_devices
from sync.base.address import (
    TOKEN_FILE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    controller_url,
    is_loopback,
    own_address,
    token_from_environment,
)
from sync.base.errors import (
    ConfigError,
    DistillError,
    Overloaded,
    RemoteError,
    Replaced,
    Unreachable,
    WireError,
    WrongServer,
)
from sync.base.retry import retrying
from sync.base.settings import Placement
from sync.wire import ServerLease, ServerLeaves, ServerRegisters, Servers
from sync.wire.client import Peer
from sync.wire.peers import Role, wrong
from sync.wire.server import hold_port

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
    """Run a server until it ends, registered with the controller if there is one; leaves with its status."""
    url, lease = urlsplit(str(child.url)), None
    if controller is not None:
        host = own_address(controller()) if is_loopback(url.hostname or "") else str(url.hostname)
        lease = Lease(config.run.name, child.name, url_of(host, url.port or 0), controller)
    _leave_with(run_registered(child, lease, config.run.grace_seconds))


def serving(
    config: RunConfig, section: str, ports: Ports, index: int = 0, controller: Controller | None = None
) -> ChildSpec:
    """Server `index` of a section, listening as that says. Raises ConfigError.

    `controller`: says to the evaluator where the servers without `urls` are.
    """
    process = process_of(config, section, index)
    config = prepare_role(config, process, registers=controller is not None)
    at = controller() if controller and section == "evaluation.placement" else None
    return server(config, process, ports, at)


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


def prepare_train(config: RunConfig, node: int = 0) -> RunConfig:
    """The configuration of this machine's ranks. `node`: which of trainer.nodes it is. Raises ConfigError."""
    if not 0 <= node < config.trainer.nodes:
        raise ConfigError(
            f"--node {node}: trainer.nodes is {config.trainer.nodes}, and machines count from 0"
        )
    visible_devices(config.trainer)  # refused before others wait for this machine
    *_, process = processes(config)
    return prepare_role(config, process, registers=True)


def train(config: RunConfig, controller: Controller, node: int = 0) -> NoReturn:
    """Run this machine's ranks, once all of the trainer's are there; leaves with their exit status."""
    config = prepare_train(config, node)
    here = own_address(controller())
    gang = Gang(config.trainer.nodes, config.trainer.init_timeout_seconds)

    def launcher(meeting: str) -> ChildSpec:
        return trainer_process(config, controller(), node, meeting)

    with hold_port(here, 0) as meeting:  # rank 0 listens there only once its imports are over
        place = url_of(here, meeting.getsockname()[1])
        lease = Lease(config.run.name, machine_name(node), place, controller)
        _leave_with(run_machine(launcher, lease, gang, config.run.grace_seconds))


def _leave_with(work: Coroutine[Any, Any, int]) -> NoReturn:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(asyncio.run(work))


# --- leases -------------------------------------------------------------------------------------------------


WAITED_FOR: Final = (ConfigError, Overloaded, Unreachable)
"""No file says where the controller is, another process has the name, the controller does not answer."""
REGISTER_SECONDS: Final = 1.0
CALL_SECONDS: Final = 3.0
LEAVE_SECONDS: Final = 2.0


class Lease:
    """The registration of this process with the controller of `run`, as `name`."""

    def __init__(self, run: str, name: str, url: str, controller: Controller) -> None:
        """`url`: what the controller is told, as `ServerRegisters` has it."""
        self.name, self.url = name, url
        self._says = ServerRegisters(run=run, name=name, url=url, boot=token_hex(16))
        self._controller, self._token = controller, token_from_environment()

    async def ask(self, peer: Peer, url: str | None) -> ServerLease:
        """Register at `url` with the controller; None: ask whether it admits this process. Raises
        WrongServer where no controller answers, and whatever that answers."""
        says = msgspec.structs.replace(self._says, url=url)
        try:
            return await peer.call("/v1/servers", says, ServerLease)
        except (RemoteError, WireError):
            if problem := await wrong(peer.url, Role.CONTROLLER):
                raise WrongServer(problem) from None
            raise

    async def keep(
        self,
        told: Callable[[ServerLease], str] = lambda _: "",
        ready: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Register whenever this process is `ready`, and renew that; never returns.

        `told` hears each answer and says what it lacks, for which this registers soon and not at a third of
        the lease. Raises Replaced where another process has the name, any other refusal until the controller
        has admitted this process, and whatever `told` raises.
        """
        said, peer, admitted = "", None, False
        async with contextlib.AsyncExitStack() as closing:
            while True:
                pause, line = REGISTER_SECONDS, f"{self.name} does not answer {self.url}/health yet"
                if not admitted or ready is None or await ready():
                    try:
                        there = self._controller()
                        if peer is None or peer.url != there:
                            peer = await closing.enter_async_context(Peer(there, self._token, CALL_SECONDS))
                        lease = await self.ask(peer, self.url if admitted else None)
                    except DistillError as error:
                        if isinstance(error, Replaced) or not (admitted or isinstance(error, WAITED_FOR)):
                            raise
                        line = f"{self.name} is not registered: {error}"
                    else:
                        if not admitted:
                            admitted = True
                            continue
                        line = f"{self.name} at {self.url} is registered with the controller at {there}"
                        if lacks := told(lease):
                            line = f"{line}; {lacks}"
                        else:
                            pause = lease.seconds / 3
                if line != said:
                    log.warning("%s", line)
                said = line
                await asyncio.sleep(pause)

    async def leave(self) -> None:
        """Tell the controller, where it can be reached, that this process is not to be missed."""
        with contextlib.suppress(DistillError, TimeoutError):
            async with Peer(self._controller(), self._token, LEAVE_SECONDS) as peer:
                await peer.call("/v1/servers/leave", ServerLeaves(self.name, self._says.boot), Servers)


class Gang:
    """The trainer's machines, as the answers to one of them name them."""

    def __init__(self, nodes: int, seconds: float) -> None:
        """`seconds`: most that all may take to meet."""
        self.nodes, self.seconds = nodes, seconds
        self.met = asyncio.Event()
        self.places: list[str | None] = []
        """URL of each when all met."""

    def told(self, lease: ServerLease) -> str:
        """Note an answer; who is missing, empty: nobody. Raises ConfigError for another number of machines,
        Replaced where one has been started again: a controller that starts anew knows of none before."""
        if len(lease.gang) != self.nodes:
            raise ConfigError(
                f"trainer.nodes is {self.nodes} here and {len(lease.gang)} at the controller: give both "
                "the same configuration"
            )
        missing = [index for index, url in enumerate(lease.gang) if url is None]
        before = self.places or lease.gang
        if others := [i for i, url in enumerate(lease.gang) if url not in (None, before[i])]:
            raise Replaced(f"machines {others} of the trainer were started again: all ranks start again")
        if not missing:
            self.places = lease.gang
            self.met.set()
        return f"machines {missing} of the trainer have not registered" if missing else ""


async def run_registered(child: ChildSpec, lease: Lease | None, grace: float) -> int:
    """Run a server, and register it while it answers; its exit status, or EXIT_REFUSED.

    Signals to end are for the child, which has `grace` seconds.
    """
    ended, (read_end, write_end) = _stop_signals(), os.pipe()
    process = await guarded(child, read_end)
    refused: BaseException | None = None
    exit_ = asyncio.create_task(process.wait())
    if lease is None:
        await asyncio.wait([exit_, ended], return_when=asyncio.FIRST_COMPLETED)
    else:
        async with Peer(lease.url) as server:
            renewing = asyncio.create_task(lease.keep(ready=server.alive))
            await asyncio.wait([exit_, ended, renewing], return_when=asyncio.FIRST_COMPLETED)
            refused = renewing.exception() if renewing.done() else None
            await cancel([renewing])
        if refused is None:
            await lease.leave()
        else:
            log.error("%s", refused)
    _terminate(process)
    await asyncio.wait([exit_], timeout=grace)
    os.write(write_end, b"k")  # the guardian kills what is left
    status = await process.wait()
    return status if refused is None else EXIT_REFUSED


async def run_machine(launcher: Callable[[str], ChildSpec], lease: Lease, gang: Gang, grace: float) -> int:
    """Meet the trainer's other machines, if any, and run this one's ranks for as long as all are there; the
    status of their launcher; where it was not started a signal's, EXIT_REFUSED of a refusal, else 1.

    `launcher`: of ranks that meet at a URL. Signals to end are for them, and they have `grace` seconds.
    """
    ended, (read_end, write_end), status = _stop_signals(), os.pipe(), 1
    met, renewing = tasks = [asyncio.create_task(work) for work in (gang.met.wait(), lease.keep(gang.told))]
    await asyncio.wait([*tasks, ended], timeout=gang.seconds, return_when=asyncio.FIRST_COMPLETED)
    if met.done() and not ended.done():
        process = await guarded(launcher(str(gang.places[0])), read_end)
        exit_ = asyncio.create_task(process.wait())
        await asyncio.wait([exit_, ended, renewing], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            _terminate(process)
            await asyncio.wait([exit_, renewing], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        os.write(write_end, b"k")  # ranks could wait for those of a machine that is gone
        status = await exit_
    elif renewing.done():
        status = EXIT_REFUSED
    elif ended.done():
        status = ended.result()
    else:
        log.error(
            "not all machines of the trainer (trainer.nodes = %d) registered within "
            "trainer.init_timeout_seconds = %g s", gang.nodes, gang.seconds,
        )  # fmt: skip
    if renewing.done():
        log.error("%s", renewing.exception())
    await cancel(tasks)
    if status == 0 or gang.nodes == 1 or not gang.met.is_set():  # else the others must miss it
        await lease.leave()
    return status


def _stop_signals() -> asyncio.Future[Any]:
    """What the first SIGTERM, SIGINT or SIGHUP from now on is as an exit status; ignored ones stay so."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            loop.add_signal_handler(number, end, number)
    return ended


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
