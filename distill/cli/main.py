"""The command line. Heavy imports stay inside the commands, so that help and errors come at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from distill.cli import bench as cli_bench
from distill.cli import replicas as cli_replicas
from distill.cli import sync as cli_sync
from distill.cli.guarded import guarded
from distill.cli.options import Config, Controller, JsonFile, Overrides, Resume, RunDir, write_figures
from sync.errors import DistillError
from sync.secrets import redact, redact_process

if TYPE_CHECKING:
    from distill.config import RunConfig

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="distill",
    help="On-policy distillation: the student writes, the teacher marks every token, all of it at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_replicas.app, name="replicas")
app.add_typer(cli_sync.app, name="sync")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `distill`; leaves with an exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    redact_process()
    sys.exit(guarded(lambda: app(words)))


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    from distill.loading import load

    config = load(path, overrides)
    redact_process()  # once more, for what the configuration holds
    return config


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


# --- whole runs -------------------------------------------------------------------------------------------


@app.command()
def quickstart(
    overrides: Overrides,
    seed: Annotated[int, typer.Option(help="Of models, prompts and training")] = 0,
    resume: Resume = False,
    json_file: JsonFile = None,
) -> None:
    """Make two tiny models, distil one into the other, and show what came of it."""
    from distill import quickstart as steps

    console = Console()
    config, making = steps.prepare(seed, overrides, console)
    if not resume:
        steps.make_room(config)
    summary = _run(config, resume, console, {"making": making})
    write_figures(json_file, summary)
    _show(console, config, summary)


@app.command()
def run(config: Config, overrides: Overrides, resume: Resume = False, json_file: JsonFile = None) -> None:
    """Run a configuration: start every role, distil, evaluate, leave a model folder."""
    console, settings = Console(), _load(config, overrides)
    summary = _run(settings, resume, console, {})
    write_figures(json_file, summary)
    _show(console, settings, summary)


def _run(config: RunConfig, resume: bool, console: Console, seconds: dict[str, float]) -> dict[str, Any]:
    import asyncio

    from distill.launch.run import run as launch

    _log_to_stderr()
    return asyncio.run(launch(config, resume=resume, console=console, seconds=seconds))


def _show(console: Console, config: RunConfig, summary: dict[str, Any]) -> None:
    """Print what came of a run. Raises DistillError with what is wrong with its end."""
    from distill.metrics.summary import before_and_after, longest_waits, use_of_tokens

    table = Table("", "before", "after", title=None)
    for row in before_and_after(summary):
        table.add_row(*row)
    if table.rows:
        console.print(table)
    lines = {
        "tokens": use_of_tokens(summary),
        "waited": longest_waits(summary),
        "model": summary["model"],
        "picture": config.run_dir / "report.png",
        "figures": config.run_dir / "summary.json",
    }
    for name, line in lines.items():
        console.print(f"{name:<7} {line}", soft_wrap=True, highlight=False)
    if summary["problems"]:
        raise DistillError("\n".join(summary["problems"]))


# --- single roles -----------------------------------------------------------------------------------------


@app.command()
def student(
    config: Config, overrides: Overrides, index: Annotated[int, typer.Option(help="Which replica")] = 0
) -> None:
    """Serve one student replica; its URL goes into student.urls of the controller's configuration."""
    from distill.launch import single_role as alone

    alone.replace_process(alone.student(_load(config, overrides), index))


@app.command()
def teacher(
    config: Config,
    overrides: Overrides,
    name: Annotated[str, typer.Option(help="Which of [teachers.NAME]; needed when there are several")] = "",
    index: Annotated[int, typer.Option(help="Which of its processes")] = 0,
) -> None:
    """Serve one teacher; its URL goes into teachers.NAME.urls of the controller's configuration."""
    from distill.launch import single_role as alone

    alone.replace_process(alone.teacher(_load(config, overrides), name, index))


@app.command()
def evaluator(config: Config, overrides: Overrides) -> None:
    """Serve the evaluator; its URL goes into evaluation.placement.urls of the controller's configuration."""
    from distill.launch import single_role as alone

    alone.replace_process(alone.evaluator(_load(config, overrides)))


@app.command()
def train(
    config: Config,
    overrides: Overrides,
    controller: Controller,
) -> None:
    """Train; the controller's configuration has controller.trainer = "external"."""
    from distill.launch import single_role as alone

    alone.replace_process(alone.trainer(_load(config, overrides), controller))


@app.command()
def control(config: Config, overrides: Overrides, resume: Resume = False, json_file: JsonFile = None) -> None:
    """Run the controller alone: every other role is joined by URL."""
    from distill.launch.single_role import check_all_joined

    console, settings = Console(), _load(config, overrides)
    check_all_joined(settings)
    summary = _run(settings, resume, console, {})
    write_figures(json_file, summary)
    _show(console, settings, summary)


# --- looking at things ------------------------------------------------------------------------------------


@app.command()
def preflight(
    config: Config,
    overrides: Overrides,
    engines: Annotated[bool, typer.Option("--engines", help="Start every server and probe it")] = False,
    tokens_per_second: Annotated[float, typer.Option(help="Generated, assumed for the disk it needs")] = 1000,
) -> None:
    """Check models, tokenizers, prompts, ports and disk of a run; start nothing unless asked to."""
    from distill.preflight import disk
    from distill.preflight.checks import check
    from distill.preflight.machine import check_machine, rehearse

    settings = _load(config, overrides)
    split = check(settings)
    check_machine(settings)
    needed = disk.estimate(settings, tokens_per_second)
    for line in [*disk.lines(settings, needed, tokens_per_second), disk.check_room(settings, needed)]:
        typer.echo(line) if line else None
    if engines:
        import asyncio

        _log_to_stderr()
        asyncio.run(rehearse(settings, split, lambda finding: typer.echo(redact(finding.line))))
    rows = f"{len(split.train)} prompts to train on" if isinstance(split.train, Sized) else "endless prompts"
    typer.echo(f"{config}: ready to run; {rows}, {len(split.held_out)} held out")


@app.command()
def evaluate(
    config: Config,
    overrides: Overrides,
    model: Annotated[Path | None, typer.Option(help="Student to evaluate; default: the config's")] = None,
    json_file: JsonFile = None,
) -> None:
    """Exact reverse KL and pass rate of a model folder against the configuration's teachers."""
    from distill.evaluation.models import evaluate_folder

    figures = evaluate_folder(_load(config, overrides), model)
    for name, value in figures.items():
        typer.echo(f"{name:<16} {value if not isinstance(value, float) else format(value, '.4f')}")
    write_figures(json_file, figures)


app.command()(cli_sync.export)


@app.command()
def report(run_dir: RunDir) -> None:
    """Draw report.png of a run anew, finished or not."""
    from distill.metrics.plot import draw

    typer.echo(draw(run_dir))


@app.command()
def audit(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """Check a run's guarantees from its journal, the trainer's ledger and the checkpoints."""
    from dataclasses import asdict

    from distill.run_log.audit import VIOLATIONS
    from distill.run_log.audit import audit as check

    found = check(run_dir)
    figures = {**asdict(found), "ok": found.ok}
    for name, value in figures.items():
        typer.echo(f"{name:<18} {len(value) if isinstance(value, list) else value}")
    for name, entries in found.violations.items():
        typer.echo(f"\n{name}: {VIOLATIONS[name]}")
        for entry in entries[:5]:
            typer.echo(f"  {entry}")
        if len(entries) > 5:
            typer.echo(f"  and {len(entries) - 5} more; --json FILE writes them all")
    write_figures(json_file, figures)
    if not found.ok:
        raise DistillError(f"{run_dir} breaks a guarantee: {', '.join(found.violations)}")


@app.command()
def chaos(
    overrides: Overrides,
    config: Annotated[Path | None, typer.Argument(help="Default: quickstart", metavar="CONFIG")] = None,
    events: Annotated[int, typer.Option(min=1, help="Faults, all kinds together")] = 24,
    kinds: Annotated[str, typer.Option(help="Of faults")] = "kill,stop,slow,cut,malformed,disk",
    seed: Annotated[int, typer.Option(help="Of targets and moments")] = 0,
    disk_gib: Annotated[float, typer.Option(help="Size of the disk, in memory, that is filled")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Inject faults of every kind into a real run at random moments, and audit what they cost."""
    from distill.bench import chaos as bench

    chosen = bench.chosen(kinds)
    kill_target = bench.kill_target(config, overrides, events, seed, chosen)
    if "disk" in chosen:
        bench.mount_disk(kill_target.run_dir, disk_gib)
    figures = bench.run(kill_target, events, seed, chosen, typer.echo)
    bench.keep_run(kill_target.run_dir)
    typer.echo(bench.table(figures))
    write_figures(json_file, figures)
    if not bench.holds(figures):
        raise DistillError("a guarantee was broken: see the lines above")


@app.command()
def version() -> None:
    """Versions of this package and of those that decide results."""
    from distill.metrics.summary import versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")


if __name__ == "__main__":
    main()
