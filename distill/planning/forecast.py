"""From a configuration to its plan: objective, devices, a measured run; what `distill.plan` returns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from distill.config import RunConfig
from distill.config.loading import load_run_dir, with_settings
from distill.hardware import CPU, DEVICES, Device, core, device_named, of_names
from distill.metrics.summary import threads
from distill.planning import estimate
from distill.planning.estimate import (
    GENERATE,
    SCORE,
    TRAIN,
    Calibration,
    Plan,
    Stage,
    find_roles,
    step_seconds,
)
from distill.planning.measured import Measured, calibrate, check_student_generates, measure
from distill.planning.threads import best_threads, decide_threads, is_planned, words
from distill.preflight_checks.devices import Use, check_devices, gpu_names, gpus, uses, visible
from distill.preflight_checks.machine import GIB, decide_precision, faster_precision
from distill.preflight_checks.objective import with_objective
from distill.preflight_checks.placement import placed
from distill.topology import Process
from sync.base.errors import ConfigError

NOTABLE = 1.05
"""Times as fast as planned that a step must be with other threads for these to be named."""
SLOWER = 2.0
"""Times the next stage's seconds from which a better split is suggested."""
FLOPS = {GENERATE: "FLOPs of generation", SCORE: "FLOPs of scoring", TRAIN: "FLOPs of training"}


class Forecast(NamedTuple):
    """What a configuration takes, computed."""

    plan: Plan
    device: Device
    """Row of the table of devices that it is planned on."""
    memory: list[Use]
    """Of each process on each of its GPUs; empty: every role computes on cores."""
    refusal: str | None
    """Why the preflight refuses the placement; None: it fits."""
    measured: tuple[Measured, Plan] | None
    """The run that replaced assumed speeds, and the plan of its own configuration without them."""
    machines: Sequence[str]
    """Of a cluster: a line for each, with its processes."""
    precision: str
    """`faster_precision`."""
    threads: dict[str, int]
    """`best_threads`; empty: not all of the run is on the cores of this machine."""
    advice: str
    """One sentence: which role should have other threads, or more GPUs; empty: none."""

    @property
    def lines(self) -> Iterator[str]:
        """What `distill plan` prints."""
        yield from self.machines
        yield from table(self.plan, self.device, self.memory, self.measured is not None)
        if self.precision:
            yield self.precision
        if self.advice:
            yield self.advice
        yield from comparison(*self.measured) if self.measured else ()

    @property
    def figures(self) -> dict[str, Any]:
        """All of it as plain JSON: bytes, seconds, tokens."""
        run = self.measured[0] if self.measured else None
        return {
            **asdict(self.plan),
            "bottleneck": self.plan.slowest[0].role,
            "threads": self.threads,
            "advice": self.advice,
            "machines": [*self.machines],
            "memory": [{"process": use.process, **asdict(use)} for use in self.memory],
            "measured": run._asdict() | {"lengths": asdict(run.lengths)} if run else None,
        }


def forecast(
    config: RunConfig, device: str, prompt: float | None, completion: float | None, measured: Path | None
) -> Forecast:
    """As `distill.plan`."""
    where, machines = placed(config)
    config, row, roles = _place(config, device, where)
    if row.name == CPU:
        config, _ = decide_precision(config)
    run, theirs, calibration = _calibration(measured, device) if measured else (None, None, None)
    lengths = estimate.lengths_of(config, prompt, completion, run.lengths if run else None)
    if row.name == CPU:
        config, _ = decide_threads(config, lengths)
    plan = estimate.plan(config, row, roles, lengths, calibration)
    before = (run, theirs) if run is not None and theirs is not None else None
    refusal = None
    try:
        if roles:
            check_devices(config, where)
    except ConfigError as error:
        refusal = str(error)
    best = best_threads(config, plan.stages) if row.name == CPU and is_planned(config) else {}
    settings = words(
        {role: count for role, count in best.items() if threads(config).get(role, count) != count}
    )
    other = with_settings(config, settings) if settings else config
    changed = estimate.plan(other, row, roles, lengths, calibration) if settings else plan
    if changed.step_seconds * NOTABLE < plan.step_seconds:
        times = f"{plan.step_seconds / changed.step_seconds:.2f} times as fast"
        flags = " ".join(f"--set {shlex.quote(word)}" for word in settings)
        advice = f"Threads with which a step is {times}: {flags}"
    else:
        advice = split(plan)
    return Forecast(plan, row, roles, refusal, before, machines, faster_precision(config, row), best, advice)


def _place(config: RunConfig, name: str, where: Sequence[Process]) -> tuple[RunConfig, Device, list[Use]]:
    """With its objective chosen, its device, and who of the processes uses that. Raises ConfigError for an
    unknown kind."""
    config, sizes = with_objective(config).config, gpus()
    device = device_named(name) if name else None
    if device is not None and device.name == CPU:
        return config, device, []
    known = [size for size in sizes.values() if size is not None]
    if config.preflight.gpu_gib is None and (device or known):
        gib = device.gib if device else min(known) / GIB
        config = config.with_(preflight={"gpu_gib": gib})
    gpu_uses = list(uses(config, visible(sizes), where))
    if device is None and gpu_uses:
        if not (names := gpu_names()):
            raise ConfigError(
                f"{gpu_uses[0].key} names GPUs and this machine has none: say which kind they are with "
                f"--device ({', '.join((*DEVICES, CPU))})"
            )
        device = of_names(names)
    return config, device or core(), gpu_uses


def _calibration(run_dir: Path, device: str) -> tuple[Measured, Plan, Calibration]:
    """What a run measured, the plan of its own configuration, and what turns one into the other."""
    config = load_run_dir(run_dir)
    check_student_generates(config, f"--measured {run_dir}")
    run, (config, row, rank_roles) = measure(run_dir), _place(config, device, placed(config)[0])
    estimated = estimate.plan(config, row, rank_roles, run.lengths)
    roles = find_roles(config, row, rank_roles)
    first = calibrate(run, estimated, 1.0)
    at_measured = [
        replace(stage, seconds=stage.seconds / first.speed[stage.kind]) for stage in estimated.stages
    ]
    return run, estimated, calibrate(run, estimated, step_seconds(config, at_measured, roles))


# --- what people read of it


def table(plan: Plan, device: Device, uses: Sequence[Use], measured: bool) -> Iterator[str]:
    """The table: memory, a step, the run. `measured`: a run replaced the assumed shares."""
    yield f"\nMemory of each GPU ({plan.device}), GiB"
    for use in uses:
        place = f"{use.process}, GPU {','.join(use.gpus)}" + ("" if use.host == "here" else f" of {use.host}")
        yield _row(place, f"{use.bytes / GIB:.1f}" if use.terms else "–", "".join(use.parts))
    if not uses:
        yield _row("no process", "–", "every role computes on cores")
    yield "\nPer step"
    length = plan.lengths
    words = f"{length.prompt:,.0f} + {length.completion:,.0f} tokens a sequence ({length.source})"
    yield _row("generated tokens", f"{plan.tokens:,.0f}", words)
    yield _row("in flight", f"{plan.in_flight:,.0f}", "completions in all replicas")
    if plan.episodes:
        yield _row("environments' own time", "–", "not known; other episodes are generated meanwhile")
    if plan.by_teachers:
        share = f"{plan.by_teachers:.0%} of the completions: in no stage, and not in the seconds of the step"
        yield _row("generation by teachers", "–", share)
    for stage in plan.stages:
        yield _row(FLOPS[stage.kind] + _whose(stage), f"{stage.flops:.2e}", "")
    busiest = plan.slowest[0]
    for stage in plan.stages:
        unit = ("core" if plan.device == CPU else "GPU") + "s" * (stage.devices != 1)
        note = f"on {stage.devices:g} {unit} of {stage.role}" + (", the bottleneck" * (stage is busiest))
        yield _row(f"seconds to {stage.kind}{_whose(stage)}", f"{stage.seconds:.3g}", note)
    yield _row(
        "seconds of the step",
        f"{plan.step_seconds:.3g}",
        "stages overlap" if plan.overlapping else "one after the other",
    )
    yield _row("steps a minute", f"{60 / plan.step_seconds:.3g}", "")
    yield _row("tokens a second", f"{plan.tokens / plan.step_seconds:,.0f}", "generated")
    yield _row("expected age", f"{plan.age:.2g}", "versions, at most buffer.max_staleness")
    yield "\nRun"
    yield _row("full version", _size(plan.full_bytes), "")
    if plan.delta_bytes is not None:
        part = plan.delta_bytes / plan.full_bytes
        yield _row(
            "delta", _size(plan.delta_bytes), f"{part:.1%} of it, {'measured' if measured else 'assumed'}"
        )
    yield _row(
        "record a day", _size(plan.record_bytes_a_day), "without prompts; arrays go as checkpoints cover them"
    )
    yield _row("hours to the end", f"{plan.hours:,.3g}", "without start-up, evaluations and restarts")
    if plan.gpus:
        yield _row("GPU-hours", f"{plan.hours * plan.gpus:,.3g}", f"{plan.gpus} GPUs")
    if not measured:
        single = f" ({device.single / 1e12:,.2g} in float32)" if device.single else ""
        yield (
            f"\nAssumed: {device.compute_share:.2g} of {device.flops / 1e12:,.4g} TFLOP/s{single} in "
            f"prefill, scoring and training, {device.bandwidth_share:.2g} of "
            f"{device.bandwidth / 1e12:.4g} TB/s in decoding, stages that overlap fully; --measured RUN_DIR "
            "replaces these by what a run reached."
        )


def split(plan: Plan) -> str:
    """One sentence: which role should get more GPUs; "": no stage is twice as slow as the next."""
    slow, following, *_ = plan.slowest
    if plan.device == CPU or slow.seconds <= SLOWER * following.seconds:
        return ""
    ratio = (
        f"Stage {slow.kind} takes {slow.seconds / following.seconds:.1f} times as long as {following.kind}"
    )
    givers = [stage for stage in reversed(plan.slowest[1:]) if stage.devices > 1]
    if not givers:
        return f"{ratio}: give {slow.role} more GPUs; no other role has one to spare."
    giver = givers[0]
    return (
        f"{ratio}: give {slow.role} more GPUs, first from {giver.role} ({giver.devices:g} GPUs, busy "
        f"{giver.seconds / plan.step_seconds:.0%} of a step)."
    )


def comparison(run: Measured, planned: Plan) -> Iterator[str]:
    """The run that calibrates a plan against the plan of its own configuration from assumptions alone."""
    yield "\nThat run: planned from assumptions, measured"
    for kind, seconds in planned.longest.items():
        yield _row(f"seconds to {kind}", f"{seconds:.3g}", _against(run.seconds[kind], seconds))
    yield _row(
        "seconds of a step", f"{planned.step_seconds:.3g}", _against(run.step_seconds, planned.step_seconds)
    )
    yield _row("age", f"{planned.age:.2g}", _against(run.age, planned.age))


def _against(measured: float, planned: float) -> str:
    ratio = f", {measured / planned:.2g} times as much" if planned else ""
    return f"measured {measured:.3g}{ratio}"


def _whose(stage: Stage) -> str:
    return f", {stage.role}" if stage.kind == SCORE else ""


def _row(what: str, figure: str, note: str) -> str:
    return f"  {what:<38} {figure:>10}  {note}".rstrip()


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count / 1e3:,.3g} kB"
