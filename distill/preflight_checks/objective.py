"""The objective against its teachers: the default's arithmetic, and what an engine cannot serve.

`resolve` runs once, before everything else; what it chose is written into the run's config.json.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from distill.config import RunConfig
from distill.model_facts import has_experts, precision
from distill.prompts.sources import text_config
from student_trainer.objectives.config import (
    Auto,
    Full,
    ObjectiveConfig,
    Own,
    Rewards,
    Sampled,
    TopK,
    needs,
    student_topk,
    teacher_temperature,
)
from sync.base.errors import ConfigError, how_it_ended
from sync.wire import PARTED_BYTES
from sync.wire.client import MAX_ANSWER
from teacher_service.config import CAPABILITIES, ENGINES, TeacherConfig
from teacher_service.engines.base import MAX_TOPK

GB: Final = 1e9
FULL_STEP_BYTES: Final = 2 * GB
"""Scores of a step up to which `full` is the default: a second or two from one teacher to one rank."""
MISMATCH, MISMATCH_EXPERTS = 0.02, 0.05
"""Defaults of preflight.mismatch_tolerance. Rounding moves a routed token to another expert: without routing
replay KL(μ‖p) was 1.6e-3 to 7.5e-3 for 16 experts, 11 to 37 % of the tokens with another route."""


class Resolved(NamedTuple):
    """A configuration with nothing left open, and what was chosen, in words."""

    config: RunConfig
    lines: list[str]


def resolve(config: RunConfig) -> Resolved:
    """Choose the objective and the tolerance that the file leaves out, and say what it leaves to us.

    Raises ConfigError when a model's config, on which a choice depends, cannot be read.
    """
    chosen, lines = with_objective(config)
    if chosen.preflight.mismatch_tolerance is None:
        routed = has_experts(text_config(chosen.student))
        tolerance = MISMATCH_EXPERTS if routed else MISMATCH
        chosen = chosen.with_(preflight={"mismatch_tolerance": tolerance})
        if routed:
            lines.append(f"preflight.mismatch_tolerance = {tolerance:g}: the student has experts")
    if chosen.by_text and needs(chosen.objective).topk and chosen.buffer.scores == "auto":
        chosen = chosen.with_(buffer={"scores": "inline"})
        lines.append("buffer.scores: inline (auto, a teacher's ids become the student's in the controller)")
    if chosen.weights.kv_on_swap == "auto":
        kept = "keep" if chosen.keeps_cache else "recompute"
        lines.append(f"weights.kv_on_swap: {kept} (auto, at trainer.lr = {chosen.trainer.lr:g})")
    if (evaluation := chosen.evaluation) and evaluation.metric == "auto" and chosen.metric == "reward":
        weight = f"at objective.coefficient = {chosen.objective.coefficient:g}, where the task's reward alone"
        why = f"{weight} counts" if chosen.teachers else "there is no teacher"
        lines.append(f"evaluation.metric: reward (auto, {why})")
    return Resolved(chosen, lines)


def with_objective(config: RunConfig) -> Resolved:
    """The configuration with another objective than Auto; one that names its own is left as it is."""
    if isinstance(config.objective, Rewards):
        return Resolved(config, ['objective: "rewards", no teacher: nothing is scored'])
    if not isinstance(config.objective, Auto):
        return Resolved(config, [f"objective: {_costs(config, config.objective)}"])
    mixing = {name: getattr(config.objective, name) for name in Auto.model_fields if name != "type"}
    full, topk = Full(**mixing), TopK(**mixing)
    step_tokens = config.rollout.batch * config.rollout.max_tokens
    unserved = [
        f"engine {teacher.engine!r} of teacher {name!r} gives no hidden states"
        for name, teacher in config.teachers.items()
        if "hidden" not in can(teacher)
    ]
    chosen: ObjectiveConfig
    if by_text := config.by_text:
        kind = TopK if all("topk" in can(teacher) for teacher in config.teachers.values()) else Sampled
        fields = {name: value for name, value in mixing.items() if name in Sampled.model_fields}
        chosen, reason = kind(**fields), f"teacher {by_text[0]!r} has a tokenizer of its own"
        if terms := _further(config.objective):
            reason += f", so without what compares single tokens: {terms}"
    elif unserved:
        chosen, reason = topk, unserved[0]
    elif (step := score_bytes(config, full) * step_tokens) > FULL_STEP_BYTES:
        chosen, reason = topk, f"{_costs(config, full)}, more than {FULL_STEP_BYTES / GB:g} GB"
    else:
        chosen, reason = full, f"{step / GB:.2f} GB a step is at most {FULL_STEP_BYTES / GB:g} GB"
    if terms := _further(chosen):
        reason += f"; {terms}: see docs/objectives.md"
    line = f"objective: {_costs(config, chosen)} (objective.type is not set, and {reason})"
    return Resolved(config.with_(objective=chosen), [line])


def _further(objective: ObjectiveConfig) -> str:
    """The terms of an objective beside its reverse divergence, as their keys say; "": there are none."""
    weights = ((name, getattr(objective, name, 0)) for name in ("forward", "ends"))
    return ", ".join(f"objective.{name} = {weight:g}" for name, weight in weights if weight)


# --- bytes


def score_bytes(config: RunConfig, objective: ObjectiveConfig) -> int:
    """Bytes of a completion token's scores on the wire, of the widest teacher.

    Raises ConfigError when the config of a teacher, whose hidden states are sent, cannot be read.
    """
    want, gathered = needs(objective), student_topk(objective)
    logprob, id_, half = 4, 4, 2
    numbers = {name: half if t.wire_dtype == "float16" else 4 for name, t in config.teachers.items()}
    number = max(numbers.values(), default=half)
    topk = want.topk * (id_ + number)
    hidden = max(_hidden_bytes(name, t) for name, t in config.teachers.items()) if want.hidden else 0
    parted = PARTED_BYTES if want.topk and config.by_text else 0
    return logprob + 4 * want.entropy + topk + parted + gathered * number + hidden


def _hidden_bytes(name: str, teacher: TeacherConfig) -> int:
    """Bytes of a position's hidden state, or a row of the head: bf16 as it is, else fp32."""
    try:
        model = text_config(teacher)
    except ConfigError as error:
        raise ConfigError(
            f"objective: the bytes of teachers.{name}'s hidden states follow its config.json: set "
            f'objective.type = "topk", or make its config readable here. {error}'
        ) from None
    return int(model.hidden_size) * (2 if precision(model, teacher.dtype) == "bfloat16" else 4)


def too_large(config: RunConfig, vocab: int) -> Iterator[str]:
    """Ids beyond the `vocab` of the student, and output heads of teachers that fit into no answer."""
    if (k := max(needs(config.objective).topk, student_topk(config.objective))) > vocab:
        yield (
            f"objective.k is {k} and the student's tokenizer has {vocab} ids: set objective.k = {vocab} or "
            'less, or objective.type = "full"'
        )
    for name, teacher in config.teachers.items() if needs(config.objective).hidden else ():
        if (size := vocab * _hidden_bytes(name, teacher)) >= MAX_ANSWER:
            yield (
                f"teachers.{name}: its output head takes {size / GB:.1f} GB as it is sent, an answer holds "
                f'{MAX_ANSWER / GB:.1f} GB: set its dtype = "bfloat16" if it has another, or '
                'objective.type = "topk"'
            )


def _costs(config: RunConfig, objective: ObjectiveConfig) -> str:
    token, rollout = score_bytes(config, objective), config.rollout
    step = token * rollout.batch * rollout.max_tokens / GB
    return (
        f'"{objective.type}" takes {token:,} bytes a token from the teacher, {step:.2f} GB a step of '
        f"{rollout.batch:,} x {rollout.max_tokens:,} tokens or fewer"
    )


def try_own(objective: Own) -> None:
    """Call the user's function once, in a process of its own: torch is not for this one.

    Raises ConfigError with its problem.
    """
    command = [sys.executable, "-P", "-m", "student_trainer.objectives.try_own", objective.model_dump_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ConfigError(done.stderr.strip()[-2000:] or f"{objective.name} {how_it_ended(done.returncode)}")


# --- engines


def can(teacher: TeacherConfig) -> tuple[str, ...]:
    """The most that a teacher of this configuration serves; an own engine is asked once it is loaded."""
    offered = {*teacher.kind.can}
    if teacher.generate_url is not None:
        offered.add("generate")
    if teacher.follow_student_every is not None:  # its head moves
        offered.discard("hidden")
    if teacher.tokenizer == "own":  # of others' ids it knows nothing
        offered -= {"hidden", "gather"}
    return tuple(name for name in CAPABILITIES if name in offered)


def teacher_topk(config: RunConfig) -> int:
    """Ids per position that teachers choose, also in place of a student's when kept scores are lost."""
    want, k = needs(config.objective), student_topk(config.objective)
    return want.topk or (k if config.buffer.by_reference(want.bulk_bytes(k, 0)) else 0)


def too_many(config: RunConfig, limit: int) -> str | None:
    """What to change where the objective needs more ids per position than the `limit` of a teacher."""
    if (k := teacher_topk(config)) <= limit:
        return None
    inline = ' or buffer.scores = "inline"' if student_topk(config.objective) else ""
    rule = f"objective.k is {k}, and it gives at most {limit} ids per position"
    return f"{rule}: set objective.k = {limit}{inline}"


def lacking(config: RunConfig, can: Sequence[str]) -> list[str]:
    """What the objective needs and an engine that gives `can` does not."""
    want = needs(config.objective, config.rollout.temperature)
    needed = {
        "topk": teacher_topk(config) > 0,
        "hidden": want.hidden,
        "gather": student_topk(config.objective) > 0,
        "generate": config.objective.on_policy < 1,
        "temperature": want.temperature != 1.0,
    }
    return [name for name, required in needed.items() if required and name not in can]


def remedy(config: RunConfig, can: Sequence[str]) -> str:
    """The nearest that an engine which gives `can` serves: keys and their values."""
    missing, changes = lacking(config, can), []
    if missing == ["topk"] and student_topk(config.objective):
        return 'buffer.scores = "inline"'
    if {"topk", "hidden", "gather"} & {*missing}:
        changes.append(f'objective.type = "{"topk" if "topk" in can else "sampled"}"')
    if "temperature" in missing:
        changes.append('objective.teacher_temperature = "one"')
    if "generate" in missing:
        changes.append("objective.on_policy = 1")
    return " and ".join(changes)


def _unlike(config: RunConfig) -> str | None:
    """What to change where the objective is not for a teacher with other tokens."""
    chosen = config.objective
    if not needs(chosen).topk:
        return None
    if not isinstance(chosen, TopK) or _further(chosen):
        what = _further(chosen) or f'"{chosen.type}"'
        return f'{what} compares single tokens: set objective.type = "topk" with forward and ends = 0'
    if config.buffer.scores == "reference":
        return 'its ids become the student\'s in the controller: set buffer.scores = "inline"'
    return None


def unserved(config: RunConfig) -> Iterator[str]:
    """A line for each teacher whose engine cannot serve the objective."""
    temperature = teacher_temperature(config.objective, config.rollout.temperature)
    for name, teacher in config.teachers.items():
        capabilities = can(teacher)
        if missing := lacking(config, capabilities):
            needs = ", ".join(missing).replace("temperature", f"temperature {temperature:g}")
            instead = ""
            if missing == ["generate"]:
                instead = f", or teachers.{name}.generate_url to a vLLM server of its model"
            elif not lacking(config, can(teacher.model_copy(update={"engine": "transformers"}))):
                instead = f", or teachers.{name}.engine = 'transformers'"
            other = " (it has a tokenizer of its own)" if teacher.tokenizer == "own" else ""
            yield (
                f'objective "{config.objective.type}" needs {needs}, and engine {teacher.engine!r} of '
                f"teacher {name!r}{other} gives {', '.join(capabilities)}: "
                f"set {remedy(config, capabilities)}{instead}"
            )
        elif teacher.tokenizer == "own" and (problem := _unlike(config)):
            yield f"teacher {name!r} has a tokenizer of its own, and {problem}"
        elif teacher.engine in ENGINES and (problem := too_many(config, MAX_TOPK)):
            yield f"teacher {name!r}: {problem}"
