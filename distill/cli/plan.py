"""`distill plan` and `distill init`: before there is a run."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from distill import api
from distill.cli.options import Config, JsonFile, Overrides, working, write_figures
from sync.base.errors import ConfigError, DistillError

DeviceName = Annotated[
    str, typer.Option(help="h200, h100, a100, l4, rtx4090 or cpu; default: this machine's.", metavar="KIND")
]


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
        typer.Option(metavar="RUN_DIR", help="A run whose speeds replace the assumed ones."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Train here for 40 seconds or six steps, for such speeds.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Compute memory, seconds of each stage, bottleneck, weight sync, record and hours.

    Example: distill plan configs/recipes/single_node.toml --device h100 --completion-tokens 900
    """
    settings = api.load_config(config, overrides)
    with working("distill plan --probe") if probe else nullcontext() as say:
        forecast = api.plan(
            settings,
            device=device,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            measured=measured,
            probe=probe,
            say=say,
        )
    typer.echo("\n".join(forecast.lines).lstrip("\n"))
    write_figures(json_file, forecast.figures)
    if forecast.refusal:
        raise DistillError(f"this does not fit, and the preflight refuses it:\n{forecast.refusal}")


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("run.toml"),
    teacher: Annotated[str | None, typer.Option(help="Model folder or Hub id.")] = None,
    student: Annotated[str | None, typer.Option(help="Model folder or Hub id.")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL, CSV or Parquet file, folder or Hub id.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Number; 0: none. Default: this machine's.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="Memory of each GPU.")] = None,
) -> None:
    """Write a commented configuration whose roles share no GPU; asks on a terminal for what is missing.

    Example: distill init run.toml --teacher Qwen/Qwen3-32B --student Qwen/Qwen3-1.7B --prompts rows.jsonl
    --gpus 8 --gpu-gib 79.6
    """
    from distill.planning import starter
    from distill.preflight_checks.devices import gpus as gpus_here
    from distill.preflight_checks.machine import GIB

    starter.check_free(file)
    if sizes := gpus_here():
        gpus = len(sizes) if gpus is None else gpus
        known = [size for size in sizes.values() if size is not None]
        gpu_gib = gpu_gib or (min(known) / GIB if known else None)
    answers: dict[str, Any] = {"--teacher": teacher, "--student": student, "--prompts": prompts}
    answers |= {"--gpus": gpus, "--gpu-gib": 0 if gpus == 0 else gpu_gib}
    missing = [name for name, value in answers.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise ConfigError(
            f"distill init needs {', '.join(missing)}: give them, or run it on a terminal, where it asks"
        )
    numbers: dict[str, Any] = {"--gpus": (int, 0), "--gpu-gib": (float, 1)}
    for name in missing:
        if name == "--gpu-gib" and answers["--gpus"] == 0:
            answers[name] = 0
            continue
        kind, least = numbers.get(name, (str, ""))
        answers[name] = typer.prompt(name.removeprefix("--"), type=kind)
        if answers[name] < least:
            raise ConfigError(f"{name} {answers[name]} is too little: give {least} or more")
    request = starter.Wanted(*answers.values())
    for line in starter.write(file, request):
        typer.echo(line)
    typer.echo(f"{file}: written; next: distill preflight {file}, distill plan {file}")
