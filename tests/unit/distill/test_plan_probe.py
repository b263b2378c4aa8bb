"""`distill plan --probe` around its run; tests/integration/test_plan_probe.py makes a real one."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from small_config import make_config

import distill
from distill.config import RunConfig
from distill.launch import probe
from distill.trainer_api.guard import Guard
from sync.base.errors import ConfigError, RemoteError
from sync.base.jsonl import JsonLines


async def begun(config: RunConfig, ends: list[float], then: BaseException | None) -> None:
    """In place of a run: its steps end at these seconds, then it fails, or goes on for ever."""
    config.run_dir.mkdir(parents=True)
    lines = JsonLines(config.run_dir / "metrics.jsonl")
    for end in ends:
        lines.write({"step": 1, "time": end, "train/rows": 8})
    if then is not None:
        raise then
    await asyncio.Event().wait()


@pytest.mark.virtual_time
async def test_it_is_stopped_after_its_seconds_and_as_many_steps_as_a_mean_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    async def of_a_run(*ends: float) -> Path:
        monkeypatch.setattr(probe, "run", lambda config, **_: begun(config, [*ends], None))
        return await probe.probe(make_config(), tmp_path / str(ends), said.append)

    enough = 0.0, 1.0, 2.0, 3.0, 4.0, probe.SECONDS
    assert await of_a_run(*enough) == tmp_path / str(enough) / probe.NAME
    assert said[-1] == "6 steps in 40 s"
    for few in (enough[1:], enough[:-1]):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(of_a_run(*few), 3600)


@pytest.mark.virtual_time
async def test_a_run_that_fails_fails_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run", lambda config, **_: begun(config, [], RemoteError("teacher ended")))
    with pytest.raises(RemoteError, match="teacher ended"):
        await probe.probe(make_config(), tmp_path, print)


def test_its_run_leaves_nothing_outside_its_folder(tmp_path: Path) -> None:
    store = {"type": "bucket", "bucket": "acme/weights"}
    config = make_config(
        run={"steps": 900}, weights={"store": store, "codec": "small"}, tracking={"wandb": "online"}
    )
    short = probe.shortened(config, tmp_path)
    assert short.run_dir == tmp_path / "probe"
    assert (short.weights.store.type, short.weights.codec) == ("directory", "small")
    assert (short.tracking.wandb, short.tracking.samples_every, short.evaluation) == ("disabled", 0, None)
    assert (short.trainer.checkpoint_every, short.trainer.checkpoint_minutes) == (0, 0)
    assert short.run.steps == 900


def test_bad_steps_do_not_hold_it(tmp_path: Path) -> None:
    limits = make_config(guard={"max_grad_norm": 0.1, "patience": 1}).guard
    guard = Guard(probe.shortened(make_config(guard=limits.model_dump()), tmp_path).guard)
    assert Guard(limits).look(1, {"grad_norm": 1.0})
    assert not any(guard.look(step, {"loss": math.nan, "grad_norm": 1.0}) for step in range(100))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"student": {"urls": ["http://127.0.0.1:1"]}}, r"student\.urls is set"),
        ({"trainer": {"nodes": 2}}, r"trainer\.nodes is 2"),
        ({"controller": {"trainer": "external"}}, r"controller\.trainer is 'external'"),
        ({"cluster": {"type": "external"}}, r"cluster\.type is 'external'"),
    ],
)
def test_roles_elsewhere_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--probe starts .* and {words}: .*--measured RUN_DIR"):
        probe.check_here(make_config(**section))


def test_a_plan_is_calibrated_by_one_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        distill.plan(make_config(), measured=tmp_path, probe=True)
