"""The server's half of run identity: who is admitted, and what answers name."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sync.claims import MODEL_HEADER, RUN_HEADER, Claim, parse
from sync.errors import WireError, WrongServer
from sync.transport import MISDIRECTED, refuse


class RunGuard:
    """ASGI middleware: 421 for a request of another run than `claim`'s; answers name run and model.

    A request to a path of `claiming` claims a server that no run has claimed.
    """

    def __init__(
        self, app: ASGIApp, claim: Claim | None, claiming: Collection[str] = (), model: str | None = None
    ) -> None:
        """`claim`: None for a server that may serve many runs; `model`: what it scores with, if it does."""
        self.app = app
        self._claim, self._claiming = claim, claiming
        self._model = {} if model is None else {MODEL_HEADER: model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                served = self._claim.headers() if self._claim else {}
                message.setdefault("headers", [])
                MutableHeaders(scope=message).update({**self._model, **served})
            await send(message)

        try:
            if self._claim is not None:
                asking = parse(Headers(scope=scope).get(RUN_HEADER))
                self._claim.admit(asking, scope["path"] in self._claiming)
        except WireError as error:
            await refuse(400, str(error))(scope, receive, named)
        except WrongServer as error:
            await refuse(MISDIRECTED, str(error))(scope, receive, named)
        else:
            await self.app(scope, receive, named)
