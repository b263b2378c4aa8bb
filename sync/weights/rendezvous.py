"""Where the members of a broadcast meet: keys that the sender serves over HTTP to holders of the run's token.

torch's TCPStore listens on every interface and obeys every client. This one listens on one address, asks for
the bearer token, and seals every answer with a BLAKE3 keyed by it: a stranger is neither obeyed nor believed.
Without a token in the run there is nothing that a stranger lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from hmac import compare_digest
from time import monotonic
from typing import Any, Final, Literal

import msgspec
import torch
from blake3 import blake3
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from sync.base.errors import RemoteError, Unreachable, WireError
from sync.wire import KeyReply, KeyRequest, decode, encode
from sync.wire.client import MAX_SMALL, BlockingPeer, in_loop
from sync.wire.server import application, bind_alone, guest_server, read_message, reply

_SLICE_SECONDS: Final = 0.25
"""Longest that the server lets one request wait for keys."""


def _seal(token: str | None, nonce: bytes, value: bytes | None) -> bytes:
    """What only a holder of the token can say of `value` as the answer to the request with `nonce`."""
    key = blake3((token or "").encode(), derive_key_context="onpolicy-distill broadcast 3").digest()
    return blake3(nonce + msgspec.msgpack.encode(value), key=key).digest()


# --- the store --------------------------------------------------------------------------------------------


class Meeting(Store):
    """A store as torch's groups use it, over `ask`, every key under `group`. Keep it while torch uses it."""

    def __init__(self, ask: Callable[[KeyRequest], bytes | None], group: str, timeout: timedelta) -> None:
        super().__init__()
        self._ask, self.name, self._timeout = ask, group, timeout.total_seconds()

    def _do(self, do: Literal["set", "get", "delete"], key: str, **more: Any) -> bytes | None:
        return self._ask(KeyRequest(do=do, key=f"{self.name}/{key}", **more))

    def set(self, key: str, value: str | bytes) -> None:
        self._do("set", key, value=value.encode() if isinstance(value, str) else value)

    def find(self, key: str, seconds: float = _SLICE_SECONDS) -> bytes | None:
        """Value of a key, which is there or comes within `seconds`, at most a slice; None: it does not."""
        return self._do("get", key, seconds=seconds)

    def get(
        self, key: str, given_up: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> bytes:
        """Value of a key; waits until it is set. Raises RuntimeError after `seconds` (None: the time-out),
        when the sender is gone, or when the broadcast is `given_up`."""
        seconds = self._timeout if seconds is None else seconds
        deadline = monotonic() + seconds
        while (value := self.find(key)) is None:
            if given_up():
                raise RuntimeError(f"{key} did not come: the broadcast was given up")
            if monotonic() > deadline:
                raise RuntimeError(f"{key} did not come within {seconds:.3g} s")
        return value

    def delete_key(self, key: str) -> bool:
        return self._do("delete", key) is not None

    def check(self, keys: list[str]) -> bool:
        return all(self.find(key, 0.0) is not None for key in keys)

    def wait(
        self, keys: list[str], timeout: timedelta | None = None, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when all keys are set. Raises as `get` does."""
        deadline = monotonic() + (timeout.total_seconds() if timeout else self._timeout)
        for key in keys:
            self.get(key, given_up, deadline - monotonic())


class Served:
    """The keys, in the sender's memory, and the server through which receivers reach them. Both live in the
    event loop of the blocking clients."""

    def __init__(self, host: str, token: str | None) -> None:
        self._values: dict[str, bytes] = {}
        self._changed, self._closed, self._token = asyncio.Condition(), False, token
        routes = [Route("/v1/keys", self._answer, methods=["POST"])]
        app = application(None, routes, CollectorRegistry(), token or "", None)
        listener = bind_alone(host, 0)
        listener.listen(128)  # every replica connects, all at once
        self.port = int(listener.getsockname()[1])
        self._server = guest_server(app)
        self._serving = in_loop(self._server.serve(sockets=[listener]))

    def ask(self, ask: KeyRequest) -> bytes | None:
        """What a request finds; any thread may ask. Raises Unreachable when this is closed."""
        return in_loop(self._find(ask)).result()

    async def _find(self, ask: KeyRequest) -> bytes | None:
        async with self._changed:
            if ask.do == "get":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(ask.seconds, _SLICE_SECONDS)):
                        await self._changed.wait_for(lambda: self._closed or ask.key in self._values)
            if self._closed:
                raise Unreachable("the sender is closed")
            if ask.do == "delete":
                return self._values.pop(ask.key, None)
            if ask.do == "set":
                self._values[ask.key] = ask.value
                self._changed.notify_all()
            return self._values.get(ask.key)

    async def _answer(self, request: Request) -> Response:
        ask = await read_message(request, KeyRequest, MAX_SMALL)
        value = await self._find(ask)
        return reply(KeyReply(value=value, seal=_seal(self._token, ask.nonce, value)))

    def close(self) -> None:
        """Stop listening; who asks after this is refused."""
        in_loop(self._close()).result()
        self._serving.result()

    async def _close(self) -> None:
        async with self._changed:
            self._closed = self._server.should_exit = True
            self._changed.notify_all()


class Visitor:
    """A receiver's way to the sender. Raises RuntimeError when that is gone, or a stranger."""

    def __init__(self, address: str, token: str | None, timeout: timedelta) -> None:
        host, _, port = address.rpartition(":")
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._address, self._token, self._seconds = address, token, timeout.total_seconds()
        self._peer = BlockingPeer(url, token)

    def ask(self, ask: KeyRequest) -> bytes | None:
        """The server's answer; any thread may ask."""
        ask = msgspec.structs.replace(ask, nonce=secrets.token_bytes(32))
        try:
            told = decode(
                self._peer.once("/v1/keys", encode(ask), self._seconds, max_bytes=MAX_SMALL), KeyReply
            )
        except (Unreachable, RemoteError, WireError) as error:
            raise RuntimeError(
                f"the sender at {self._address} does not answer ({error}): it must run, with the same token"
            ) from None
        if not compare_digest(told.seal, _seal(self._token, ask.nonce, told.value)):
            raise RuntimeError(f"{self._address} does not hold this run's token")
        return told.value


# --- the group --------------------------------------------------------------------------------------------


class Group:
    """A process group, named as the broadcast for which it was formed; see `used`."""

    def __init__(
        self, store: Meeting, rank: int, size: int, address: str, timeout: timedelta, device: torch.device
    ) -> None:
        self.name, self.rank, self.size = store.name, rank, size
        self._store, self._timeout = store, timeout
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
    groups.append(group)
    try:
        if not given_up():
            yield
        groups.remove(group)
        if given_up():  # asked behind the removal: whoever gave up before found it, or is found here
            raise RuntimeError("the broadcast was given up")
    except BaseException:
        group.close()
        raise
