"""Where the members of a broadcast meet: keys that the sender serves to holders of the run's token.

torch's TCPStore listens on every interface and obeys every client. This one listens on one address, and the
two ends of a connection first prove to each other, by HMAC of a challenge (multiprocessing's), that they hold
the token; it never travels. Messages are msgpack, never pickles. Without a token in the run there is nothing
that a stranger lacks.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final, Literal

import msgspec
import torch
from blake3 import blake3
from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)
_MOST_FRAME: Final = 1 << 26
_GREETING_SECONDS: Final = 10.0
"""From a connection to its first message."""
_SLICE_SECONDS: Final = 0.25
"""Longest that the server lets one request wait for keys."""
_STRANGER: Final = (AuthenticationError, AssertionError)
"""What a failed challenge raises: the second where the other end sends none."""


class Ask(msgspec.Struct, array_like=True):
    """One request; bytes or None answer it, "wait" when all keys are set or `seconds` are over."""

    do: Literal["set", "get", "wait", "delete"]
    keys: list[str]
    value: bytes = b""
    seconds: float = 0.0


def broadcast_key(token: str | None) -> bytes:
    """What both ends of a run's connections hold."""
    return blake3((token or "").encode(), derive_key_context="onpolicy-distill broadcast 1").digest()


def _give_up_after(connection: socket.socket, seconds: float) -> None:
    """Bound every read of a blocking socket; 0: no bound."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class Meeting(Store):
    """A store as torch's groups use it, over `ask`, every key under `group`. Keep it while torch uses it."""

    def __init__(self, ask: Callable[[Ask], bytes | None], group: str, timeout: timedelta) -> None:
        super().__init__()
        self._ask, self._group, self._timeout = ask, group, timeout

    def _names(self, keys: list[str]) -> list[str]:
        return [f"{self._group}/{key}" for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Ask("set", self._names([key]), value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Value of a key; waits until it is set. Raises RuntimeError after the time-out."""
        self.wait([key])
        return self._ask(Ask("get", self._names([key]))) or b""

    def delete_key(self, key: str) -> bool:
        return self._ask(Ask("delete", self._names([key]))) is not None

    def check(self, keys: list[str]) -> bool:
        return self.come(keys, 0.0)

    def come(self, keys: list[str], seconds: float = _SLICE_SECONDS) -> bool:
        """Whether all keys are set, now or within `seconds`, at most a slice."""
        return self._ask(Ask("wait", self._names(keys), seconds=seconds)) is not None

    def wait(
        self, keys: list[str], timeout: timedelta | None = None, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when all keys are set. Raises RuntimeError after the time-out, or when it is `given_up`."""
        seconds = (timeout or self._timeout).total_seconds()
        deadline = time.monotonic() + seconds
        while not self.come(keys):
            if given_up() or time.monotonic() > deadline:
                missing = [key for key in keys if not self.check([key])]
                raise RuntimeError(f"{', '.join(missing)} did not come within {seconds:g} s")


class Served:
    """The keys, in the sender's memory, and the server through which receivers reach them."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._values: dict[str, bytes] = {}
        self._changed, self._closed = threading.Condition(), False
        self._server = _Server((host, port), key, self.ask)
        self.port = int(self._server.server_address[1])
        serving = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="rendezvous")
        serving.daemon = True
        serving.start()

    def ask(self, ask: Ask) -> bytes | None:
        """What a request finds; any thread may ask. Raises ConnectionResetError when this is closed."""
        with self._changed:
            if ask.do == "set":
                self._values[ask.keys[0]] = ask.value
                self._changed.notify_all()
            elif ask.do == "delete":
                return self._values.pop(ask.keys[0], None)
            elif ask.do == "get":
                return self._values.get(ask.keys[0])
            elif not self._changed.wait_for(
                lambda: self._all_there(ask.keys), min(ask.seconds, _SLICE_SECONDS)
            ):
                return None
            if self._closed:
                raise ConnectionResetError("the sender is closed")
        return b""

    def _all_there(self, keys: list[str]) -> bool:
        return self._closed or self._values.keys() >= set(keys)

    def close(self) -> None:
        """Stop listening; connected clients are refused with their next request."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for every connection."""

    daemon_threads = True
    request_queue_size = 128  # every replica connects twice, all at once

    def __init__(self, address: tuple[str, int], key: bytes, ask: Callable[[Ask], bytes | None]) -> None:
        self._key, self._ask = key, ask
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection until its end."""
        _give_up_after(request, _GREETING_SECONDS)
        try:
            with request.dup() as own, Connection(request.detach()) as line:
                deliver_challenge(line, self._key)
                answer_challenge(line, self._key)
                _give_up_after(own, 0.0)
                while True:
                    ask = msgspec.msgpack.decode(line.recv_bytes(_MOST_FRAME), type=Ask)
                    line.send_bytes(msgspec.msgpack.encode(self._ask(ask)))
        except _STRANGER:
            logger.warning("%s was refused: it does not hold the run's token", client_address[0])
        except (OSError, EOFError):
            return


class Visitor:
    """A receiver's connection to the sender. Raises RuntimeError when that is gone, or a stranger."""

    def __init__(self, address: str, key: bytes, timeout: timedelta) -> None:
        self._address, self._turn = address, threading.Lock()
        host, _, port = address.rpartition(":")
        with self._explained():
            connection = socket.create_connection((host, int(port)), timeout.total_seconds())
            _give_up_after(connection, timeout.total_seconds())
            self._line = Connection(connection.detach())
            answer_challenge(self._line, key)
            deliver_challenge(self._line, key)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (*_STRANGER, OSError, EOFError) as error:
            raise RuntimeError(
                f"the sender at {self._address} does not answer ({error}): it must run, with the same token"
            ) from None

    def close(self) -> None:
        self._line.close()

    def ask(self, ask: Ask) -> bytes | None:
        """The server's answer; any thread may ask."""
        with self._turn, self._explained():
            self._line.send_bytes(msgspec.msgpack.encode(ask))
            return msgspec.msgpack.decode(self._line.recv_bytes(_MOST_FRAME), type=bytes | None)


# --- the group --------------------------------------------------------------------------------------------


class Group:
    """The process group of one broadcast. `abort` ends it from any thread, formed or not."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend, self._aborted = device, None, threading.Event()

    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Let nothing wait for a dead peer any more; gloo waits for its time-out."""
        self._aborted.set()
        if (backend := self._backend) is not None and backend.name() == "nccl":
            backend.abort()

    @contextlib.contextmanager
    def formed(
        self, store: Meeting, rank: int, size: int, address: str, timeout: timedelta
    ) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield what sends one buffer from rank 0, or receives it, and returns when it is complete here.

        Ends in order, so that what is complete here reaches the ranks that get it from here; when the block
        fails, the group is aborted. Raises RuntimeError when it was aborted before.
        """
        backend = self._backend = _backend(store, rank, size, address, timeout, self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            if self.aborted():
                raise RuntimeError("the broadcast was given up")
            yield lambda flat: backend.broadcast([flat], options).wait(timeout)
            if backend.name() == "nccl":
                backend.shutdown()
        except BaseException:
            self.abort()
            raise
        finally:
            self._backend = None


def backend_name(device: torch.device) -> str:
    """What moves tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def _backend(
    store: Meeting, rank: int, size: int, address: str, timeout: timedelta, device: torch.device
) -> Any:
    """torch's process group for `device`, apart from any default group. NCCL was not run here."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is a thread's own
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 2 * timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)
