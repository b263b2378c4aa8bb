"""What answers at a URL, and why it is not the server that was expected there.

Every role names itself in a header of each answer (`RunGuard`); /health gives it without a token. Another
server is known by what it says of itself at /version (vLLM) and /v1/models (the OpenAI protocol), at the root
of its address. The bearer token of the run is not sent: the server may be a stranger's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Final, NamedTuple

import httpx

from sync.base.errors import WrongServer
from sync.base.secrets import redact

ROLE_HEADER: Final = "x-distill-role"
"""Header of an answer: the `Role` of the process that gives it."""
SECONDS: Final = 3.0
"""Limit of one question; a server that is slower may be starting, and nothing is said of it."""
_MOST: Final = 1 << 16
"""Bytes read of an answer."""


class Role(StrEnum):
    """What a URL of a configuration may lead to."""

    STUDENT = "student"
    TEACHER = "teacher"
    ENVIRONMENT = "environment"
    EVALUATOR = "evaluator"
    CONTROLLER = "controller"
    VLLM = "vllm"
    """vLLM's own server, without anything of ours."""


_NAMES: Final = {
    Role.STUDENT: "a student replica of this project",
    Role.TEACHER: "a teacher service of this project",
    Role.ENVIRONMENT: "an environment service of this project",
    Role.EVALUATOR: "an evaluator of this project",
    Role.CONTROLLER: "the controller of a run",
    Role.VLLM: "a vLLM server",
}
_REMEDIES: Final = {
    Role.STUDENT: "start replicas with `distill student FILE`, or leave the URL out and they are started",
    Role.TEACHER: (
        "start one with `distill teacher FILE`, or leave the URL out and it is started; it can score with a "
        'vLLM server that has the pooling runner (engine = "vllm", engine_url)'
    ),
    Role.ENVIRONMENT: "start it with `distill environment FILE`, or leave the URL out and it is started",
    Role.EVALUATOR: "start it with `distill evaluator FILE`, or leave the URL out and it is started",
    Role.CONTROLLER: "give the URL that `distill run` or `distill control` wrote into the run's folder",
    Role.VLLM: "give the address of vLLM's own server, without a path",
}


class Answerer(NamedTuple):
    """What answers at a URL."""

    role: Role | None
    """The role it names; None: another server, which `what` describes."""
    what: str


def identify(url: str) -> Answerer | None:
    """What answers at `url`; None: nothing that could be told yet. None stands for no connection, no answer
    within SECONDS, and a gateway's 502-504: who expects a server there goes on waiting for it."""
    with httpx.Client(trust_env=False, timeout=SECONDS) as http:
        try:
            health = http.get(url.rstrip("/") + "/health")
        except httpx.RemoteProtocolError as error:
            no_http = f"something that speaks no HTTP ({error})"
            return None if "disconnected" in str(error) else Answerer(None, no_http)
        except httpx.RequestError:
            return None
        root = str(httpx.URL(url).copy_with(path="/", query=None))
        role = Role(name) if (name := health.headers.get(ROLE_HEADER)) in [*Role] else None
        if role is not None and health.status_code == 404:
            return Answerer(None, f"a path of {_NAMES[role]}: write {root.rstrip('/')} for it")
        if role is not None:
            return Answerer(role, _NAMES[role])
        if health.status_code in (502, 503, 504):
            return None
        return _stranger(http, root, health)


def wrong(url: str, expected: Role) -> str | None:
    """Why the server at `url` is not the one `expected` there: what it is, and the remedy. None: it is that
    server, or nothing can be told yet (see `identify`)."""
    answerer = identify(url)
    if answerer is None or answerer.role is expected:
        return None
    return f"{redact(url)} is {answerer.what}, and {_NAMES[expected]} was expected: {_REMEDIES[expected]}"


def refuse_wrong(url: str, expected: Role) -> None:
    """Raise WrongServer with what `wrong` says; nothing when it says nothing."""
    if problem := wrong(url, expected):
        raise WrongServer(problem)


def wrong_among(places: Iterable[tuple[str, str, Role]]) -> list[str]:
    """A line for each (key, URL, expected role) that leads to another server; all are asked at once."""
    asked = [*places]
    with ThreadPoolExecutor(max(1, min(32, len(asked)))) as threads:
        problems = threads.map(lambda place: wrong(*place[1:]), asked)
        return [f"{key}: {problem}" for (key, _, _), problem in zip(asked, problems, strict=True) if problem]


def _stranger(http: httpx.Client, root: str, health: httpx.Response) -> Answerer:
    """A server without a role of ours, by its own words."""
    version, listing = _json(http, root + "version"), _json(http, root + "v1/models").get("data")
    models = [model for model in listing if isinstance(model, dict)] if isinstance(listing, list) else []
    serves = f" that serves {str(models[0].get('id'))[:200]!r}" if models else ""
    silent = "version" in version and health.status_code == 200 and not health.content  # models need a key
    if silent or any(model.get("owned_by") == "vllm" for model in models):
        return Answerer(Role.VLLM, f"a plain vLLM server{serves}")
    if isinstance(listing, list):
        return Answerer(None, f"a server of the OpenAI protocol{serves}")
    server = health.headers.get("server", "without a name")[:60]
    return Answerer(None, f"an HTTP server ({server}) that answers {health.status_code} at /health")


def _json(http: httpx.Client, url: str) -> dict[str, Any]:
    """The JSON object at a URL; empty: there is none."""
    content = bytearray()
    try:
        with http.stream("GET", url) as answer:
            for part in answer.iter_raw() if answer.status_code == 200 else ():
                content += part
                if len(content) > _MOST:
                    return {}
        parsed = json.loads(content or b"{}")
    except (httpx.RequestError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
