"""The evaluator: a process that marks published versions on held-out prompts.

    python -m distill.evaluation.service --config runs/NAME/roles/evaluator.json --port PORT

The file is a RunConfig as JSON. It answers POST /v1/evaluate (EvalRequest → EvalReport) and POST /v1/probe
(ProbeRequest → ProbeReply), one at a time, and GET /health once its teachers are loaded.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from distill.config import EvaluationConfig, RunConfig
from distill.evaluation.schedule import score
from sync.claims import Claim
from sync.durable import write_json
from sync.errors import ConfigError, DistillError
from sync.guard import RunGuard
from sync.listening import serve_app
from sync.secrets import redact_process
from sync.settings import read_settings
from sync.subscribe.subscriber import Subscriber
from sync.transport import (
    TokenGuard,
    check_bind,
    read_message,
    refuse,
    reply,
    token_from_environment,
)
from sync.wire import EvalReport, EvalRequest, Message, ProbeReply, ProbeRequest, RunIdentity, Version

log = logging.getLogger("distill.evaluation.service")

if TYPE_CHECKING:
    from distill.evaluation.evaluation import Evaluation
    from distill.prompts.held_out import PromptSplit

Evaluate = Callable[[Version], "Evaluation"]
Probe = Callable[[ProbeRequest], ProbeReply]


class Bench(NamedTuple):
    """What the loaded models can be asked."""

    evaluate: Evaluate
    probe: Probe


class Weights(Protocol):
    """Where the weights of a version come from."""

    def folder(self, version: Version) -> Path:
        """A model or adapter folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        ...


def app(
    evaluate: Callable[[Version], EvalReport], token: str | None, probe: Probe, claim: Claim
) -> Starlette:
    """The HTTP side: evaluations and probes run one after the other, in a thread.

    The first run that has a version evaluated claims the process.
    """
    busy = asyncio.Lock()

    async def evaluation(request: Request) -> Message:
        wanted = await read_message(request, EvalRequest)
        async with busy:
            return await asyncio.to_thread(evaluate, wanted.version)

    async def figures(request: Request) -> Message:
        wanted = await read_message(request, ProbeRequest)
        async with busy:
            return await asyncio.to_thread(probe, wanted)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    routes = [
        Route("/v1/evaluate", _answered(evaluation), methods=["POST"]),
        Route("/v1/probe", _answered(figures), methods=["POST"]),
        Route("/health", health),
    ]
    guards = [
        Middleware(TokenGuard, token=token),
        Middleware(RunGuard, claim=claim, claiming=("/v1/evaluate",)),
    ]
    return Starlette(routes=routes, middleware=guards)


def _answered(question: Callable[[Request], Awaitable[Message]]) -> Callable[[Request], Awaitable[Response]]:
    """A route that refuses with 409 what cannot be done."""

    async def answer(request: Request) -> Response:
        try:
            return reply(await question(request))
        except DistillError as error:
            log.error("%s", error)
            return refuse(409, str(error))

    return answer


def build(config: RunConfig, weights: Weights, tails: int = 0) -> Bench:
    """Load tokenizer, held-out prompts and teachers; heavy libraries are imported here.

    Version step 0 is the student that the configuration names; `tails` as in `evaluation.evaluate`.
    """
    import torch

    from distill.evaluation.evaluation import Limits, evaluate
    from distill.evaluation.models import end_ids, load_model, load_student
    from distill.evaluation.reference_forward import probe
    from teacher_service.describe import load_tokenizer
    from teacher_service.router import Router

    settings = config.evaluation or EvaluationConfig()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(config.student)
    split = _prompts(config, tokenizer)
    teachers = {
        name: load_model(source, tokenizer, settings.device) for name, source in config.teachers.items()
    }
    ends = end_ids(config.student, tokenizer, config.rollout.stop_token_ids)
    limits = Limits(config.rollout.max_tokens, ends, settings.batch)
    route = Router(config.teachers)

    def evaluate_version(version: Version) -> Evaluation:
        folder = weights.folder(version) if version.step > 0 else None
        student = load_student(config.student, folder, tokenizer, settings.device)
        return evaluate(
            student,
            teachers,
            split.held_out,
            limits,
            route=route.route,
            reward_fn=split.reward_fn,
            seed=config.run.seed,
            version=version,
            tails=tails,
        )

    def probe_models(request: ProbeRequest) -> ProbeReply:
        unknown = request.teachers.keys() - teachers.keys()
        if unknown:
            raise ConfigError(
                f"the evaluator was started without teacher {', '.join(unknown)}: start it from the same file"
            )
        student = load_model(config.student, tokenizer, settings.device)
        return probe(request, student, teachers, config.objective, config.rollout.temperature)

    return Bench(evaluate_version, probe_models)


def _prompts(config: RunConfig, tokenizer: Any) -> PromptSplit:
    from distill.models import longest_sequence
    from distill.prompts.held_out import NOTHING_HELD_OUT, open_prompts

    split = open_prompts(config, tokenizer, longest_sequence(config))
    if not split.held_out:
        raise ConfigError(NOTHING_HELD_OUT)
    return split


class BestKeeper:
    """Marks versions and keeps the best of them, by the configuration's metric, as the folder best/."""

    def __init__(self, config: RunConfig, evaluate: Evaluate, weights: Weights, claim: Claim) -> None:
        """`claim`: the run whose best version it is."""
        self._evaluate, self._weights, self._claim = evaluate, weights, claim
        self._metric = config.evaluation.metric if config.evaluation else "reverse_kl"
        self._target = config.run_dir / "best"
        self._record = config.run_dir / "best.json"

    def __call__(self, version: Version) -> EvalReport:
        report = self._evaluate(version).report
        if self._is_best(report):
            if version.step > 0:
                keep_best(self._weights.folder(version), self._target)
            figures = {**msgspec.to_builtins(report), "version": str(version)}
            write_json(self._record, {**figures, "run_id": self._claim.run_id})
        return report

    def _is_best(self, report: EvalReport) -> bool:
        if not self._record.is_file():
            return True
        known = json.loads(self._record.read_text())
        if known.pop("run_id", None) not in (None, self._claim.run_id):
            return True  # another run left it in this folder
        old = msgspec.convert({**known, "version": Version.parse(known["version"])}, EvalReport)
        return score(report, self._metric) > score(old, self._metric)


def serve(config: RunConfig, host: str, port: int) -> None:
    """Load everything, then answer on host:port until SIGTERM or SIGINT."""
    token = token_from_environment()
    check_bind(host, token)
    import setproctitle

    from distill.evaluation.service import follow

    setproctitle.setproctitle(f"distill evaluator {config.run.name}")
    signal.signal(signal.SIGTERM, _leave)
    claim = Claim(RunIdentity(config.run.name))
    weights = follow(config, claim)
    bench = build(config, weights)
    keeper = BestKeeper(config, bench.evaluate, weights, claim)
    serve_app(app(keeper, token, bench.probe, claim), host, port, grace=5)


def main() -> int:
    """Serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.evaluation.service", description="Evaluate versions."
    )
    parser.add_argument("--config", type=Path, required=True, help="a RunConfig as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    redact_process()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s evaluator %(name)s: %(message)s",
    )
    try:
        serve(read_settings(RunConfig, options.config), options.host, options.port)
    except DistillError as error:
        log.error("%s", error)
        return 2
    return 0


def _leave(*_: object) -> None:
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())


def keep_best(folder: Path, target: Path) -> None:
    """Make `target` a copy of the model in `folder`: a reader finds an old or a new one, never half.

    Between two renames there is none; after a crash there the old one is `.NAME.old`, the new `.NAME.new`.
    """
    pending, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for left in (pending, old):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder, pending)
    if target.exists():
        target.rename(old)
    pending.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def follow(config: RunConfig, claim: Claim) -> Subscriber:
    """The versions of the run that claims this process.

    Raises ConfigError when they do not go through the store.
    """
    if config.weights.transport != "snapshot":
        raise ConfigError(
            f'weights.transport is "{config.weights.transport}" and the evaluator reads the store: '
            'set weights.transport = "snapshot", or evaluation = false'
        )
    return Subscriber(config.subscriber("evaluator"), claim)
