"""From a configuration to its plan: objective, devices, a measured run; what `distill.plan` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from distill.config import RunConfig
from distill.config.loading import load_run_dir
from distill.planning import estimate, table
from distill.planning.estimate import Calibration, Plan, step_seconds
from distill.planning.hardware import CPU, DEVICES, Device, device_here, device_named
from distill.planning.measured import Measured, calibrate, check_student_generates, measure
from distill.planning.roles import find_roles
from distill.preflight_checks.devices import Use, Where, check_devices, gpus, uses, visible
from distill.preflight_checks.machine import GIB
from distill.preflight_checks.objective import with_objective
from sync.base.errors import ConfigError

Planned = Callable[[RunConfig], tuple[Where | None, Sequence[str]]]
"""The GPUs of processes on a cluster, None: this machine's; and a line for each of its machines."""


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

    @property
    def lines(self) -> Iterator[str]:
        """What `distill plan` prints."""
        yield from self.machines
        yield from table.lines(self.plan, self.device, self.memory, self.measured is not None)
        yield from table.comparison(*self.measured) if self.measured else ()

    @property
    def figures(self) -> dict[str, Any]:
        """All of it as plain JSON: bytes, seconds, tokens."""
        run = self.measured[0] if self.measured else None
        return {
            **asdict(self.plan),
            "bottleneck": self.plan.slowest[0].role,
            "advice": table.split(self.plan),
            "machines": [*self.machines],
            "memory": [{"process": use.process, **asdict(use)} for use in self.memory],
            "measured": run._asdict() | {"lengths": asdict(run.lengths)} if run else None,
        }


def forecast(
    config: RunConfig,
    device: str,
    prompt: float | None,
    completion: float | None,
    measured: Path | None,
    planned: Planned,
) -> Forecast:
    """As `distill.plan`; `planned`: `launch.placement.planned`."""
    where, machines = planned(config)
    config, row, roles = _place(config, device, where)
    run, theirs, calibration = _calibration(measured, device, planned) if measured else (None, None, None)
    lengths = estimate.lengths_of(config, prompt, completion, run.lengths if run else None)
    plan = estimate.plan(config, row, roles, lengths, calibration)
    before = (run, theirs) if run is not None and theirs is not None else None
    return Forecast(plan, row, roles, _refusal(config, where) if roles else None, before, machines)


def _refusal(config: RunConfig, where: Where | None) -> str | None:
    try:
        check_devices(config, where)
    except ConfigError as error:
        return str(error)
    return None


def _place(config: RunConfig, name: str, where: Where | None) -> tuple[RunConfig, Device, list[Use]]:
    """With its objective chosen, its device, and who uses that. Raises ConfigError for an unknown kind.

    `where`: the GPUs of processes on a cluster; None: all are on this machine.
    """
    config, sizes = with_objective(config).config, gpus()
    device = device_named(name) if name else None
    if device is not None and device.name == CPU:
        return config, device, []
    known = [size for size in sizes.values() if size is not None]
    if config.preflight.gpu_gib is None and (device or known):
        gib = device.gib if device else min(known) / GIB
        sized = config.preflight.model_copy(update={"gpu_gib": gib})
        config = config.model_copy(update={"preflight": sized})
    gpu_uses = list(uses(config, visible(sizes), where))
    if device is None and gpu_uses and (device := device_here()) is None:
        raise ConfigError(
            f"{gpu_uses[0].key} names GPUs and this machine has none: say which kind they are with --device "
            f"({', '.join(DEVICES)})"
        )
    return config, device or DEVICES[CPU], gpu_uses


def _calibration(run_dir: Path, device: str, planned: Planned) -> tuple[Measured, Plan, Calibration]:
    """What a run measured, the plan of its own configuration, and what turns one into the other."""
    config = load_run_dir(run_dir)
    check_student_generates(config, f"--measured {run_dir}")
    run, (config, row, rank_roles) = measure(run_dir), _place(config, device, planned(config)[0])
    estimated = estimate.plan(config, row, rank_roles, run.lengths)
    roles = find_roles(config, row, rank_roles)
    first = calibrate(run, estimated, 1.0)
    at_measured = [
        replace(stage, seconds=stage.seconds / first.speed[stage.kind]) for stage in estimated.stages
    ]
    return run, estimated, calibrate(run, estimated, step_seconds(config, at_measured, roles))
