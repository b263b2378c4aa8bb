"""What a run did, as figures: the controller's part of summary.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import msgspec

from distill.evaluation.schedule import best
from distill.interfaces import Teacher
from distill.metrics.timeline import Timeline
from distill.rollout.replica_pool import ReplicaPool
from distill.run_log.state import RunState
from sync.wire import EvalReport, StepReport


def token_shares(state: RunState) -> dict[str, float]:
    """Generated and trained completion tokens of the whole run, their ratio, and what teachers wrote."""
    generated, trained = state.counters.generated_tokens, sum(state.trained_tokens.values())
    return {
        "generated": generated,
        "trained": trained,
        "trained_share": trained / max(1, generated),
        "generated_by_teacher": state.counters.by_teacher_tokens,
        "trained_by_teacher": sum(state.trained_by_teacher.values()),
    }


def gauges(
    state: RunState, pool: ReplicaPool, timeline: Timeline, teachers: Mapping[str, Teacher]
) -> dict[str, float]:
    """Where the run stands, by name."""
    counters, waited = state.counters, timeline.waited_seconds()
    return {
        "step": float(state.reached.step if state.reached else 0),
        "buffer/ready": float(len(state.buffer)),
        "rollouts/in_flight": float(sum(replica.in_flight for replica in pool.replicas.values())),
        "rollouts/outstanding": float(state.outstanding),
        "rollouts/late": float(counters.late),
        "replicas/serving": float(len(pool.serving())),
        **{f"tokens/{name}": float(value) for name, value in token_shares(state).items()},
        **{f"dropped/{reason}": float(count) for reason, count in counters.dropped.items()},
        **{f"requeued/{reason}": float(count) for reason, count in counters.requeued.items()},
        **{f"busy_seconds/{role}": value for role, value in timeline.busy_seconds().items()},
        **{f"waited_seconds/{who}/{whom}": s for who, rest in waited.items() for whom, s in rest.items()},
        **{f"teachers/{name}/{what}": v for name, t in teachers.items() for what, v in _work(t).items()},
    }


def _work(teacher: Teacher) -> dict[str, float]:
    """What a teacher was asked since this controller started, and how long a request took on average."""
    done = teacher.counters
    return {
        "sequences": float(done.sequences),
        "tokens": float(done.tokens),
        "refused": float(done.refused),
        "request_seconds": done.seconds / max(1, done.requests),
    }


def of_step(state: RunState, report: StepReport) -> dict[str, float]:
    """What one step took, and how old what it trained on was."""
    batch = state.batch_of(report.version.step - 1)
    ages = batch.ages if batch else [0]
    return {
        **{f"seconds/{name}": value for name, value in report.seconds.items()},
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
    }


def summarise(state: RunState, timeline: Timeline, metric: str = "reverse_kl") -> dict[str, Any]:
    """The figures that state and timeline hold; seconds and bytes, medians where there are many."""
    counters, reports = state.counters, state.evaluations
    return {
        "steps": 0 if state.reached is None else state.reached.step,
        "lineages": len(state.lineages),
        "tokens": {**token_shares(state), "dropped": dict(counters.dropped_tokens)},
        "rollouts": {
            "issued": counters.issued,
            "scored": counters.scored,
            "composed": counters.composed,
            "late": counters.late,
            "open": state.outstanding,
            "dropped": dict(counters.dropped),
            "requeued": dict(counters.requeued),
        },
        "staleness": {
            "mean": counters.age_sum / max(1, counters.composed),
            "max": counters.age_max,
            "limit": state.rules.bound.hard,
        },
        "busy_seconds": timeline.busy_seconds(),
        "idle_seconds": timeline.idle_seconds(),
        "waited_seconds": timeline.waited_seconds(),
        "sync": sync_figures(state),
        "evaluations": [evaluation(report) for report in reports],
        "best": evaluation(best(reports, "pass_rate" if metric == "pass_rate" else "reverse_kl")),
    }


def identity(compared: Mapping[str, bool | None]) -> dict[str, Any]:
    """Whether all replicas of a run held the trainer's last weights, from what was found of each.

    true: every one was compared and is equal. false: one differs. null: not shown, since the replicas named
    in `weights_missing` were away when the run ended, or the trainer left without a last word.
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
        "bytes_full": _median(one.full_bytes for one in published),
        "bytes_delta": _median(one.bytes for one in published if one.kind in ("delta", "lora")),
        "bytes_read": _median(one.bytes for one in applied),
        "publish_seconds": _median(one.seconds for one in published),
        "stage_seconds": _median(one.stage_seconds for one in applied),
        "pause_seconds": _median(one.pause_seconds for one in applied),
        "apply_seconds": _median(one.apply_seconds for one in applied),
        "total_seconds": _median(one.seconds for one in applied),
        "updates": state.counters.applied,
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def digest_of_all(digests: Mapping[str, str]) -> str:
    """One SHA-256 for the digests of all tensors of a checkpoint, whatever their order."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def evaluation(report: EvalReport | None) -> dict[str, Any] | None:
    """A report as plain JSON; None stays None."""
    return None if report is None else {**msgspec.to_builtins(report), "version": str(report.version)}
