"""The evaluator: a process that evaluates published versions.

    python -m distill.evaluation.service --config runs/NAME/roles/evaluator.json --port PORT

The file is a RunConfig as JSON; --controller says where teachers and environments are, if it does not.
/health answers once the prompts are read. Evaluations and probes run one at a time, completions beside them.
Exit status: 0 after a signal, 2 when the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from prometheus_client import Counter, Summary
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from distill import translation
from distill.aio import cancel
from distill.config import RunConfig
from distill.evaluation.schedule import score
from distill.registry import expected_servers, follow
from distill.rollout.replica_client import HttpReplica
from distill.topology import places
from sync import wire
from sync.base.address import controller_url, token_from_environment
from sync.base.decoding import convert
from sync.base.durable import write_json
from sync.base.errors import ConfigError, DistillError
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

R = TypeVar("R", wire.CompletionsRequest, wire.EvalRequest, wire.ProbeRequest)


def app(
    complete: Callable[[wire.CompletionsRequest], Awaitable[wire.CompletionsReply]],
    evaluate: Callable[[wire.Version], Awaitable[wire.EvalReport]],
    probe: Callable[[wire.ProbeRequest], Awaitable[wire.ProbeReply]],
    token: str | None,
    claim: Claim,
) -> Starlette:
    """The HTTP side. The first run that has a version evaluated claims the process.

    Generation ends when its caller leaves; an evaluation goes on, for the next request to wait for, which is
    answered the same until completions are asked for again. What the three cannot do they raise as
    DistillError, which becomes a 409.
    """
    reports: dict[wire.Version, wire.EvalReport] = {}  # the newest one
    models, generation = asyncio.Lock(), asyncio.Lock()
    registry = process_registry()
    spent = Summary("distill_evaluator_seconds", "Duration of work, by route", ("route",), registry=registry)
    refused = Counter("distill_evaluator_refused", "Requests that failed", ("route",), registry=registry)

    def endpoint(
        kind: type[R], work: Callable[[R], Awaitable[wire.Message]], turn: asyncio.Lock
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            route = request.url.path.removeprefix("/v1/")
            try:
                message = await read_message(request, kind)
                async with turn:
                    with spent.labels(route).time():
                        if turn is models:
                            return reply(await work(message))
                        return await _while_wanted(request, work(message))
            except DistillError as error:
                refused.labels(route).inc()
                log.error("%s", error)
                return refuse(409, str(error))

        return answer

    async def completed(message: wire.CompletionsRequest) -> wire.CompletionsReply:
        reports.clear()
        return await complete(message)

    async def report(message: wire.EvalRequest) -> wire.EvalReport:
        if (known := reports.get(message.version)) is None:
            reports.clear()
            known = reports[message.version] = await evaluate(message.version)
        return known

    completions = endpoint(wire.CompletionsRequest, completed, generation)
    evaluated = endpoint(wire.EvalRequest, report, models)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/evaluate", evaluated, methods=["POST"]),
        Route("/v1/probe", endpoint(wire.ProbeRequest, probe, models), methods=["POST"]),
    ]
    claiming = ("/v1/completions", "/v1/evaluate")
    return application(Role.EVALUATOR, routes, registry, token, claim, claiming)


async def _while_wanted(request: Request, work: Awaitable[wire.Message]) -> Response:
    """The reply, unless the caller leaves before it is there."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return reply(task.result()) if task.done() else refuse(409, "the caller has left")
    finally:
        await cancel([task, gone])


class BestKeeper:
    """Evaluates versions and keeps the best one, by the configuration's metric, as the folder best/."""

    def __init__(
        self,
        config: RunConfig,
        evaluate: Callable[[wire.Version], Awaitable[wire.EvalReport]],
        weights: Subscriber,
        claim: Claim,
    ) -> None:
        self._evaluate, self._weights, self._claim = evaluate, weights, claim
        self._metric = config.metric
        self._target = config.run_dir / "best"
        self._record = config.run_dir / "best.json"

    async def __call__(self, version: wire.Version) -> wire.EvalReport:
        report, best = await self._evaluate(version), True
        if self._record.is_file():
            known = json.loads(self._record.read_text())
            if known.pop("run_id", None) in (None, self._claim.run_id):  # else another run's, in this folder
                old = convert({**known, "version": wire.Version.parse(known["version"])}, wire.EvalReport)
                best = score(report, self._metric) > score(old, self._metric)
        if best:
            if version.step > 0:
                folder = await asyncio.to_thread(self._weights.folder, version)
                await asyncio.to_thread(keep_best, folder, self._target)
            figures = {**msgspec.to_builtins(report), "version": str(version)}
            write_json(self._record, {**figures, "run_id": self._claim.run_id})
        return report


def keep_best(folder: Path, target: Path) -> None:
    """Replace `target` by a copy of the model in `folder`: a reader sees the old or the new one, never half.

    Between the two renames there is neither; after a crash there, the old one is `.NAME.old`, the new one
    `.NAME.new`.
    """
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
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

    from distill.environments.client import EnvironmentClient
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

    where = places(config, at)
    places_of = {name: where[f"teachers.{name}"] for name in config.teachers}
    teachers, _ = translation.clients(config, places_of, token, claim)
    environments = {
        name: EnvironmentClient(
            name,
            where[f"environments.{name}"],
            token,
            claim,
            environment.call_timeout_seconds,
        )
        for name, environment in config.environments.items()
    }
    connect = partial(HttpReplica, token=token, claim=claim)
    evaluator = Evaluator(config, weights, teachers, connect, environments)
    keeper = BestKeeper(config, evaluator.evaluate, weights, claim)
    asgi = app(evaluator.complete, keeper, partial(probe, config, teachers), token, claim)
    serve_app(asgi, host, port, grace=5)


def main() -> int:
    """Serve until signalled; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.evaluation.service", description="Evaluate versions."
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
