"""Run one server of a run that is controlled elsewhere, and register it for as long as it answers /health.

    start ─▶ /health answers ─▶ register ─▶ renew ─▶ … ─▶ the server ends: leave, with its exit status
                                    └── replaced (410): end the server, exit 3

The controller is asked where it is again and again: one that was started elsewhere has written its new URL
into the run's folder. While it cannot be reached the server goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Final

from distill.guardian import MODULE
from distill.launch.supervise import ChildSpec
from sync.base.errors import DistillError, Replaced
from sync.wire import ServerLease, ServerLeaves, ServerRegisters, Servers
from sync.wire.client import Peer

log = logging.getLogger(__name__)
EXIT_REPLACED: Final = 3
RETRY_SECONDS: Final = 1.0
CALL_SECONDS: Final = 3.0
LEAVE_SECONDS: Final = 2.0


async def serve(
    child: ChildSpec, url: str, run: str, controller: Callable[[], str], token: str | None, grace: float
) -> int:
    """Run `child` and register it at `url` with the controller of `run`; its exit status, or EXIT_REPLACED.

    SIGTERM and SIGINT are for the child, which has `grace` seconds.
    """
    read_end, write_end = os.pipe()
    ending = asyncio.Event()
    registration = ServerRegisters(run=run, name=child.name, url=url, boot=secrets.token_hex(16))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", MODULE, child.name, str(read_end), *child.argv),
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **child.env},
        pass_fds=(read_end,),
        start_new_session=True,
    )
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
            pause, line = RETRY_SECONDS, f"{registration.name} does not answer {registration.url}/health yet"
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
