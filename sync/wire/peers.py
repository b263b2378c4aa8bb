"""What answers at a URL, and why it is not the server that was expected there.

Every role names itself in a header of each answer (`Gate`); /health gives it without a token. Another
server is known by what it says of itself at /version (vLLM) and /v1/models (the OpenAI protocol), at the root
of its address. The bearer token of the run is not sent: the server may be a stranger's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self, TypeVar

import aiohttp
import httpx

from sync.base.address import Place
from sync.base.errors import ConfigError, RemoteError, Unreachable, WireError, WrongServer
from sync.base.retry import Backoff
from sync.base.secrets import redact
from sync.wire import Message
from sync.wire.claims import Claim
from sync.wire.client import Peer, in_loop

M = TypeVar("M", bound=Message)

ROLE_HEADER: Final = "x-distill-role"
"""Header of an answer: the `Role` of the process that gives it."""
SECONDS: Final = 3.0
"""Limit of one question; a server that is slower may be starting, and nothing is said of it."""
_MOST: Final = 1 << 16
"""Bytes read of an answer."""


class Role(StrEnum):
    """What a URL of a configuration may lead to: its name, what it is in words, and how to come by one."""

    words: str
    remedy: str

    def __new__(cls, name: str, words: str, remedy: str) -> Self:
        role = str.__new__(cls, name)
        role._value_, role.words, role.remedy = name, words, remedy
        return role

    STUDENT = (
        "student",
        "a student replica of this project",
        "start replicas with `distill student FILE`, or leave the URL out and they are started",
    )
    TEACHER = (
        "teacher",
        "a teacher service of this project",
        "start one with `distill teacher FILE`, or leave the URL out and it is started; it can score with a "
        'vLLM server that has the pooling runner (engine = "vllm", engine_url)',
    )
    ENVIRONMENT = (
        "environment",
        "an environment service of this project",
        "start it with `distill environment FILE`, or leave the URL out and it is started",
    )
    EVALUATOR = (
        "evaluator",
        "an evaluator of this project",
        "start it with `distill evaluator FILE`, or leave the URL out and it is started",
    )
    CONTROLLER = (
        "controller",
        "the controller of a run",
        "give the URL that `distill run` or `distill control` wrote into the run's folder",
    )
    VLLM = ("vllm", "a vLLM server", "give the address of vLLM's own server, without a path")
    """vLLM's own server, without anything of ours."""


async def identify(url: str) -> tuple[Role | None, str] | None:
    """What answers at `url`: the role it names, None for another server, and what it is in words. None:
    nothing that could be told yet, which is no connection, no answer within SECONDS, and a gateway's 502-504:
    who expects a server there goes on waiting for it."""
    async with Peer(url, timeout=SECONDS) as peer:
        try:
            status, headers, content = await peer.health(SECONDS)
        except aiohttp.ClientResponseError as error:
            return None, f"something that speaks no HTTP ({error.message})"
        except (aiohttp.ClientError, TimeoutError):
            return None
    root = str(httpx.URL(url).copy_with(path="/", query=None)).rstrip("/")
    role = next((role for role in Role if role == headers.get(ROLE_HEADER)), None)
    if role is not None and status == 404:
        return None, f"a path of {role.words}: write {root} for it"
    if role is not None:
        return role, role.words
    if status in (502, 503, 504):
        return None
    async with Peer(root, timeout=SECONDS) as peer:
        version, listing = await _json(peer, "/version"), (await _json(peer, "/v1/models")).get("data")
    models = [model for model in listing if isinstance(model, dict)] if isinstance(listing, list) else []
    serves = f" that serves {str(models[0].get('id'))[:200]!r}" if models else ""
    silent = "version" in version and status == 200 and not content  # models need a key
    if silent or any(model.get("owned_by") == "vllm" for model in models):
        return Role.VLLM, f"a plain vLLM server{serves}"
    if isinstance(listing, list):
        return None, f"a server of the OpenAI protocol{serves}"
    server = headers.get("server", "without a name")[:60]
    return None, f"an HTTP server ({server}) that answers {status} at /health"


async def _json(peer: Peer, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty: there is none."""
    try:
        parsed = json.loads(bytes(await peer.once(path, None, SECONDS, _MOST)))
    except (RemoteError, Unreachable, WireError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


async def wrong(url: str, expected: Role) -> str | None:
    """Why the server at `url` is not the one `expected` there: what it is, and the remedy. None: it is that
    server, or nothing can be told yet (see `identify`)."""
    answers = await identify(url)
    if answers is None or answers[0] is expected:
        return None
    return f"{redact(url)} is {answers[1]}, and {expected.words} was expected: {expected.remedy}"


def wrong_among(places: Iterable[tuple[str, str, Role]]) -> list[str]:
    """A line for each (key, URL, expected role) that leads to another server; all are asked at once.

    Blocks, as blocking clients do."""
    asked = [*places]

    async def ask() -> list[str | None]:
        return await asyncio.gather(*(wrong(url, role) for _, url, role in asked))

    problems = in_loop(ask()).result()
    return [f"{key}: {problem}" for (key, _, _), problem in zip(asked, problems, strict=True) if problem]


@dataclass(eq=False)
class ProcessClient:
    """One process of a server, as its client uses it."""

    peer: Peer
    load: int = 0
    """What it works on for this client: tokens, or episodes."""
    excluded: bool = False
    """It gets no more requests, while there is another."""
    wrong: bool = False
    """It last answered for another run, or with another model."""
    back_at: float = 0.0
    """time.monotonic() before which it is left alone."""
    backoff: Backoff = field(default_factory=lambda: Backoff(0.05, 2.0))

    @property
    def pause(self) -> float:
        return max(0.0, self.back_at - time.monotonic())

    def failed(self, seconds: float = 0.0) -> None:
        """Leave it alone for `seconds`, or for its backoff when that is longer."""
        self.back_at = time.monotonic() + self.backoff.next(seconds)

    def answered(self) -> None:
        self.back_at, self.wrong = 0.0, False
        self.backoff.reset()


class ProcessClients:
    """Clients of all processes of one server. Use inside `async with`, or call `aclose()`."""

    def __init__(
        self,
        what: str,
        role: Role,
        places: Sequence[Place],
        token: str | None,
        timeout: float,
        claim: Claim | None,
    ) -> None:
        """`what`: the server in words. Raises ConfigError when it has no process."""
        if not places:
            raise ConfigError(f"{what} has no urls: give at least one")
        self._what, self._role = what, role
        self._peers = [Peer(place, token, timeout, claim) for place in places]
        self._processes = [ProcessClient(peer) for peer in self._peers]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await asyncio.gather(*(peer.aclose() for peer in self._peers))

    async def _answers(self, path: str, kind: type[M], timeout: float | None) -> list[M]:
        """What each of them says of itself. Raises WrongServer for a process of another role."""
        try:
            return await asyncio.gather(*(peer.call(path, None, kind, timeout) for peer in self._peers))
        except (RemoteError, WireError):
            for peer in self._peers:
                if peer.placed and (problem := await wrong(peer.url, self._role)):
                    raise WrongServer(problem) from None
            raise

    def _same(self, answers: Sequence[M]) -> M:
        """Their one answer. Raises ConfigError when they differ."""
        for peer, answer in zip(self._peers, answers, strict=True):
            if answer != answers[0]:
                raise ConfigError(
                    f"processes of {self._what} differ: {peer.url} serves {answer}, {self._peers[0].url} "
                    f"serves {answers[0]}: start them from the same configuration"
                )
        return answers[0]
