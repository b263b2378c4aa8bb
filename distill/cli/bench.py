"""`distill bench …`: what the documented figures were measured with."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli.options import JsonFile, write_figures

app = typer.Typer(help="Measure; each prints its figures and writes them as JSON.", no_args_is_help=True)


def bench(name: str, *values: Any, json_file: Path | None, **options: Any) -> None:
    """Run one benchmark, imported only now; print its table, else JSON, and write the figures."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("distill").setLevel(logging.INFO)
    module = importlib.import_module(f"distill.bench.{name}")
    figures = module.run(*values, **options)
    as_text = getattr(module, "table", None)
    typer.echo(as_text(figures) if as_text else json.dumps(figures, indent=2))
    write_figures(json_file, figures)


@app.command()
def sync(
    folder: Annotated[Path, typer.Option(help="Finished parts and sync.png are kept here")] = Path(
        "runs/bench-sync"
    ),
    full: Annotated[bool, typer.Option("--full", help="A model of 101 M parameters as well")] = False,
    only: Annotated[
        str, typer.Option(help="Parts, such as codec,transports,swaps,whole_run; default: all")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Bytes, speed and pauses of a weight sync: codec, every store, a live replica, a whole run."""
    bench("sync", folder, full=full, only=only.split(",") if only else (), json_file=json_file)


@app.command()
def teacher(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the teacher")],
    json_file: JsonFile = None,
) -> None:
    """Scored tokens a second, bytes a token and resilience of the teacher service."""
    bench("teacher", model, json_file=json_file)


@app.command()
def objective(
    folder: Annotated[Path, typer.Option(help="Finished trials are kept here and not repeated")] = Path(
        "runs/bench-objective"
    ),
    only: Annotated[str, typer.Option(help="Objectives, such as topk,full; default: all")] = "",
    lag: Annotated[str, typer.Option(help="Ages of the weights that generate, such as 0,4,16")] = "0",
    seeds: Annotated[int, typer.Option(help="How many")] = 3,
    memory: Annotated[bool, typer.Option("--memory", help="Memory and speed of the loss instead")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda, for --memory")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Which objective learns a toy task fastest; or the chunked loss against full logits."""
    names = [only.split(",")] if only else []
    if memory:
        bench("loss_cost", folder, *names, device=device, json_file=json_file)
    else:
        lags = [int(age) for age in lag.split(",")]
        bench("objective", folder, *names, seeds=seeds, lags=lags, json_file=json_file)


@app.command("async")
def pipeline(
    folder: Annotated[Path, typer.Option(help="Finished runs are kept here and not repeated")] = Path(
        "runs/bench-async"
    ),
    seeds: Annotated[int, typer.Option(help="How many")] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a run")] = 240,
    json_file: JsonFile = None,
) -> None:
    """The quickstart one stage after the other against all stages at once."""
    bench("pipeline", folder, range(seeds), steps, json_file=json_file)


@app.command()
def peers(
    folder: Annotated[
        Path, typer.Option(help="Finished runs, and TRL's own environment, are kept here")
    ] = Path("runs/bench-peers"),
    seeds: Annotated[int, typer.Option(help="How many at toy size")] = 2,
    json_file: JsonFile = None,
) -> None:
    """TRL's DistillationTrainer against us on the same models; installs TRL by pip into a folder."""
    bench("vs_trl", folder, range(seeds), json_file=json_file)


@app.command()
def soak(
    folder: Annotated[Path, typer.Option(help="Emptied, then filled")] = Path("runs/bench-soak"),
    rollouts: Annotated[int, typer.Option(help="Small ones; 0: leave that part out")] = 500_000,
    wide: Annotated[int, typer.Option(help="With hidden states 4,096 wide; 0: leave that part out")] = 2_000,
    json_file: JsonFile = None,
) -> None:
    """Memory, disk, blocks of the event loop and the restart of a controller over a long run in memory."""
    bench("soak", folder, rollouts, wide, json_file=json_file)
