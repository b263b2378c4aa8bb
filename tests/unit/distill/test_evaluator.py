"""The evaluator's HTTP side and what it keeps, with evaluations made up by hand."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import silent
from served_app import at_url
from small_config import make_config
from starlette.applications import Starlette

from distill.evaluation.schedule import HttpEvaluator
from distill.evaluation.service import app, keep
from sync import wire
from sync.base import durable
from sync.base.errors import ConfigError, RemoteError, SnapshotError, Unreachable
from sync.wire import Divergence, EvalReply, EvalReport, EvalRequest, ProbeReply, ProbeRequest, Version
from sync.wire.claims import Claim


def report(version: Version, kl: float) -> EvalReport:
    return EvalReport(version, kl, None, completions=4, tokens=9, truncated=0.0, seconds=0.1)


def replied(request: EvalRequest) -> EvalReply:
    sums = {name: [0.5 * tokens.count for tokens in part] for name, part in request.teachers.items()}
    return EvalReply(request.version, {name: Divergence(True, each) for name, each in sums.items()})


class Folders:
    """Weights protocol: one folder per version, holding its name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: Version) -> Path:
        path = self.root / str(version)
        path.mkdir(exist_ok=True)
        (path / "weights").write_text(str(version))
        return path


async def test_the_best_version_is_kept_with_its_figures_and_replaced_by_the_next_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copytree, tried = shutil.copytree, list[Path]()

    def full(folder: Path, target: Path) -> None:
        tried.append(target)
        if len(tried) == 1:
            raise shutil.Error([(folder, target, "[Errno 28] No space left on device")])
        copytree(folder, target)

    monkeypatch.setattr(shutil, "copytree", full)
    monkeypatch.setattr(durable, "RETRY_SECONDS", 0.01)
    config = make_config(run={"name": "x", "folder": tmp_path})
    config.run_dir.mkdir()
    folders: Any = Folders(tmp_path)
    for step, run in ((0, "1"), (10, "1"), (20, "2")):
        await keep(config, folders, Claim(wire.RunIdentity("x", run)), report(Version(0, step), 0.5))
        known = json.loads((config.run_dir / "best.json").read_text())
        assert (known["version"], known["run_id"], known["reverse_kl"]) == (str(Version(0, step)), run, 0.5)
        if step == 0:
            assert not (config.run_dir / "best").exists(), "it is the model folder"
        else:
            assert (config.run_dir / "best" / "weights").read_text() == str(Version(0, step))


async def no_probe(request: ProbeRequest) -> ProbeReply:
    if request.teachers:
        raise ConfigError("no such teacher")
    return ProbeReply(student=[], teachers={})


async def no_best(report: EvalReport) -> wire.Ok:
    raise SnapshotError(f"{report.version} is not in the store")


def application(evaluate: Callable[[EvalRequest], EvalReply]) -> Starlette:
    """With evaluations that take their time in a thread, as real ones."""
    return app(partial(asyncio.to_thread, evaluate), no_best, no_probe, "", Claim())


async def test_an_evaluation_is_requested_once_however_long_it_takes() -> None:
    requested, looked, long_enough = list[Version](), list[bool](), threading.Event()

    def evaluate(request: EvalRequest) -> EvalReply:
        requested.append(request.version)
        assert long_enough.wait(600)
        return replied(request)

    class Looking(HttpEvaluator):
        stall_timeout_seconds = 0.2

        async def alive(self) -> bool:
            looked.append(await super().alive())
            if len(looked) == 8:  # it looks four times before it gives up
                long_enough.set()
            return looked[-1]

    async with at_url(application(evaluate)) as url, Looking(url) as evaluator:
        request = EvalRequest(version=Version(0, 3))
        assert await evaluator.evaluate(request) == replied(request)
    assert requested == [Version(0, 3)]


async def test_an_evaluator_that_answers_nothing_is_unreachable() -> None:
    problem = "/health has not answered for 0 s while L000-v00000003 was evaluated"
    with silent() as url:
        async with HttpEvaluator(url) as evaluator:
            evaluator.stall_timeout_seconds = 0.2
            with pytest.raises(Unreachable, match=problem):
                await evaluator.evaluate(EvalRequest(version=Version(0, 3)))


async def test_what_the_evaluator_cannot_do_is_refused_at_once_with_the_reason() -> None:
    def evaluate(request: EvalRequest) -> EvalReply:
        raise SnapshotError(f"{request.version} is not in the store")

    async with at_url(application(evaluate)) as url, HttpEvaluator(url) as evaluator:
        for asked, reason in (
            (
                evaluator.evaluate(EvalRequest(version=Version(0, 3))),
                "409: L000-v00000003 is not in the store",
            ),
            (evaluator.keep(report(Version(0, 3), 0)), "409: L000-v00000003 is not in the store"),
            (evaluator.probe(ProbeRequest(student=[], teachers={"x": []}), 600), "409: no such teacher"),
        ):
            with pytest.raises(RemoteError, match=reason):
                await asked
        assert (await evaluator.probe(ProbeRequest(student=[], teachers={}), 600)).teachers == {}


async def test_evaluations_are_made_one_at_a_time_and_one_that_is_asked_for_again_is_not_made_again() -> None:
    """Unless it is of other completions."""
    made, ended = list[Version](), list[Version]()

    def evaluate(request: EvalRequest) -> EvalReply:
        assert made == ended
        made.append(request.version)
        threading.Event().wait(0.05)
        ended.append(request.version)
        return replied(request)

    async with at_url(application(evaluate)) as url, HttpEvaluator(url) as evaluator:
        first, again = await asyncio.gather(
            *(evaluator.evaluate(EvalRequest(Version(0, 3))) for _ in range(2))
        )
        assert first == again
        assert made == [Version(0, 3)]
        tokens = wire.OwnTokens(wire.pack(np.array([5, 6, 7], "i4")), [(1, 3)])
        others = EvalRequest(Version(0, 3), teachers={"t": [tokens]}), EvalRequest(Version(0, 2))
        reply, _ = await asyncio.gather(*map(evaluator.evaluate, others))
    assert reply.teachers == {"t": Divergence(True, [1.0])}
    assert len(made) == 3
