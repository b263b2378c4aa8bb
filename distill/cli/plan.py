"""`distill plan` and `distill init`: before there is a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from distill.api import load_config
from distill.cli.options import Config, JsonFile, Overrides, write_figures
from sync.errors import ConfigError, DistillError

if TYPE_CHECKING:
    from distill.config import RunConfig
    from distill.plan.estimate import Calibration, Plan
    from distill.plan.hardware import Device
    from distill.plan.measured import Measured
    from distill.preflight_checks.devices import Use

DeviceName = Annotated[
    str, typer.Option(help="h200, h100, a100, l4, rtx4090 or cpu; default: this machine's.", metavar="KIND")
]


class _Placed(NamedTuple):
    """A configuration with its objective chosen, and the devices that it is planned on."""

    config: RunConfig
    device: Device
    uses: list[Use]


def plan(
    config: Config,
    overrides: Overrides,
    device: DeviceName = "",
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="Mean tokens of a prompt.")] = None,
    completion_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of a completion; default: rollout.max_tokens.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="A finished run whose speeds replace the assumed ones."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute memory, seconds of each stage, bottleneck, weight sync, journal and hours; start nothing.

    Example: distill plan configs/single_node.toml --device h100 --completion-tokens 900
    """
    from dataclasses import asdict

    from distill.plan import estimate, table
    from distill.preflight_checks.devices import check_devices

    placed = _placed(load_config(config, overrides), device)
    run, theirs, calibration = _calibration(measured, device) if measured else (None, None, None)
    known = run.lengths if run else None
    lengths = estimate.lengths_of(placed.config, prompt_tokens, completion_tokens, known)
    found = estimate.plan(placed.config, placed.device, placed.uses, lengths, calibration)
    typer.echo("\n".join(table.lines(found, placed.device, placed.uses, run is not None)).lstrip("\n"))
    if run is not None and theirs is not None:
        typer.echo("\n".join(table.comparison(run, theirs)))
    figures = {**asdict(found), "bottleneck": found.slowest[0].role, "advice": table.split(found)}
    figures |= {"memory": [{"process": use.process, **asdict(use)} for use in placed.uses]}
    figures |= {"measured": run._asdict() | {"lengths": asdict(run.lengths)} if run else None}
    write_figures(json_file, figures)
    if placed.uses:
        try:
            check_devices(placed.config)
        except ConfigError as error:
            raise DistillError(f"this does not fit, and the preflight refuses it:\n{error}") from None


def _placed(config: RunConfig, name: str) -> _Placed:
    """Raises ConfigError for GPUs of an unknown kind."""
    from distill.plan.hardware import CPU, DEVICES, device_here, device_named
    from distill.preflight_checks.devices import gpus, uses, visible
    from distill.preflight_checks.machine import GIB
    from distill.preflight_checks.objective import with_objective

    config, sizes = with_objective(config).config, gpus()
    device = device_named(name) if name else None
    if device is not None and device.name == CPU:
        return _Placed(config, device, [])
    if config.preflight.gpu_gib is None and (device or sizes):
        gib = device.gib if device else min(sizes.values()) / GIB
        sized = config.preflight.model_copy(update={"gpu_gib": gib})
        config = config.model_copy(update={"preflight": sized})
    found = list(uses(config, visible(sizes)))
    if device is None and found and (device := device_here()) is None:
        raise ConfigError(
            f"{found[0].key} names GPUs and this machine has none: say which kind they are with --device "
            f"({', '.join(DEVICES)})"
        )
    return _Placed(config, device or DEVICES[CPU], found)


def _calibration(run_dir: Path, device: str) -> tuple[Measured, Plan, Calibration]:
    """What a run measured, the plan of its own configuration, and what turns one into the other."""
    from dataclasses import replace

    from distill.config.loading import load_run_dir
    from distill.plan.estimate import plan as planned
    from distill.plan.estimate import step_seconds
    from distill.plan.measured import calibrate, measure
    from distill.plan.roles import find_roles

    theirs, run = _placed(load_run_dir(run_dir), device), measure(run_dir)
    own = planned(theirs.config, theirs.device, theirs.uses, run.lengths)
    roles = find_roles(theirs.config, theirs.device, theirs.uses)
    first = calibrate(run, own, 1.0)
    at_measured = [replace(one, seconds=one.seconds / first.speed[one.kind]) for one in own.stages]
    return run, own, calibrate(run, own, step_seconds(theirs.config, at_measured, roles))


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("run.toml"),
    teacher: Annotated[str | None, typer.Option(help="Model folder or Hub id.")] = None,
    student: Annotated[str | None, typer.Option(help="Model folder or Hub id.")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL file, dataset's folder or Hub id.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Number; 0: none. Default: this machine's.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="Memory of each GPU.")] = None,
) -> None:
    """Write a commented configuration whose roles share no GPU; asks on a terminal for what is missing.

    Example: distill init run.toml --teacher Qwen/Qwen3-32B --student Qwen/Qwen3-1.7B --prompts rows.jsonl
    --gpus 8 --gpu-gib 79.6
    """
    from distill.plan import starter
    from distill.preflight_checks.devices import gpus as gpus_here
    from distill.preflight_checks.machine import GIB

    starter.check_free(file)
    sizes = gpus_here()
    if sizes:
        gpus = len(sizes) if gpus is None else gpus
        gpu_gib = gpu_gib or min(sizes.values()) / GIB
    given: dict[str, str | float | None] = {"--teacher": teacher, "--student": student, "--prompts": prompts}
    given |= {"--gpus": gpus} if gpus == 0 else {"--gpus": gpus, "--gpu-gib": gpu_gib}
    answers = _asked(given)
    wanted = starter.Wanted(
        str(answers["--teacher"]),
        str(answers["--student"]),
        str(answers["--prompts"]),
        int(answers["--gpus"]),
        float(answers.get("--gpu-gib", 0)),
    )
    for line in starter.write(file, wanted):
        typer.echo(line)
    typer.echo(f"{file}: written; next: distill preflight {file}, distill plan {file}")


def _asked(given: Mapping[str, str | float | None]) -> dict[str, str | float]:
    """The options with what is missing asked for on a terminal; without one, raises ConfigError."""
    if (missing := [name for name, value in given.items() if value is None]) and not sys.stdin.isatty():
        raise ConfigError(
            f"distill init needs {', '.join(missing)}: give them, or run it on a terminal, where it asks"
        )
    kinds: dict[str, type] = {"--gpus": int, "--gpu-gib": float}
    answers: dict[str, str | float] = {}
    for name, value in given.items():
        if name == "--gpu-gib" and answers["--gpus"] == 0:
            continue
        asked = typer.prompt(name.removeprefix("--"), type=kinds.get(name, str)) if value is None else value
        answers[name] = asked
    return answers
