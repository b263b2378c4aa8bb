"""`distill bench …`: what the documented figures were measured with."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli.options import JsonFile, working, write_figures

app = typer.Typer(help="Measure; each prints its figures and writes them as JSON.", no_args_is_help=True)
Folder = Annotated[
    Path,
    typer.Option(help="Keeps finished parts, which are not repeated, and pictures; remove it to repeat."),
]


def bench(name: str, *values: Any, json_file: Path | None) -> None:
    """Run one benchmark, imported only now; print its table, else JSON, and write the figures."""
    with working(f"distill bench {name}"):
        logging.basicConfig(format="%(asctime)s %(message)s")  # above what the block shows
        logging.getLogger("distill").setLevel(logging.INFO)
        module = importlib.import_module(f"distill.bench.{name}")
        figures = module.run(*values)
    as_text = getattr(module, "table", None)
    typer.echo(as_text(figures) if as_text else json.dumps(figures, indent=2))
    write_figures(json_file, figures)


@app.command()
def sync(
    folder: Folder = Path("runs/bench-sync"),
    full: Annotated[bool, typer.Option("--full", help="A model of 101 M parameters as well")] = False,
    json_file: JsonFile = None,
) -> None:
    """Bytes, speed and pauses of a weight sync: codec, every store, a live replica, a whole run."""
    bench("sync", folder, full, json_file=json_file)


@app.command()
def kv(folder: Folder = Path("runs/bench-kv"), json_file: JsonFile = None) -> None:
    """The KV cache of running completions at a swap, recomputed or kept: mismatch, learning, time."""
    bench("kv", folder, json_file=json_file)


@app.command()
def teacher(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of the teacher")],
    dtype: Annotated[str, typer.Option(help="Of all contenders: float32, bfloat16")] = "float32",
    rollouts: Annotated[int, typer.Option(help="Sequences scored in a round")] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of every contender")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Scored tokens per second, bytes per token and resilience of the teacher service."""
    bench("teacher", model, dtype, rollouts, rounds, json_file=json_file)


@app.command()
def objective(
    folder: Folder = Path("runs/bench-objective"),
    only: Annotated[str, typer.Option(help="Objectives, such as topk,full; default: all")] = "",
    lag: Annotated[str, typer.Option(help="Ages of the weights that generate, such as 0,4,16")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Memory and speed of the loss instead")] = False,
    json_file: JsonFile = None,
) -> None:
    """Which objective learns a toy task fastest; or the chunked loss against full logits."""
    if memory:
        bench("loss_cost", json_file=json_file)
    else:
        ages = [int(age) for age in lag.split(",")]
        bench("objective", folder, only.split(",") if only else [], ages, json_file=json_file)


@app.command()
def packing(
    rows: Annotated[int, typer.Option(help="Of one step")] = 96,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest row")] = 32,
    longest: Annotated[int, typer.Option(help="Tokens of the longest row")] = 4096,
    micro_batch_tokens: Annotated[int, typer.Option(help="As in trainer.micro_batch_tokens")] = 8192,
    rounds: Annotated[int, typer.Option(help="Measurements of either way")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Training on rows laid end to end against padded rectangles, of a small random model on this CPU."""
    sizes = rows, shortest, longest, micro_batch_tokens, rounds
    bench("packing", *sizes, json_file=json_file)


@app.command()
def controller(
    folder: Annotated[Path, typer.Option(help="For its journals")] = Path("runs/bench-controller"),
    objectives: Annotated[bool, typer.Option(help="Each kind of objective")] = True,
    load: Annotated[bool, typer.Option(help="512 replicas, 8 teachers and 64 ranks")] = True,
    json_file: JsonFile = None,
) -> None:
    """Processor time of the controller and bytes of its journal for a token; what it sustains under load."""
    bench("controller", folder, objectives, load, json_file=json_file)


@app.command()
def device(
    folder: Folder = Path("runs/bench-device"),
    only: Annotated[str, typer.Option(help="Paths, such as LoRA,broadcast; default: all")] = "",
    json_file: JsonFile = None,
) -> None:
    """Objectives, trainer settings, transports and engines in short runs on this machine's GPU, or CPU."""
    bench("device", folder, only.split(",") if only else [], json_file=json_file)


@app.command("async")
def pipeline(folder: Folder = Path("runs/bench-async"), json_file: JsonFile = None) -> None:
    """The quickstart one stage after the other against all stages at once."""
    bench("pipeline", folder, json_file=json_file)


@app.command()
def limit(
    config: Annotated[
        Path | None, typer.Argument(help="Default: the quickstart's.", metavar="CONFIG")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What a step's three computations take alone, and what no overlapping can be faster than."""
    bench("limit", config, json_file=json_file)


@app.command()
def episodes(folder: Folder = Path("runs/bench-episodes"), json_file: JsonFile = None) -> None:
    """Episodes of three turns against single completions of as many tokens, and with a few that sleep."""
    bench("episodes", folder, json_file=json_file)


@app.command()
def routing(folder: Folder = Path("runs/bench-routing"), json_file: JsonFile = None) -> None:
    """A student with experts, trained with and without the routes that its rollouts were sampled through."""
    bench("routing", folder, json_file=json_file)


@app.command()
def plan(folder: Folder = Path("runs/bench-plan"), json_file: JsonFile = None) -> None:
    """`distill plan --probe` of three shapes on this machine against the steps of a run of each."""
    bench("plan", folder, json_file=json_file)


@app.command()
def peers(folder: Folder = Path("runs/bench-peers"), json_file: JsonFile = None) -> None:
    """TRL's DistillationTrainer against us on the same models; installs TRL by pip into the folder."""
    bench("peers", folder, json_file=json_file)


@app.command()
def soak(
    folder: Annotated[Path, typer.Option(help="Emptied, then filled")] = Path("runs/bench-soak"),
    rollouts: Annotated[int, typer.Option(help="Small ones; 0: leave that part out")] = 500_000,
    wide: Annotated[int, typer.Option(help="With hidden states 4,096 wide; 0: leave that part out")] = 2_000,
    json_file: JsonFile = None,
) -> None:
    """Memory, disk, blocks of the event loop and the restart of a controller over a long run in memory."""
    bench("soak", folder, rollouts, wide, json_file=json_file)
