"""Where the members of a broadcast meet: keys that the sender serves to holders of the run's token.

torch's TCPStore listens on every interface and obeys every client. This one listens on one address, and
every frame carries a keyed BLAKE3 of itself: a side without the token is refused at its first frame, and the
token itself never travels.

    both ends: 32 random bytes;   session key = BLAKE3(client's ‖ server's), keyed by the token
    frame:     length (4) ‖ BLAKE3(direction ‖ count ‖ body), keyed by the session (32) ‖ body

Without a token in the run there is nothing that a stranger lacks.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from hmac import compare_digest
from typing import Any, Final, Literal

import msgspec
import torch
from blake3 import blake3
from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from sync.base.decoding import msgpack_decoder

logger = logging.getLogger(__name__)
_NONCE: Final = 32
_MOST_FRAME: Final = 1 << 26
_MOST_FIRST_FRAME: Final = 1 << 16
"""Bytes of a client's first frame, which is read before its seal is known; torch's has 8 for each rank."""
_GREETING_SECONDS: Final = 10.0
"""Limit from a connection to the end of its first frame."""
_SLICE_SECONDS: Final = 0.25
"""Longest that the server lets one request wait for keys."""


class StrangerError(RuntimeError):
    """The other end does not hold the run's token."""


class Ask(msgspec.Struct, array_like=True):
    """One request; bytes or None answer it, "wait" when all keys are set or `seconds` are over."""

    do: Literal["set", "get", "wait", "delete"]
    keys: list[str]
    value: bytes = b""
    seconds: float = 0.0


def broadcast_key(token: str | None) -> bytes:
    """Key of all sessions of a run."""
    return blake3((token or "").encode(), derive_key_context="onpolicy-distill broadcast 1").digest()


class _Line:
    """One connection, whose ends show with every frame that they hold the key."""

    def __init__(
        self, connection: socket.socket, key: bytes, serving: bool, deadline: float | None = None
    ) -> None:
        """`deadline`: see `_exactly`."""
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(nonce)
        theirs = _exactly(connection, _NONCE, deadline)
        self._connection, self._serving = connection, serving
        self._session = blake3(theirs + nonce if serving else nonce + theirs, key=key).digest()
        self._sent = self._received = 0

    def _seal(self, from_server: bool, count: int, body: bytes) -> bytes:
        head = bytes([from_server]) + count.to_bytes(8, "little")
        return blake3(head + body, key=self._session).digest()

    def send(self, body: bytes) -> None:
        seal = self._seal(self._serving, self._sent, body)
        self._sent += 1
        self._connection.sendall(len(body).to_bytes(4, "little") + seal + body)

    def receive(self, limit: int = _MOST_FRAME, deadline: float | None = None) -> bytes:
        """The next frame, of at most `limit` bytes; `deadline`: see `_exactly`. Raises StrangerError, and
        OSError at the end of the connection."""
        length = int.from_bytes(_exactly(self._connection, 4, deadline), "little")
        if length > limit:
            raise StrangerError
        seal = _exactly(self._connection, blake3.digest_size, deadline)
        body = _exactly(self._connection, length, deadline)
        if not compare_digest(seal, self._seal(not self._serving, self._received, body)):
            raise StrangerError
        self._received += 1
        return body


def _exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """`count` bytes. Raises ConnectionError when the connection ends before. `deadline`: time.monotonic() at
    which all must be there, else TimeoutError; None: the connection's own time-out holds, for each part."""
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the frame is not whole")
            connection.settimeout(left)
        if not (chunk := connection.recv(min(count - len(data), 1 << 20))):
            raise ConnectionResetError("the connection ended")
        data += chunk
    return bytes(data)


# --- the store --------------------------------------------------------------------------------------------


class Meeting(Store):
    """A store as torch's groups use it, over `ask`, every key under `group`. Keep it while torch uses it."""

    def __init__(self, ask: Callable[[Ask], bytes | None], group: str, timeout: timedelta) -> None:
        super().__init__()
        self._ask, self.name, self._timeout = ask, group, timeout

    def _names(self, keys: list[str]) -> list[str]:
        return [f"{self.name}/{key}" for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Ask("set", self._names([key]), value.encode() if isinstance(value, str) else value))

    def get(self, key: str, given_up: Callable[[], bool] = lambda: False) -> bytes:
        """Value of a key; waits until it is set. Raises as `wait` does."""
        while (value := self._ask(Ask("get", self._names([key])))) is None:
            self.wait([key], given_up=given_up)
        return value

    def told(self, key: str, given_up: Callable[[], bool]) -> bytes:
        """Value of a key that the sender sets, unless it gives up; waits for as long as the sender answers.
        How long it may take others is the sender's to bound: a member that stopped waiting before would be
        counted as there. Raises RuntimeError when the sender is gone, or the broadcast is `given_up`."""
        while not self.come([key]):
            if given_up():
                raise RuntimeError(f"{key} did not come: the broadcast was given up")
        return self.get(key)

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
        self._server = _Server((host, port), _Visit, key, self.ask)
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
                lambda: self._closed or self._values.keys() >= {*ask.keys}, min(ask.seconds, _SLICE_SECONDS)
            ):
                return None
            if self._closed:
                raise ConnectionResetError("the sender is closed")
        return b""

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

    def __init__(
        self, address: tuple[str, int], visit: type[_Visit], key: bytes, ask: Callable[[Ask], bytes | None]
    ) -> None:
        self.key, self.ask = key, ask
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, visit)


class _Visit(socketserver.BaseRequestHandler):
    """One connection to the server, until its end."""

    server: _Server

    def handle(self) -> None:
        deadline = time.monotonic() + _GREETING_SECONDS
        try:
            line = _Line(self.request, self.server.key, serving=True, deadline=deadline)
            body = line.receive(_MOST_FIRST_FRAME, deadline)
            self.request.settimeout(None)
            while True:
                answer = self.server.ask(msgpack_decoder(Ask).decode(body))
                line.send(msgspec.msgpack.encode(answer))
                body = line.receive()
        except StrangerError:
            logger.warning("%s was refused: it does not hold the run's token", self.client_address[0])
        except OSError:
            return


class Visitor:
    """A receiver's connection to the sender. Raises RuntimeError when that is gone, or a stranger."""

    def __init__(self, address: str, key: bytes, timeout: timedelta) -> None:
        self._address, self._turn = address, threading.Lock()
        host, _, port = address.rpartition(":")
        with self._told():
            self._connection = socket.create_connection((host, int(port)), timeout.total_seconds())
            try:
                self._line = _Line(self._connection, key, serving=False)
            except OSError:
                self.close()
                raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except StrangerError:
            raise RuntimeError(f"{self._address} does not hold this run's token") from None
        except OSError as error:
            raise RuntimeError(
                f"the sender at {self._address} does not answer ({error}): it must run, with the same token"
            ) from None

    def close(self) -> None:
        self._connection.close()

    def ask(self, ask: Ask) -> bytes | None:
        """The server's answer; any thread may ask."""
        with self._turn, self._told():
            self._line.send(msgspec.msgpack.encode(ask))
            return msgpack_decoder(bytes | None).decode(self._line.receive())  # type: ignore[arg-type]


# --- the group --------------------------------------------------------------------------------------------


class Group:
    """A process group, named as the broadcast for which it was formed; see `used`."""

    def __init__(
        self,
        store: Meeting,
        rank: int,
        size: int,
        address: str,
        timeout: timedelta,
        device: torch.device,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`closed` is called when nothing asks `store` any more."""
        self.name, self.rank, self.size = store.name, rank, size
        self._store, self._timeout, self._closed = store, timeout, closed
        self._backend = _backend(store, rank, size, address, timeout, device)
        self._nccl = self._backend.name() == "nccl"

    def start(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin to send from rank 0, or to receive, one buffer; what returns when it is complete here."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._backend.broadcast([flat], options)
        return lambda: work.wait(self._timeout)

    def abort(self) -> None:
        """Let nothing wait for a dead peer any more, from any thread; gloo waits for its time-out."""
        if self._nccl and (backend := self._backend) is not None:
            backend.abort()

    def close(self) -> None:
        """Let go of the connections; nothing may be on its way."""
        self.abort()
        self._backend = None
        self._closed()


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


@contextlib.contextmanager
def used(group: Group, groups: list[Group], given_up: Callable[[], bool]) -> Iterator[None]:
    """Use `group`, among `groups` meanwhile, so that giving up can abort it. It is closed when the block
    fails. Raises RuntimeError when it was given up."""

    def check() -> None:
        if given_up():
            raise RuntimeError("the broadcast was given up")

    groups.append(group)
    try:
        check()
        yield
        groups.remove(group)
        check()  # behind the removal: whoever gave up before found it, or is found here
    except BaseException:
        group.close()
        raise
