"""From a configuration to what a step takes: roles, stages, step, age, weight sync, record, hours.

n: tokens of a sequence, p of its prompt, c of its completion. N: parameters that multiply a token. L: layers.
A: heads x head width. F: FLOP/s and M: bytes/s of one device, with the assumed or measured share in them.

    forward(n)      2 N n + 2 L A n²                    FLOPs of a causal pass: products, then attention
    score           batch x forward(p + c) / (devices x F)
    train           f x batch x forward(p + c) / (devices x F), f: `train_factor`
    generate        prefill, decode, and prefill again of what runs at a swap, which is all that may be in
                    flight, times the part of a step in which replicas generate; `Generation`

Left out: completions that teachers generate (objective.on_policy < 1), ZeRO-3's gathers, pipeline bubbles,
the optimizer's update, the teacher's head in the objective, tails of batches whose completions differ in
length, restarts, checkpoints and evaluations.

    step    the longest of: each stage; each GPU's stages one after the other (run.share_gpus; CPU cores);
            with buffer.max_staleness = 0 all stages one after the other; all of it / overlap
    ahead   batches that may be generated beyond the one in training: buffer.max_staleness, or 1 where
            buffer.depth is "adaptive", which begins there and stays there while replicas keep up
    age     `ahead`, where the replicas wait for room; where they are the bottleneck at most rollouts in
            flight / rollout.batch, and half the steps between two versions
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import mean
from typing import Final

from distill.config import RunConfig
from distill.config.prompts import EnvironmentPrompts, JsonlPrompts
from distill.hardware import CPU, Device, cores
from distill.metrics.summary import threads
from distill.model_facts import Shape, item_bytes, shape_of
from distill.preflight_checks.devices import VLLM_SHARE, WORKSPACE, Use
from distill.preflight_checks.machine import DAY, GIB, bytes_per_token, full_bytes, published_item
from distill.prompts.rows import RowReader, jsonl_rows
from distill.prompts.sources import student_limit, text_config
from distill.topology import EACH_NODE, HERE, STUDENT, TRAINER, Process, parallel, processes
from student_trainer.launch import machines
from sync.base.errors import ConfigError
from sync.base.memory import threads_in
from sync.base.tokenizers import load_tokenizer
from teacher_service.config import TeacherConfig

SAMPLED: Final = 256
"""Rows of a file whose prompts a plan measures."""
ASSUMED_PROMPT: Final = 512
"""Tokens of a prompt, where prompts.max_prompt_tokens does not bound them."""
LEAST_SHARE: Final = 1e-7
"""By which the part of a step that replicas generate falls where it is no longer computed anew."""
GENERATE, SCORE, TRAIN = "generate", "score", "train"

# --- stages: arithmetic on shapes


def train_factor(checkpointing: bool, adapters: bool) -> int:
    """Forward passes that a training step costs: 1, and 1 each for gradients of activations, of weights (not
    with adapters), and for activations that are computed again."""
    return 2 + (not adapters) + checkpointing


@dataclass(frozen=True)
class Generation:
    """Replicas with continuous batching; each has `in_flight` sequences of a mean context of p + c / 2."""

    shape: Shape
    item: int
    """Bytes of a weight."""
    lengths: Lengths
    role: Role
    """Whose devices share weights and KV cache of each replica."""
    in_flight: float
    device: Device

    @property
    def context(self) -> float:
        return self.lengths.prompt + self.lengths.completion / 2

    def decode_step(self) -> float:
        """Seconds: memory-bound, (item x weights read + in_flight x context x KV bytes) / (devices x M), or
        compute-bound, in_flight x 2 N / (devices x F), whichever is longer."""
        moved = self.item * self.shape.read(self.in_flight) + self.in_flight * self.context * self.shape.kv
        computed = self.in_flight * 2 * self.shape.active
        moving = moved / (self.device.bandwidth * self.device.bandwidth_share)
        slowest = max(moving, computed / self.device.flops_per_second(self.item))
        return slowest / (self.role.devices / self.role.processes)

    def seconds(self, batch: float, swaps: float) -> float:
        """Of all replicas together for a batch: decode, prefill, and at each swap that drops the KV cache the
        prefill of all in flight; `swaps`: of those, per step."""
        decode = batch * self.lengths.completion / (self.role.processes * self.in_flight) * self.decode_step()
        prefill = batch * self.shape.forward(self.lengths.prompt) + self._again(swaps)
        return decode + prefill / (self.role.devices * self.device.flops_per_second(self.item))

    def flops(self, batch: float, swaps: float) -> float:
        """As `seconds`, in FLOPs."""
        return batch * self.shape.forward(self.lengths.prompt + self.lengths.completion) + self._again(swaps)

    def _again(self, swaps: float) -> float:
        return swaps * self.role.processes * self.in_flight * self.shape.forward(self.context)


# --- bytes of a version

DELTA_RATES: Final = (1e-6, 3e-6, 1e-5, 5e-5)
FAST: Final = (0.0105, 0.0247, 0.0562, 0.155)
DELTA_BYTES: Final = {"auto": FAST, "fast": FAST, "small": (0.00659, 0.0165, 0.0382, 0.109)}
"""Bytes per parameter of a delta one step apart at these learning rates, at 101 M parameters
(docs/benchmarks.md)."""
DELTA_GROWTH: Final = 0.7
"""Exponent of the steps between two versions: eight times the steps gave 2.7 to 4.7 times the bytes there."""


def delta_share(rate: float, codec: str, steps: int) -> float:
    """Bytes of a delta over those of a full snapshot, 2 a parameter.

    Log-linear between the table's rates, and its first or last value outside of them.
    """
    import numpy as np

    at_one = np.exp(np.interp(np.log(rate), np.log(DELTA_RATES), np.log(DELTA_BYTES[codec])))
    return float(min(1.0, at_one / 2 * steps**DELTA_GROWTH))


# --- roles: which computes on how many devices, by the preflight's placement

Place = tuple[str, str]
"""(host, GPU); all cores of this machine are one place."""


@dataclass(frozen=True)
class Role:
    """All processes of a role."""

    name: str
    processes: int
    devices: float
    """That compute at the same time, of all processes together."""
    load: Mapping[Place, float]
    """Place → share of it that is taken while the role works."""


def find_roles(config: RunConfig, device: Device, uses: Sequence[Use]) -> dict[str, Role]:
    """`student`, `teacher NAME` of each and `trainer`, by name; a teacher behind `engine_url` is left out.

    On cores: threads as configured, else as OMP_NUM_THREADS says; else a replica has one, others have all.
    Raises ConfigError for a role whose GPUs are not known.
    """
    all_cores, threads_of = cores(), threads(config)
    groups: dict[str, list[Process]] = defaultdict(list)
    for process in processes(config):
        name = process.section if process.section in (STUDENT, TRAINER) else ""
        if isinstance(process.place, TeacherConfig) and process.place.engine_url is None:
            name = f"teacher {process.subject}"
        if name:
            groups[name].append(process)
    roles = {}
    for name, group in groups.items():
        section, place = group[0].section, group[0].place
        machines_each = machines(config.trainer) if place is None else 1
        if device.name == CPU:
            count = machines_each * (config.trainer.ranks if place is None else len(group))
            default = threads_in(os.environ) or (1 if name == STUDENT else all_cores)
            each = threads_of[name] or default
            taken = min(all_cores, count * each)
            roles[name] = Role(name, count, taken, {(HERE, CPU): taken / all_cores})
            continue
        if not (used := [use for use in uses if use.key == f"{section}.devices"]):
            raise ConfigError(
                f"{section}.devices is not set, and no GPU of this machine is seen that {name} would "
                f"inherit: name the GPUs in {section}.devices, or plan for cores with --device {CPU}"
            )
        serial = isinstance(place, TeacherConfig) and place.kind.computes != "vllm"  # a GPU after the other
        count = sum(len(use.gpus) for use in used) * machines_each
        load = {(use.host, gpu): 1 / len(use.gpus) if serial else 1.0 for use in used for gpu in use.gpus}
        roles[name] = Role(name, len(used), len(used) if serial else count, load)
    return roles


def gpus(config: RunConfig, uses: Sequence[Use]) -> int:
    """GPUs of the run, each counted once; those of every trainer node."""
    places = {(use.host, gpu) for use in uses for gpu in use.gpus}
    there = sum(host == EACH_NODE for host, _ in places)
    return len(places) + there * (machines(config.trainer) - 1)


# --- the plan


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
    record_bytes_a_day: float
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
    """Given lengths; for what is not given those of a measured run, else of the prompts in a local file, else
    upper bounds or an assumption. Of an episode the longest; the environment's tokens count to the prompt.

    Raises DataError for a file that cannot be used.
    """
    if run is not None:
        source = run.source + (", as far as not given" if prompt or completion else "")
        return Lengths(prompt or run.prompt, completion or run.completion, source)
    prompts, room = config.prompts, student_limit(config)
    if isinstance(prompts, EnvironmentPrompts) and not (prompt and completion):
        name, environment = prompts.environment, config.environments[prompts.environment]
        whole = min(room, environment.max_tokens or room)
        answers = min(environment.max_turns * config.rollout.max_tokens, whole - 1)
        source = f"episodes of {environment.max_turns} turns of environments.{name}, as if none ended early"
        source += ", as far as not given" if prompt or completion else ""
        return Lengths(prompt or float(whole - answers), completion or float(answers), source)
    longest, known = getattr(prompts, "max_prompt_tokens", None), None
    room -= config.rollout.max_tokens
    bound = f"prompts.max_prompt_tokens {longest}" if longest else "assumed"
    if not prompt and isinstance(prompts, JsonlPrompts) and prompts.path.is_file():
        rows = RowReader(prompts, load_tokenizer(config.student), room)
        lengths = [len(row.token_ids) for row in rows.prompts(islice(jsonl_rows(prompts.path), SAMPLED))]
        known = mean(lengths) if lengths else None
    words = {
        "prompt": "given" if prompt else f"mean of the first {SAMPLED} rows" if known else bound,
        "completion": "given" if completion else "rollout.max_tokens, as if none ended early",
    }
    source = ", ".join(f"{name}: {word}" for name, word in words.items())
    chosen = prompt or known or float(longest or min(ASSUMED_PROMPT, max(1, room)))
    return Lengths(chosen, completion or float(config.rollout.max_tokens), source)


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
    batch = config.rollout.batch
    student = shape_of(config.student, parallel(config.student.engine_args)[0])
    generation = _generation(config, device, roles[STUDENT], student, lengths)
    by_student, speed = batch * config.objective.on_policy, calibration.speed
    stages = _stages(config, device, roles, student, generation)
    stages = [replace(stage, seconds=stage.seconds / speed.get(stage.kind, 1.0)) for stage in stages]
    longest = step_seconds(config, stages, roles)
    step = longest / calibration.overlap
    full, delta = version_bytes(config, student.parameters, calibration.delta)
    in_flight = generation.in_flight * roles[STUDENT].processes * (by_student > 0)
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
        _age(config, stages[0].seconds >= longest, in_flight),
        full,
        delta,
        bytes_per_token(config) * tokens / step * DAY,
        config.run.steps * step / 3600,
        0 if device.name == CPU else gpus(config, uses),
    )


def _stages(
    config: RunConfig, device: Device, roles: Mapping[str, Role], student: Shape, generation: Generation
) -> list[Stage]:
    """As the device's row has them, generation first. Swaps meet what is in flight while replicas generate,
    which is a part of a step that follows from them; of other devices' or a run's seconds it is the same."""
    lengths, batch = generation.lengths, config.rollout.batch
    total, by_student = lengths.prompt + lengths.completion, batch * config.objective.on_policy

    def stage(role: str, kind: str, flops: float, item: int, seconds: float | None = None) -> Stage:
        devices = roles[role].devices
        seconds = flops / (devices * device.flops_per_second(item)) if seconds is None else seconds
        return Stage(role, kind, flops, seconds, devices)

    others = []
    for name, teacher in config.teachers.items():
        if (role := f"teacher {name}") in roles:
            share = batch / len(config.teachers)
            item = item_bytes(text_config(teacher), teacher.dtype)
            others.append(stage(role, SCORE, share * shape_of(teacher).forward(total), item))
    factor = train_factor(config.trainer.activation_checkpointing, config.trainer.lora is not None)
    flops = factor * batch * student.forward(total)
    others.append(stage(TRAINER, TRAIN, flops, published_item(config.trainer)))

    def with_swaps(share: float) -> list[Stage]:
        """The stages, where swaps meet this share of what may be in flight."""
        met = swaps * share
        flops, seconds = generation.flops(by_student, met), generation.seconds(by_student, met)
        return [stage(STUDENT, GENERATE, flops, generation.item, seconds), *others]

    drops = by_student > 0 and not config.keeps_cache and config.buffer.max_staleness > 0
    swaps = drops / config.weights.publish_every
    stages, share, before = with_swaps(1.0), 1.0, math.inf
    while before - share > LEAST_SHARE:
        stages = with_swaps(share)
        before, share = share, stages[0].seconds / step_seconds(config, stages, roles)
    return stages


def _generation(config: RunConfig, device: Device, role: Role, shape: Shape, lengths: Lengths) -> Generation:
    student, rollout = config.student, config.rollout
    flags, devices = student.flags(), role.devices / role.processes
    item = item_bytes(text_config(student), student.dtype)
    context = lengths.prompt + lengths.completion / 2
    outstanding = (_ahead(config) + 1) * rollout.batch / role.processes
    limits = [rollout.max_in_flight, int(flags.get("max-num-seqs", device.sequences)), outstanding]
    if device.name != CPU:
        size = (config.preflight.gpu_gib or device.gib) * GIB
        memory = devices * size * float(flags.get("gpu-memory-utilization", VLLM_SHARE))
        reserved = item * shape.parameters + devices * WORKSPACE
        limits.append(max(1.0, (memory - reserved) / (context * shape.kv)))  # whose KV cache fits beside it
    return Generation(shape, item, lengths, role, min(limits), device)


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


def _ahead(config: RunConfig) -> float:
    """Batches that are generated ahead of the trainer, where it is the bottleneck."""
    adaptive = config.buffer.depth == "adaptive"
    return float(min(1, config.buffer.max_staleness) if adaptive else config.buffer.max_staleness)


def _age(config: RunConfig, slowest: bool, in_flight: float) -> float:
    """Mean versions between the oldest token of a rollout and the step that trains on it. `slowest`: replicas
    generate for the whole of a step."""
    if not slowest:
        return _ahead(config)
    bound = float(config.buffer.max_staleness)
    return min(bound, in_flight / config.rollout.batch + (config.weights.publish_every - 1) / 2)


def version_bytes(
    config: RunConfig, parameters: float, measured: float | None = None
) -> tuple[float, float | None]:
    """(full, delta) bytes of a version as published; adapters are sent whole. `measured`: delta over full."""
    trainer, weights = config.trainer, config.weights
    full = full_bytes(config, parameters)
    if trainer.lora is not None or weights.transport == "broadcast":
        return full, None
    if published_item(trainer) == 4:  # every element changes; coded, 200 of 457 MB at 113 M
        share = 0.44 if weights.codec == "small" else 1.0
    else:
        share = delta_share(trainer.lr, weights.codec, weights.publish_every)
    return full, (measured or share) * full
