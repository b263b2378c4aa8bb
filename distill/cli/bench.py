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


def finish(module: Any, figures: dict[str, Any], json_file: Path | None) -> None:
    """Print figures the way their module does (`table`), else as JSON; write them to the file."""
    as_text = getattr(module, "table", None)
    typer.echo(as_text(figures) if as_text else json.dumps(figures, indent=2))
    write_figures(json_file, figures)


def bench(name: str) -> Any:
    """The module of one benchmark; imported only when it is run."""
    return importlib.import_module(f"distill.bench.{name}")


@app.command()
def sync(
    folder: Annotated[Path, typer.Option(help="Finished parts and sync.png are kept here")] = Path(
        "runs/bench-sync"
    ),
    full: Annotated[bool, typer.Option("--full", help="A model of 101 M parameters as well")] = False,
    only: Annotated[str, typer.Option(help="Parts, such as codec,roads,swaps,whole_run; default: all")] = "",
    json_file: JsonFile = None,
) -> None:
    """Bytes, speed and pauses of a weight sync: codec, every store, a live replica, a whole run."""
    module = bench("sync.run")
    log_progress()
    figures = module.run(folder, full=full, only=only.split(",") if only else ())
    finish(module, figures, json_file)


@app.command()
def teacher(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the teacher")],
    json_file: JsonFile = None,
) -> None:
    """Scored tokens a second, bytes a token and resilience of the teacher service."""
    module = bench("teacher")
    finish(module, module.run(model), json_file)


@app.command()
def objective(
    folder: Annotated[Path, typer.Option(help="Finished trials are kept here and not repeated")] = Path(
        "runs/bench-objective"
    ),
    only: Annotated[str, typer.Option(help="Objectives, such as topk,full; default: all")] = "",
    lag: Annotated[str, typer.Option(help="Ages of the weights that write, such as 0,4,16")] = "0",
    seeds: Annotated[int, typer.Option(help="How many")] = 3,
    memory: Annotated[bool, typer.Option("--memory", help="Memory and speed of the loss instead")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda, for --memory")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Which objective learns a toy task fastest; or the chunked loss against full logits."""
    module = bench("memory" if memory else "objective")
    log_progress()
    names = only.split(",") if only else module.OBJECTIVES
    if memory:
        figures = module.run(folder, names, device=device)
    else:
        figures = module.run(folder, names, seeds=seeds, lags=[int(age) for age in lag.split(",")])
    finish(module, figures, json_file)


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
    module = bench("pipeline")
    log_progress()
    finish(module, module.run(folder, range(seeds), steps), json_file)


@app.command()
def peers(
    folder: Annotated[
        Path, typer.Option(help="Finished runs, and TRL's own environment, are kept here")
    ] = Path("runs/bench-peers"),
    seeds: Annotated[int, typer.Option(help="How many at toy size")] = 2,
    json_file: JsonFile = None,
) -> None:
    """TRL's DistillationTrainer against us on the same models; installs TRL by pip into a folder."""
    module = bench("peers")
    log_progress()
    finish(module, module.run(folder, range(seeds)), json_file)


@app.command()
def soak(
    folder: Annotated[Path, typer.Option(help="Emptied, then filled")] = Path("runs/bench-soak"),
    rollouts: Annotated[int, typer.Option(help="Small ones; 0: leave that part out")] = 500_000,
    wide: Annotated[int, typer.Option(help="With hidden states 4,096 wide; 0: leave that part out")] = 2_000,
    json_file: JsonFile = None,
) -> None:
    """Memory, disk, blocks of the event loop and the restart of a controller over a long run in memory."""
    module = bench("soak")
    finish(module, module.run(folder, rollouts, wide), json_file)


def log_progress() -> None:
    """A line on stderr for every trial."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("distill").setLevel(logging.INFO)
