"""The trainer on several machines, without ssh: their launchers meet through the controller.

    python -m student_trainer.launch --gang 1 …    on machine 1 of trainer.nodes

Each machine tells the controller its address and a free port, and is told those of machine 0 once all are
there. It renews that; when a machine is gone, or was started again, the controller refuses the others, whose
ranks could wait for it for long: they are killed, and the gang is started again as a whole.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import psutil
from msgspec.structs import replace

from student_trainer.config import TrainerConfig
from sync.base.address import own_address, token_from_environment
from sync.base.errors import DistillError, RemoteError, Unreachable
from sync.base.retry import retrying
from sync.wire import Gang, GangJoins
from sync.wire.client import BlockingPeer

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 1.0
CALL_SECONDS: Final = 3.0


class Member:
    """This machine in the gang of its run."""

    def __init__(self, config: TrainerConfig, index: int) -> None:
        """Raises ConfigError when the controller's machine cannot be reached from here."""
        self.address = own_address(config.controller_url)
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            port = int(probe.getsockname()[1])
        self._joins = GangJoins(
            run=config.run,
            index=index,
            of=config.trainer.nodes,
            address=self.address,
            port=port,
            boot=secrets.token_hex(16),
        )
        self._peer = BlockingPeer(config.controller_url, token_from_environment(), CALL_SECONDS)
        self._settings, self._limit = config.trainer, config.trainer.init_timeout_seconds

    def meet(self) -> Gang:
        """Where all ranks meet, once every machine is there.

        Raises Unreachable when machines are missing for trainer.init_timeout_seconds, RemoteError when this
        one is refused.
        """

        def joined() -> Gang:
            if (gang := self._told()).address is None:
                raise Unreachable(f"machines {gang.missing} of the trainer have not joined")
            return gang

        again = retrying(Unreachable, within=self._limit, first=RETRY_SECONDS, longest=RETRY_SECONDS)
        try:
            return again(joined)
        except Unreachable as error:
            raise Unreachable(f"{error} for trainer.init_timeout_seconds = {self._limit:g} s") from None

    def _told(self) -> Gang:
        return self._peer.call("/v1/gang", self._joins, Gang)

    def stay(self, ended: Callable[[], None]) -> None:
        """Renew from a thread; `ended` is called once the gang is no more."""

        def renew() -> None:
            while True:
                try:
                    time.sleep(self._told().lease_seconds / 3)
                except RemoteError as error:
                    log.error("%s", error)
                    ended()
                    return
                except DistillError as error:  # the controller is away, as ranks will find out
                    log.warning("%s", error)
                    time.sleep(RETRY_SECONDS)

        threading.Thread(target=renew, name="gang", daemon=True).start()

    def leave(self) -> None:
        """This machine's ranks ended well: the others are not to miss it."""
        self._joins = replace(self._joins, ended=True)
        try:
            self._peer.call("/v1/gang", self._joins, Gang, 2.0)
        except DistillError as error:  # it ends too
            log.info("%s", error)

    def interface(self) -> dict[str, str]:
        """Variables that keep gloo and NCCL on the network of this machine's address."""
        names = [
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address == self.address for address in addresses)
        ]
        return {key: names[0] for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if names}
