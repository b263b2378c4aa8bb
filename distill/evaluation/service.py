"""The evaluator: a process that loads published versions, compares them with the teachers, keeps the best.

    python -m distill.evaluation.service --config runs/NAME/roles/evaluator.json --port PORT

The file is a RunConfig as JSON; --controller says where teachers are, if it does not. One request at a time.
Exit status: 0 after a signal, 2 when the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3
from prometheus_client import Counter, Summary
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distill import translation
from distill.config import RunConfig
from distill.registry import expected_servers, follow
from distill.topology import places
from sync import wire
from sync.base.address import controller_url, token_from_environment
from sync.base.durable import until_disk_space, write_json
from sync.base.errors import ConfigError, DistillError
from sync.base.memory import give_back
from sync.base.settings import read_settings
from sync.weights.subscribe import Subscriber
from sync.wire.claims import Claim
from sync.wire.peers import Role
from sync.wire.server import (
    application,
    check_bind,
    process_registry,
    read_message,
    refuse,
    reply,
    run_role,
    serve_app,
)

log = logging.getLogger("distill.evaluation.service")

R = TypeVar("R", wire.EvalRequest, wire.EvalReport, wire.ProbeRequest)


def app(
    evaluate: Callable[[wire.EvalRequest], Awaitable[wire.EvalReply]],
    keep: Callable[[wire.EvalReport], Awaitable[wire.Ok]],
    probe: Callable[[wire.ProbeRequest], Awaitable[wire.ProbeReply]],
    token: str | None,
    claim: Claim,
) -> Starlette:
    """The HTTP side. The first run that has a version evaluated claims the process.

    Work goes on when its caller leaves; the newest evaluation is there for the next request that is the same.
    What the three cannot do they raise as DistillError, which becomes a 409.
    """
    newest: dict[bytes, wire.EvalReply] = {}
    turn, registry = asyncio.Lock(), process_registry()
    spent = Summary("distill_evaluator_seconds", "Duration of work, by route", ("route",), registry=registry)
    refused = Counter("distill_evaluator_refused", "Requests that failed", ("route",), registry=registry)

    def endpoint(
        kind: type[R], work: Callable[[R], Awaitable[wire.Message]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            route = request.url.path.removeprefix("/v1/")
            try:
                message = await read_message(request, kind)
                async with turn:
                    with spent.labels(route).time():
                        return reply(await work(message))
            except DistillError as error:
                refused.labels(route).inc()
                log.error("%s", error)
                return refuse(409, str(error))

        return answer

    async def evaluated(message: wire.EvalRequest) -> wire.EvalReply:
        digest = blake3(wire.encode(message)).digest()
        if (known := newest.get(digest)) is None:
            newest.clear()
            known = newest[digest] = await evaluate(message)
            give_back()
        return known

    routes = [
        Route("/v1/evaluate", endpoint(wire.EvalRequest, evaluated), methods=["POST"]),
        Route("/v1/best", endpoint(wire.EvalReport, keep), methods=["POST"]),
        Route("/v1/probe", endpoint(wire.ProbeRequest, probe), methods=["POST"]),
    ]
    claiming = ("/v1/evaluate", "/v1/best")
    return application(Role.EVALUATOR, routes, registry, token, claim, claiming)


async def keep(config: RunConfig, weights: Subscriber, claim: Claim, report: wire.EvalReport) -> wire.Ok:
    """Keep a version as the folder best/, with its figures; step 0 is the configuration's model folder."""
    version, best = report.version, config.run_dir / "best"
    folder = await asyncio.to_thread(weights.folder, version) if version.step > 0 else None
    figures = {**msgspec.to_builtins(report), "version": str(version), "run_id": claim.run_id}

    def write() -> None:
        if folder is not None:
            keep_best(folder, best)
        write_json(best.with_suffix(".json"), figures)

    await asyncio.to_thread(until_disk_space, write, str(best), "the evaluation")
    return wire.Ok()


def keep_best(folder: Path, target: Path) -> None:
    """Replace `target` by a copy of the model in `folder`: a reader sees the old or the new one, never half.

    Between the two renames there is neither; after a crash there, the old one is `.NAME.old`, which is put
    back first, and the new one `.NAME.new`.
    """
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    for left in (pending, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, pending)
    if target.exists():
        target.rename(old)
    pending.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def serve(config: RunConfig, host: str, port: int, controller: str | None = None) -> None:
    """Load everything, then answer on host:port until SIGTERM or SIGINT.

    `controller`: the URL that says where servers without `urls` are.
    """
    token = token_from_environment()
    check_bind(host, token)
    import setproctitle

    from distill.evaluation.evaluator import Evaluator
    from distill.evaluation.probes import probe

    setproctitle.setproctitle(f"distill evaluator {config.run.name}")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    claim = Claim(wire.RunIdentity(config.run.name))
    weights = Subscriber(config.subscriber("evaluator"), claim)
    at = expected_servers(config)

    def controller_place() -> str:
        """The URL that the run's folder says, where it is shared, else `controller`."""
        try:
            return controller_url(config.run_dir)
        except ConfigError:
            return str(controller)

    if controller is not None:
        follow(controller_place, token, at)

    teachers, _ = translation.clients(config, places(config, at), token, claim)
    evaluator = Evaluator(config, weights, teachers)
    asgi = app(
        evaluator.evaluate,
        partial(keep, config, weights, claim),
        partial(probe, config, teachers),
        token,
        claim,
    )
    serve_app(asgi, host, port, grace=5)


def main() -> int:
    """Serve until signalled; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.evaluation.service", description="Compare versions with the teachers."
    )
    parser.add_argument("--config", type=Path, required=True, help="a RunConfig as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--controller", help="URL that says where servers without urls are")
    options = parser.parse_args()

    def work() -> None:
        serve(read_settings(RunConfig, options.config), options.host, options.port, options.controller)

    return run_role(log, "evaluator", work, quiet=("httpx",))  # a line for each request


if __name__ == "__main__":
    sys.exit(main())
