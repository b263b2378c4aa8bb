"""From a configuration to what a step takes: stages, step, age, weight sync, journal, hours.

step     the longest of: each stage; each GPU's stages one after the other (run.share_gpus; CPU cores);
         with buffer.max_staleness = 0 all stages one after the other; all of it / overlap
age      buffer.max_staleness, where the replicas wait for room; where they are the bottleneck at most
         rollouts in flight / rollout.batch, and half the steps between two versions
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from distill.config import RunConfig
from distill.config.prompts import EnvironmentPrompts
from distill.planning.hardware import CPU, Device
from distill.planning.roles import REPLICAS, TRAINER, Role, find_roles, gpus
from distill.planning.stages import Generation, Shape, delta_share, most_in_flight, shape_of, train_factor
from distill.preflight_checks.devices import VLLM_SHARE, WORKSPACE, Use
from distill.preflight_checks.machine import DAY, GIB, bytes_per_token, full_bytes, item_bytes
from distill.prompts.sources import student_limit, text_config

ASSUMED_PROMPT: Final = 512
"""Tokens of a prompt, where prompts.max_prompt_tokens does not bound them."""
GENERATE, SCORE, TRAIN = "generate", "score", "train"


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a sequence."""

    prompt: float
    completion: float
    source: str
    """Where they come from, in words."""


@dataclass(frozen=True)
class Calibration:
    """What a plan assumes beside the device's row; a run (`distill.planning.measured`) replaces it."""

    speed: Mapping[str, float] = field(default_factory=dict)
    """Stage → how many times faster than planned from the row; 1 where it is not named."""
    overlap: float = 1.0
    """Planned over measured seconds of a step, with the measured stages."""
    delta: float | None = None
    """Bytes of a delta over those of a full snapshot; None: `delta_share`."""


@dataclass(frozen=True)
class Stage:
    """One role's part of a step."""

    role: str
    kind: str
    """generate, score or train."""
    flops: float
    seconds: float
    devices: float


@dataclass(frozen=True)
class Plan:
    """What one configuration takes. Bytes, seconds, tokens; per optimizer step where nothing else is said."""

    device: str
    lengths: Lengths
    tokens: float
    """Completion tokens."""
    in_flight: float
    """Completions, in all replicas."""
    stages: list[Stage]
    step_seconds: float
    episodes: bool
    """Rollouts are episodes, and `prompt` of `lengths` holds the environment's tokens."""
    by_teachers: float
    """Share of the completions that teachers generate, in no stage."""
    overlapping: bool
    """false: buffer.max_staleness is 0, and a stage begins when the one before has ended."""
    age: float
    full_bytes: float
    """Of a version: anchors, or every version of a broadcast."""
    delta_bytes: float | None
    """None: every version is sent whole."""
    journal_bytes_a_day: float
    hours: float
    gpus: int

    @property
    def longest(self) -> dict[str, float]:
        """Stage → seconds, of several teachers the longest."""
        stages = sorted(self.stages, key=lambda stage: stage.seconds)
        return {stage.kind: stage.seconds for stage in stages}

    @property
    def slowest(self) -> list[Stage]:
        """The stages, the bottleneck first."""
        return sorted(self.stages, key=lambda stage: -stage.seconds)


def lengths_of(
    config: RunConfig, prompt: float | None, completion: float | None, run: Lengths | None = None
) -> Lengths:
    """Given lengths; for what is not given those of a measured run, else upper bounds or an assumption."""
    if run is not None:
        source = run.source + (", as far as not given" if prompt or completion else "")
        return Lengths(prompt or run.prompt, completion or run.completion, source)
    if isinstance(config.prompts, EnvironmentPrompts) and not (prompt and completion):
        episode = _episode(config)
        source = episode.source + (", as far as not given" if prompt or completion else "")
        return Lengths(prompt or episode.prompt, completion or episode.completion, source)
    longest = getattr(config.prompts, "max_prompt_tokens", None)
    room = student_limit(config) - config.rollout.max_tokens
    words = {
        "prompt": "given" if prompt else f"prompts.max_prompt_tokens {longest}" if longest else "assumed",
        "completion": "given" if completion else "rollout.max_tokens, as if none ended early",
    }
    source = ", ".join(f"{name}: {word}" for name, word in words.items())
    chosen = prompt or float(longest or min(ASSUMED_PROMPT, max(1, room)))
    return Lengths(chosen, completion or float(config.rollout.max_tokens), source)


def _episode(config: RunConfig) -> Lengths:
    """Of the longest episodes; the environment's tokens count to the prompt."""
    assert isinstance(config.prompts, EnvironmentPrompts), "rollouts are episodes"
    name, room = config.prompts.environment, student_limit(config)
    environment = config.environments[name]
    whole = min(room, environment.max_tokens or room)
    student_tokens = min(environment.max_turns * config.rollout.max_tokens, whole - 1)
    source = f"episodes of {environment.max_turns} turns of environments.{name}, as if none ended early"
    return Lengths(float(whole - student_tokens), float(student_tokens), source)


def plan(
    config: RunConfig,
    device: Device,
    uses: Sequence[Use],
    lengths: Lengths,
    measured: Calibration | None = None,
) -> Plan:
    """The plan of a configuration whose objective is chosen. Raises ConfigError for unreadable models and for
    roles without known GPUs."""
    roles, calibration = find_roles(config, device, uses), measured or Calibration()
    total, batch = lengths.prompt + lengths.completion, config.rollout.batch
    student = shape_of(config.student, int(config.student.flags().get("tensor-parallel-size", 1)))
    generation = _generation(config, device, roles[REPLICAS], student, lengths)
    by_student = batch * config.objective.on_policy
    swaps = (by_student > 0 and not config.keeps_cache) / config.weights.publish_every
    stages = [
        Stage(
            REPLICAS,
            GENERATE,
            generation.flops(by_student, swaps),
            generation.seconds(by_student, swaps),
            roles[REPLICAS].devices,
        )
    ]
    rate = device.flops_per_second
    for name, teacher in config.teachers.items():
        if role := roles.get(f"teacher {name}"):
            flops = batch / len(config.teachers) * shape_of(teacher).forward(total)
            stages.append(Stage(role.name, SCORE, flops, flops / (role.devices * rate), role.devices))
    trainer, devices = config.trainer, roles[TRAINER].devices
    factor = train_factor(trainer.activation_checkpointing, trainer.lora is not None)
    flops = factor * batch * student.forward(total)
    stages.append(Stage(TRAINER, TRAIN, flops, flops / (devices * rate), devices))
    stages = [
        replace(stage, seconds=stage.seconds / calibration.speed.get(stage.kind, 1.0)) for stage in stages
    ]
    step = step_seconds(config, stages, roles) / calibration.overlap
    full, delta = version_bytes(config, student.parameters, calibration.delta)
    in_flight = generation.in_flight * generation.replicas * (by_student > 0)
    tokens = batch * lengths.completion
    return Plan(
        device.name,
        lengths,
        tokens,
        in_flight,
        stages,
        step,
        isinstance(config.prompts, EnvironmentPrompts),
        1 - config.objective.on_policy,
        config.buffer.max_staleness > 0,
        _age(config, stages, in_flight),
        full,
        delta,
        bytes_per_token(config) * tokens / step * DAY,
        config.run.steps * step / 3600,
        0 if device.name == CPU else gpus(config, uses),
    )


def _generation(config: RunConfig, device: Device, role: Role, shape: Shape, lengths: Lengths) -> Generation:
    student, rollout = config.student, config.rollout
    flags, devices = student.flags(), role.devices / role.processes
    item = item_bytes(text_config(student), student.dtype)
    context = lengths.prompt + lengths.completion / 2
    ahead = (config.buffer.max_staleness + 1) * rollout.batch / role.processes
    limits = [rollout.max_in_flight, int(flags.get("max-num-seqs", device.sequences)), ahead]
    if device.name != CPU:
        size = (config.preflight.gpu_gib or device.gib) * GIB
        memory = devices * size * float(flags.get("gpu-memory-utilization", VLLM_SHARE))
        reserved = item * shape.parameters + devices * WORKSPACE
        limits.append(most_in_flight(memory, reserved, context * shape.kv))
    return Generation(
        shape,
        item,
        lengths.prompt,
        lengths.completion,
        role.processes,
        devices,
        min(limits),
        device.flops_per_second,
        device.bytes_per_second,
    )


def step_seconds(config: RunConfig, stages: Sequence[Stage], roles: Mapping[str, Role]) -> float:
    """Seconds of a step whose stages overlap as far as staleness and shared devices allow."""
    if config.buffer.max_staleness == 0:
        by_kind: dict[str, float] = defaultdict(float)
        for stage in stages:
            by_kind[stage.kind] = max(by_kind[stage.kind], stage.seconds)
        return sum(by_kind.values())
    busy: dict[object, float] = defaultdict(float)
    for stage in stages:
        for place, share in roles[stage.role].load.items():
            busy[place] += share * stage.seconds
    return max(*(stage.seconds for stage in stages), *busy.values())


def _age(config: RunConfig, stages: Sequence[Stage], in_flight: float) -> float:
    """Mean versions between the oldest token of a rollout and the step that trains on it."""
    bound = float(config.buffer.max_staleness)
    if max(stages, key=lambda stage: stage.seconds).kind != GENERATE:
        return bound
    return min(bound, in_flight / config.rollout.batch + (config.weights.publish_every - 1) / 2)


def version_bytes(
    config: RunConfig, parameters: float, measured: float | None = None
) -> tuple[float, float | None]:
    """(full, delta) bytes of a version as published; adapters are sent whole. `measured`: delta over full."""
    trainer, weights = config.trainer, config.weights
    full = full_bytes(config, parameters)
    if trainer.lora is not None or weights.transport == "broadcast":
        return full, None
    share = measured or delta_share(trainer.lr, weights.codec, weights.publish_every)
    return full, share * full
