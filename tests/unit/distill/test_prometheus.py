"""Figures by name: GET /metrics of every role over real HTTP, the dashboard, the documents."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dashboard
import httpx
import pytest
from in_memory import MemoryEvaluator, MemoryTrainer
from msgspec.structs import replace
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from served_app import at_url

from distill.aio import cancel
from distill.buffer import Bound, Rules
from distill.controller import Controller
from distill.environments.config import EnvironmentConfig
from distill.environments.service import Service
from distill.evaluation.schedule import HttpEvaluator
from distill.evaluation.service import app
from distill.interfaces import Hooks
from distill.metrics.names import FIGURES, SECTIONS
from distill.metrics.prometheus import Figures, metric
from distill.metrics.summary import flat, of_evaluation, totals
from distill.metrics.timeline import Timeline
from distill.record.changes import Evaluated
from distill.record.state import RunState
from student_trainer.objectives.token_statistics import MEANS
from sync import wire
from sync.base.errors import DistillError, RemoteError
from sync.vllm import metrics as replica_metrics
from sync.wire import Behaviour, Estimate, EvalReport, EvalRequest, Ok, Version
from sync.wire.claims import Claim
from teacher_service.batching import Metrics
from teacher_service.kept import KeptScores

ROOT = Path(__file__).parents[3]
TOKEN = "secret"
BESIDE_MEANS = ["reward_mean", "reward_std", "grad_norm", "lr", "skipped"]
BESIDE_MEANS += ["effective_sample_size", "eos_rate", "tokens"]
OF_STEP = dict.fromkeys([*MEANS, *BESIDE_MEANS, "reverse_kl/t"], 0.5)
HALF = Estimate(0.5, 0.4, 0.6)
EVALUATION = wire.EvalReport(
    version=Version(0, 0), reverse_kl=1.25, pass_rate=0.25, completions=4, tokens=9, truncated=0.0,
    seconds=0.1, reverse_kl_error=0.125, sets={"gsm8k": wire.SetReport(4, 8, 9, 0.0, 0, HALF, HALF, HALF)},
)  # fmt: skip

Series = dict[tuple[str, tuple[str, ...]], float]


def parsed(text: str) -> Series:
    """(name, values of its labels) → value."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(s.labels.values())): s.value for one in families for s in one.samples}


async def scraped(url: str) -> Series:
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/metrics")).status_code == 401
        answer = await client.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return parsed(answer.text)


async def run_of_one_step(run: Controller) -> Series:
    """The controller's metrics after one step, one evaluation and three drops."""
    task, version, after = asyncio.create_task(run.run()), Version(0, 0), Version(0, 1)
    await run.session.hello(wire.TrainerHello(1, None, "model", "test"))
    await run.session.batch(wire.BatchRequest(version, 0, 1))
    await run.session.event(wire.Published(after, "full", bytes=5, full_bytes=20, seconds=0.5))
    seconds = {"wait": 0.5, "train": 2.0, "publish": 0.0, "checkpoint": 0.0}
    await run.session.event(wire.StepReport(after, OF_STEP, seconds))
    run.record.write(Evaluated(EVALUATION))
    counters = run.record.state.counters
    counters.dropped["too_old"], counters.requeued["unusable"] = 3, 2
    async with asyncio.timeout(600):
        while not counters.applied:
            await run.events.changed.wait()
    found = await scraped(run.url)
    await cancel([task])
    return found


@pytest.fixture
async def exported(controller) -> Series:
    return await run_of_one_step(controller(token=TOKEN))


def test_the_controller_exports_every_figure_of_the_run(exported: Series) -> None:
    expected: dict[tuple[str, ...], float] = {
        ("step",): 1,
        ("train_reverse_kl",): 0.5,
        ("train_reverse_kl_by_teacher", "t"): 0.5,
        ("perf_train_seconds",): 2.0,
        ("buffer_age_max",): 0,
        ("buffer_depth",): 1,
        ("rollout_dropped_total", "too_old"): 3,
        ("rollout_requeued_total", "unusable"): 2,
        ("perf_busy_seconds_total", "trainer"): 2.0,
        ("sync_versions_total",): 1,
        ("sync_updates_total",): 1,
        ("train_starts_total",): 1,
        ("sync_bytes_full",): 20,
        ("sync_publish_seconds",): 0.5,
        ("eval_reverse_kl",): 1.25,
        ("eval_pass_at_1", "gsm8k"): 0.5,
        ("teacher_refused_total", "t"): 0,
    }
    assert {key: exported[f"distill_run_{key[0]}", key[1:]] for key in expected} == expected
    assert exported["process_start_time_seconds", ()] > 1e9
    generated, trained = (
        exported[f"distill_run_{name}", ()] for name in ("rollout_tokens_total", "train_tokens_overall")
    )
    assert generated >= trained > 0


def test_counters_count_from_the_start_of_the_process() -> None:
    figures = {"rollout/dropped/too_old": 7.0, "train/tokens_total": 100.0}
    registry = CollectorRegistry()
    registry.register(Figures(lambda: figures))
    figures |= {"rollout/dropped/too_old": 9.0, "rollout/dropped/empty": 1.0, "train/tokens_total": 150.0}
    found = parsed(generate_latest(registry).decode())
    assert found == {
        ("distill_run_rollout_dropped_total", ("too_old",)): 2.0,
        ("distill_run_rollout_dropped_total", ("empty",)): 1.0,
        ("distill_run_train_tokens_overall", ()): 150.0,
    }


def test_a_replica_counts_its_updates() -> None:
    changes = {"read_bytes_total": 100, "stage_seconds_sum": 4, "pause_seconds_sum": 1}
    changes["apply_seconds_count"] = 2

    def values(*names: str) -> list[float]:
        found = parsed(generate_latest(REGISTRY).decode())
        return [found[f"distill_replica_{name}", ()] for name in names]

    before = values(*changes)
    for step in (3, 7):
        replica_metrics.updated(wire.UpdateReply(Version(1, step), 50, 2.0, 0.5, 0.25))
    assert values("version_lineage", "version_step") == [1, 7]
    assert values(*changes) == [*map(sum, zip(before, changes.values(), strict=True))]


@pytest.fixture
async def evaluator() -> Series:
    """Metrics of an evaluator that has kept a version and could not evaluate another."""

    async def keep(report: EvalReport) -> Ok:
        return Ok()

    async def fail(_: object) -> Any:
        raise DistillError("no teacher answers")

    async with at_url(app(fail, keep, fail, TOKEN, Claim()), TOKEN) as url:
        client = HttpEvaluator(url, TOKEN)
        await client.keep(EvalReport(Version(0, 0), 0.5, None, 1, 1, 0.0, 0.0))
        with pytest.raises(RemoteError, match="no teacher answers"):
            await client.evaluate(EvalRequest(version=Version(0, 0)))
        await client.aclose()
        return await scraped(url)


def test_the_evaluator_exports_what_it_did(evaluator: Series) -> None:
    assert evaluator["distill_evaluator_seconds_count", ("best",)] == 1
    assert evaluator["distill_evaluator_refused_total", ("evaluate",)] == 1
    assert ("distill_evaluator_refused_total", ("best",)) not in evaluator


# --- names ------------------------------------------------------------------------------------------------


def families(registry: CollectorRegistry) -> set[str]:
    """Names of our samples, those that have no value yet too."""
    endings = {"counter": ["_total"], "gauge": [""], "summary": ["_count", "_sum"]}
    ours = [one for one in registry.collect() if one.name.startswith("distill_")]
    return {one.name + ending for one in ours for ending in endings.get(one.type, ["_bucket"])}


@pytest.fixture
def names(exported: Series, evaluator: Series) -> set[str]:
    """Every metric that a role of ours exports."""
    teacher = Metrics().registry
    KeptScores(None, 0, 0, teacher)
    environment: Any = SimpleNamespace(name="e", tasks=None)
    service = Service(environment, EnvironmentConfig(environment="a:b"), ("", 1))
    served = {name for name, _ in [*exported, *evaluator]} | families(teacher) | families(REGISTRY)
    served |= families(service.registry)
    return {name for name in served if not name.endswith("_created")}


def test_every_metric_of_the_dashboard_is_exported(names: set[str]) -> None:
    panels, used = json.loads(dashboard.FILE.read_text())["panels"], dashboard.metrics()
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    engine = (Path(folder) / "v1/metrics/loggers.py").read_text()
    assert len(used) > 40
    assert all(f'"{name}"' in (ROOT / "student_trainer/step.py").read_text() for name in BESIDE_MEANS)
    assert not {name for name in used - names if f'name="{name}"' not in engine}
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_document_names_metrics_as_they_are_exported() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    rows = re.findall(r"^\| `([^`]+)`[^|]* \| `(distill_run_\w+)(?:\{([\w,]+)\})?` \|$", page, re.MULTILINE)
    assert len(rows) >= 8
    for figure, name, labels in rows:
        exported = metric(figure)
        assert (exported.name + "_total" * exported.counter, ",".join(exported.labels)) == (name, labels)


def test_every_figure_has_a_metric_of_its_own() -> None:
    found = [metric(re.sub(r"\b[A-Z]+\b", "x", one.name)) for one in FIGURES]
    assert len({one.name for one in found}) == len(FIGURES)
    assert [one.name for one in found if one.name.endswith("_total")] == []


# --- every figure has one documented name: what runs log, the code's table and the documents' table agree


NAMES = [row.name for row in FIGURES]


def rows_of(name: str) -> list[str]:
    return [row.name for row in FIGURES if row.names(name)]


def undocumented(names: Iterable[str]) -> dict[str, list[str]]:
    """Names without a row, or with more than one."""
    return {name: rows for name in names if len(rows := rows_of(name)) != 1}


OCCASIONAL = (
    r"train/(?!tokens_(total|share)).*|perf/checkpoint_seconds|.*(REASON|SET|SOURCE).*|eval/teacher/.*|"
    r"eval/(.*_error|.*_rate|reward)|rollout/turns"
)
"""Of the trainer, of which a run in memory has none; of what need not happen."""


@pytest.mark.virtual_time
async def test_a_run_logs_documented_names_and_all_of_them(controller: Any, config: Any) -> None:
    logged: set[str] = set()
    hooks = Hooks(
        step=lambda _, figures: logged.update(figures),
        evaluated=lambda report, best: logged.update(of_evaluation(report, best)),
    )
    run = controller(config(evaluation={"every": 2}), hooks, evaluator=MemoryEvaluator())
    summary, _ = await asyncio.wait_for(asyncio.gather(run.run(), MemoryTrainer(run.session).run()), 60)
    logged |= flat({section: summary[section] for section in SECTIONS if section in summary}).keys()
    assert undocumented(logged - {"step"}) == {}
    found = {row for name in logged for row in rows_of(name)}
    assert [name for name in NAMES if name not in found and not re.fullmatch(OCCASIONAL, name)] == []


def test_figures_of_sets_and_of_the_trainer_are_documented() -> None:
    part, read = wire.PartReport(1, 1, 2.0, None, 0.5, 0.25), Behaviour(0.5, 2.0, 3.0, 0.0, 1.0)
    parts = {"sources": {"open/maths": part}, "teachers": {"large": part}}
    found = of_evaluation(replace(EVALUATION, reward=0.5, behaviour=read, reference=read, **parts), True)
    assert (found["eval/gsm8k/majority"], found["eval/best"]) == (0.5, 1.0)
    assert (found["eval/source/open_maths/reverse_kl"], found["eval/teacher/large/reward"]) == (2.0, 0.25)
    assert {row for name in found for row in rows_of(name)} == {n for n in NAMES if n.startswith("eval/")}
    plain = of_evaluation(EvalReport(Version(0, 1), 1.0, None, 1, 1, 0.0, 0.0), False)
    assert plain.keys() == {"eval/reverse_kl", "eval/truncated", "eval/best"}
    assert undocumented(f"train/{name}" for name in MEANS.keys() - {"rho_squared_mean"}) == {}
    assert undocumented(["train/reverse_kl/math", "rollout/dropped/too_old", "teacher/t/tokens"]) == {}


def test_turns_are_the_mean_over_episodes_and_left_out_without_them() -> None:
    state = RunState(Rules(1, Bound(0, 0)))
    assert "rollout/turns" not in flat(totals(state, Timeline()))
    state.counters.episodes, state.counters.turns = 2, 5
    assert flat(totals(state, Timeline()))["rollout/turns"] == 2.5
