"""The evaluator's HTTP side and what it keeps, with evaluations made up by hand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_config import make_config
from starlette.applications import Starlette

from distill.evaluation.schedule import HttpEvaluator
from distill.evaluation.service import BestKeeper, app
from distill.trainer_api.http_api import listen, serving
from sync.base.errors import ConfigError, RemoteError, SnapshotError, Unreachable
from sync.wire import (
    CompletionsReply,
    CompletionsRequest,
    EvalReport,
    EvalRequest,
    ProbeReply,
    ProbeRequest,
    RunIdentity,
    Version,
    decode,
    encode,
)
from sync.wire.claims import Claim


def report(version: Version, kl: float, passed: float | None = None) -> EvalReport:
    return EvalReport(
        version=version, reverse_kl=kl, pass_rate=passed, completions=4, tokens=9, truncated=0.0, seconds=0.1
    )


class Folders:
    """Weights protocol: one folder per version, holding its name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: Version) -> Path:
        path = self.root / str(version)
        path.mkdir(exist_ok=True)
        (path / "weights").write_text(str(version))
        return path


def keeper(
    tmp_path: Path, figures: dict[int, tuple[float, float]], metric: str, run_id: str = "1"
) -> BestKeeper:
    config = make_config(run={"name": "x", "folder": tmp_path}, evaluation={"metric": metric})
    config.run_dir.mkdir(exist_ok=True)

    async def evaluate(version: Version) -> EvalReport:
        return report(version, *figures[version.step])

    folders: Any = Folders(tmp_path)
    return BestKeeper(config, evaluate, folders, Claim(RunIdentity("x", run_id)))


@pytest.mark.parametrize(("metric", "best"), [("reverse_kl", 20), ("pass_rate", 30)])
async def test_the_best_version_by_the_metric_is_kept_across_restarts(
    tmp_path: Path, metric: str, best: int
) -> None:
    figures = {0: (1.0, 0.1), 10: (0.5, 0.5), 20: (0.2, 0.6), 30: (0.3, 0.7), 40: (0.4, 0.6)}
    for step in figures:
        await keeper(tmp_path, figures, metric)(Version(0, step))
    assert (tmp_path / "x" / "best" / "weights").read_text() == str(Version(0, best))
    assert json.loads((tmp_path / "x" / "best.json").read_text())["version"] == str(Version(0, best))


async def test_what_another_run_left_as_its_best_does_not_count(tmp_path: Path) -> None:
    figures = {20: (0.2, 0.6), 30: (0.3, 0.7)}
    await keeper(tmp_path, figures, "reverse_kl")(Version(0, 20))
    await keeper(tmp_path, figures, "reverse_kl")(Version(0, 30))
    record = tmp_path / "x" / "best.json"
    assert json.loads(record.read_text())["version"] == str(Version(0, 20))
    later = keeper(tmp_path, figures, "reverse_kl", run_id="2")
    await later(Version(0, 30))
    assert json.loads(record.read_text())["version"] == str(Version(0, 30))
    assert (tmp_path / "x" / "best" / "weights").read_text() == str(Version(0, 30))


async def test_nothing_is_copied_while_the_model_folder_is_the_best(tmp_path: Path) -> None:
    keep = keeper(tmp_path, {0: (0.1, 0.1), 10: (0.5, 0.5)}, "reverse_kl")
    await keep(Version(0, 0))
    await keep(Version(0, 10))
    assert not (tmp_path / "x" / "best").exists()


async def post(client: httpx.AsyncClient, version: Version, token: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return await client.post("/v1/evaluate", content=encode(EvalRequest(version=version)), headers=headers)


async def no_probe(request: ProbeRequest) -> ProbeReply:
    if request.teachers:
        raise ConfigError("no such teacher")
    return ProbeReply(student=[], teachers={})


async def no_completions(request: CompletionsRequest) -> CompletionsReply:
    return CompletionsReply(version=request.version, lost="there is none")


def application(evaluate: Callable[[Version], EvalReport], token: str | None = "") -> Starlette:
    """With evaluations that take their time in a thread, as real ones."""
    threaded = partial(asyncio.to_thread, evaluate)
    return app(no_completions, threaded, no_probe, token, Claim())


def client_of(evaluate: Any, token: str | None = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application(evaluate, token))
    return httpx.AsyncClient(transport=transport, base_url="http://evaluator")


async def test_a_version_is_answered_with_its_report() -> None:
    async with client_of(lambda version: report(version, 0.5)) as client:
        answer = await post(client, Version(1, 60))
        assert decode(answer.content, EvalReport) == report(Version(1, 60), 0.5)
        assert (await client.get("/health")).status_code == 200


async def test_two_evaluations_never_run_at_the_same_time() -> None:
    running, most = 0, 0

    def evaluate(version: Version) -> EvalReport:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads_meet.wait(0.05)
        running -= 1
        return report(version, 0.5)

    threads_meet = threading.Event()
    async with client_of(evaluate) as client:
        answers = await asyncio.gather(*(post(client, Version(0, step)) for step in range(3)))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert most == 1


async def test_the_token_is_needed_but_for_health() -> None:
    async with client_of(lambda version: report(version, 0.5), token="t0ken") as client:
        assert (await post(client, Version(0, 1))).status_code == 401
        assert (await post(client, Version(0, 1), "t0ken")).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_a_probe_is_answered_or_refused_with_the_reason() -> None:
    async with client_of(lambda version: report(version, 0.5)) as client:
        empty = await client.post("/v1/probe", content=encode(ProbeRequest(student=[], teachers={})))
        assert decode(empty.content, ProbeReply).teachers == {}
        refused = await client.post("/v1/probe", content=encode(ProbeRequest(student=[], teachers={"x": []})))
        assert (refused.status_code, refused.json()["error"]) == (409, "no such teacher")


@asynccontextmanager
async def behind_a_url(evaluate: Any) -> AsyncIterator[str]:
    bound = listen("127.0.0.1", 0, None)
    async with serving(application(evaluate), bound):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def test_an_evaluation_is_requested_once_however_long_it_takes() -> None:
    requested: list[Version] = []

    def evaluate(version: Version) -> EvalReport:
        requested.append(version)
        time.sleep(4.0)
        return report(version, 0.5)

    async with behind_a_url(evaluate) as url:
        evaluator = HttpEvaluator(url)
        evaluator.stall_timeout_seconds = 3.0
        assert await evaluator.evaluate(Version(0, 3)) == report(Version(0, 3), 0.5)
        await evaluator.aclose()
    assert requested == [Version(0, 3)]


async def test_an_evaluator_that_answers_nothing_is_unreachable() -> None:
    bound = listen("127.0.0.1", 0, None)
    bound.listen()  # connections are taken, and never answered
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    evaluator = HttpEvaluator(url)
    evaluator.stall_timeout_seconds = 0.2
    with pytest.raises(
        Unreachable, match=r"/health has not answered for 0 s while L000-v00000003 was evaluated"
    ):
        await evaluator.evaluate(Version(0, 3))
    await evaluator.aclose()
    bound.close()


async def test_a_version_that_the_evaluator_refuses_is_refused_at_once() -> None:
    def evaluate(version: Version) -> EvalReport:
        raise SnapshotError(f"{version} is not in the store")

    async with behind_a_url(evaluate) as url:
        evaluator = HttpEvaluator(url)
        with pytest.raises(RemoteError, match="L000-v00000003 is not in the store"):
            await evaluator.evaluate(Version(0, 3))
        await evaluator.aclose()


async def test_an_evaluation_that_is_asked_for_again_is_not_made_again() -> None:
    """Until there may be other completions."""
    made: list[Version] = []

    def evaluate(version: Version) -> EvalReport:
        made.append(version)
        return report(version, 0.1, 0.5)

    async with client_of(evaluate) as client:
        first, again = await asyncio.gather(*(post(client, Version(0, 3)) for _ in range(2)))
        assert first.content == again.content
        assert made == [Version(0, 3)]
        await client.post(
            "/v1/completions", content=encode(CompletionsRequest(version=Version(0, 3), replica="http://r"))
        )
        await post(client, Version(0, 3))
    assert made == [Version(0, 3)] * 2


async def test_generation_ends_when_its_caller_leaves_and_the_next_one_is_served() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def complete(request: CompletionsRequest) -> CompletionsReply:
        if request.version.step:
            return CompletionsReply(version=request.version)
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async def evaluate(version: Version) -> EvalReport:
        raise AssertionError

    bound = listen("127.0.0.1", 0, None)
    async with serving(app(complete, evaluate, no_probe, "", Claim()), bound):
        evaluator = HttpEvaluator(f"http://127.0.0.1:{bound.getsockname()[1]}")
        waiting = asyncio.create_task(
            evaluator.complete(CompletionsRequest(version=Version(0, 0), replica="http://r"))
        )
        await asyncio.wait_for(began.wait(), 60)
        waiting.cancel()
        await asyncio.wait_for(ended.wait(), 60)
        reply = await evaluator.complete(CompletionsRequest(version=Version(0, 1), replica="http://r"))
        assert (reply.version, reply.lost) == (Version(0, 1), None)
        await evaluator.aclose()
