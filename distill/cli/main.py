"""The command line. Heavy imports stay inside the commands, so that help and errors come at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from distill import api
from distill.cli import chat as cli_chat
from distill.cli import clusters as cli_clusters
from distill.cli import logs as cli_logs
from distill.cli import plan as cli_plan
from distill.cli import roles as cli_roles
from distill.cli import sync as cli_sync
from distill.cli.options import (
    Config,
    Controller,
    JsonFile,
    Overrides,
    Resume,
    RunDir,
    guarded,
    working,
    write_figures,
)
from distill.cli.result import show
from sync.base.errors import DistillError
from sync.base.secrets import redact_process

if TYPE_CHECKING:
    from distill.config import RunConfig
    from sync.wire import ServerLeaves, ServerRegisters

HELP = {"help_option_names": ["-h", "--help"]}
Order = Literal["newest", "worst", "longest", "truncated", "quarantined"]
ToyTask = Annotated[
    Literal["sort_letters", "guess", "calculate"],
    typer.Option(
        help="guess: episodes of several turns against an environment. calculate: episodes with a tool, for "
        "which `make environments` comes first."
    ),
]
RUNS, RESULTS, ROLES, TESTS = "Runs", "Results of a run", "Roles on several machines", "Measurements"
app = typer.Typer(
    name="distill",
    help="On-policy distillation: the student generates, the teacher scores every token, the trainer learns "
    "from the scores; all of it at once.\n\nStart with `distill quickstart`, or with a file of configs/: "
    "`distill preflight CONFIG`, then `distill run CONFIG`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
servers = typer.Typer(help="List, add and remove servers of a live run.", no_args_is_help=True)
app.add_typer(cli_sync.app, name="sync", rich_help_panel=RESULTS)
app.add_typer(servers, name="servers", rich_help_panel=ROLES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `distill`; leaves with an exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    redact_process()
    sys.exit(guarded(lambda: app(words)))


# --- runs


@app.command(rich_help_panel=RUNS)
def quickstart(
    overrides: Overrides,
    seed: Annotated[int, typer.Option(help="Seed of models, prompts and training.")] = 0,
    task: ToyTask = "sort_letters",
    resume: Resume = False,
    json_file: JsonFile = None,
) -> None:
    """Make two tiny models, distil one into the other on this machine's CPU, and show the result."""
    from distill import quickstart as steps

    config, making = steps.prepare(seed, overrides, Console(), task)
    if not resume:
        steps.make_room(config)
    teachers = {teacher.path: "the teacher that was made for it" for teacher in config.teachers.values()}
    models = {config.student.path: "the student before training, made for it", **teachers}
    _run(config, resume, json_file, {"making": making}, models)


@app.command(rich_help_panel=RUNS)
def run(
    config: Config,
    overrides: Overrides,
    resume: Resume = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print configuration and commands; start nothing.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run a configuration: start every role, distil, evaluate, write a model folder.

    Example: distill run configs/recipes/single_node.toml --set run.steps=100
    """
    settings = api.load_config(config, overrides)
    if dry_run:
        from distill.launch import dry_run as dry

        settled = dry.dry_run(settings)
        typer.echo("\n".join(dry.lines(settled)))
        write_figures(json_file, settled)
        return
    _run(settings, resume, json_file)


@app.command(rich_help_panel=RUNS)
def preflight(
    config: Config,
    overrides: Overrides,
    engines: Annotated[bool, typer.Option("--engines", help="Start every server and probe it.")] = False,
) -> None:
    """Check models, tokenizers, prompts, ports, disk and store of a run; train nothing.

    Example: distill preflight configs/recipes/single_node.toml --engines
    """
    if engines:
        _log_to_stderr()
    ready = api.preflight(api.load_config(config, overrides), engines=engines, say=typer.echo)
    rows = "endless prompts" if ready.prompts is None else f"{ready.prompts} prompts to train on"
    typer.echo(f"{config}: ready to run; {rows}, {ready.held_out} held out")


app.command(rich_help_panel=RUNS)(cli_plan.plan)
app.command(rich_help_panel=RUNS)(cli_plan.init)


def _run(
    config: RunConfig,
    resume: bool,
    json_file: Path | None,
    seconds: dict[str, float] | None = None,
    models: Mapping[str, str] = {},
) -> None:
    _log_to_stderr()
    console = Console()
    summary = api.run(config, resume=resume, console=console, seconds=seconds)
    write_figures(json_file, summary)
    show(console, config.run_dir, summary, models)


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


# --- roles on several machines


@app.command(rich_help_panel=ROLES)
def control(config: Config, overrides: Overrides, resume: Resume = False, json_file: JsonFile = None) -> None:
    """Run the controller alone; other roles are reached by URLs of the configuration, or register."""
    outside = 'cluster.type="external"', 'controller.trainer="external"'
    _run(api.load_config(config, [*overrides, *outside]), resume, json_file)


for role in cli_roles.COMMANDS:
    app.command(rich_help_panel=ROLES)(role)
app.command(rich_help_panel=ROLES)(cli_clusters.kubernetes)


@servers.command("ls")
def list_servers(controller: Controller) -> None:
    """List every server: name and URL; of replicas phase, version and completions in flight."""
    _servers(controller, None)


@servers.command("add")
def add_server(
    url: Annotated[str, typer.Argument(help="URL of a replica that runs already.", metavar="URL")],
    controller: Controller,
    name: Annotated[str, typer.Option(help="Name; default: the next free student-N.")] = "",
) -> None:
    """Add a replica that does not register by itself; it loads the newest version before it gets prompts."""
    from sync.wire import ServerRegisters

    _servers(controller, ServerRegisters(run=None, url=url, name=name or None))


@servers.command("remove")
def remove_server(
    name: Annotated[str, typer.Argument(help="Name that `distill servers ls` shows.", metavar="NAME")],
    controller: Controller,
) -> None:
    """Remove a replica: its unfinished prompts are requeued; one that registered by itself ends."""
    from sync.wire import ServerLeaves

    _servers(controller, ServerLeaves(name=name))


def _servers(controller: str, body: ServerRegisters | ServerLeaves | None) -> None:
    from sync.base.address import token_from_environment
    from sync.wire import ServerLease, ServerLeaves, Servers
    from sync.wire.client import BlockingPeer

    peer = BlockingPeer(controller, token_from_environment(), timeout=30.0)
    try:
        if body is not None:
            leaves = isinstance(body, ServerLeaves)
            path, kind = ("/v1/servers/leave", Servers) if leaves else ("/v1/servers", ServerLease)
            answer = peer.call(path, body, kind)
            if isinstance(answer, ServerLease) and answer.warning:
                typer.echo(f"distill: {answer.warning}", err=True)
        listing = peer.call("/v1/servers", None, Servers)
    finally:
        peer.close()
    for server in listing.servers:
        version = (
            f"{server.version or 'the model folder'!s:<16} {server.in_flight:>5} in flight"
            if server.phase
            else ""
        )
        typer.echo(
            f"{server.name:<18} {server.phase or '':<11} {version:<32} {server.url or 'not registered'}"
        )


app.command(rich_help_panel=ROLES)(cli_clusters.slurm)


# --- results


@app.command(rich_help_panel=RESULTS)
def evaluate(
    config: Config,
    overrides: Overrides,
    model: Annotated[Path | None, typer.Option(help="Model folder; default: student.path.")] = None,
    completions: Annotated[
        Path | None, typer.Option(help="New folder for the completions, a JSON Lines file a set.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure reverse KL, pass rate and named sets of a model folder, with servers started for it.

    Example: distill evaluate configs/recipes/single_node.toml --model runs/NAME/final
    """
    from distill.launch.evaluate import lines

    settings = api.load_config(config, overrides)
    with working("distill evaluate") as say:
        figures = api.evaluate(settings, model, completions=completions, say=say)
    for line in lines(figures):
        typer.echo(line)
    write_figures(json_file, figures)


app.command(rich_help_panel=RESULTS)(cli_sync.export)
app.command(rich_help_panel=RESULTS)(cli_chat.chat)
app.command(rich_help_panel=RESULTS)(cli_logs.logs)


@app.command(rich_help_panel=RESULTS)
def report(run_dir: RunDir) -> None:
    """Write report.html and report.png of a run, finished or not."""
    from distill.metrics.page import REPORT, write_page

    typer.echo(write_page([run_dir], run_dir / REPORT))


@app.command(rich_help_panel=RESULTS)
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN…")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("compare.html"),
) -> None:
    """Write one page with the figures, curves and samples of several runs side by side."""
    from distill.metrics.page import write_page

    typer.echo(write_page(run_dirs, output))


@app.command(rich_help_panel=RESULTS)
def overview(config: Config, overrides: Overrides) -> None:
    """Save a view of the main figures in the project tracking.project of wandb, for all of its runs."""
    from distill.metrics.trackers import save_overview

    typer.echo(save_overview(api.load_config(config, overrides)))


@app.command(rich_help_panel=RESULTS)
def samples(
    run_dir: RunDir,
    order: Annotated[Order, typer.Option(help="Which first.")] = "newest",
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
) -> None:
    """Print completions that were trained on, each token coloured by what the teacher finds unlikely.

    With --order quarantined: the newest of those that were not trained on, with the reason.
    """
    from distill.metrics import samples as of

    console, decoder = Console(), of.Decoder(run_dir)
    if order == "quarantined":
        texts = [
            of.shown_quarantined(completion, decoder)
            for completion in of.read_quarantine(run_dir)[: -count - 1 : -1]
        ]
    else:
        texts = [of.shown(sample, decoder) for sample in of.choose(of.read_samples(run_dir), order, count)]
    for text in texts:
        console.print(text, end="\n\n", soft_wrap=True)


@app.command(rich_help_panel=RESULTS)
def trace(run_dir: RunDir) -> None:
    """Write trace.json: every role on one clock, for ui.perfetto.dev or chrome://tracing."""
    from distill.metrics.trace import write_trace

    typer.echo(write_trace(run_dir))


@app.command(rich_help_panel=RESULTS)
def audit(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """Check a run's guarantees against its journal, the trainer's ledger and the checkpoints."""
    from dataclasses import asdict

    from distill.run_log.audit import VIOLATIONS
    from distill.run_log.audit import audit as check

    checked = check(run_dir)
    figures = {**asdict(checked), "ok": checked.ok}
    for name, value in figures.items():
        typer.echo(f"{name:<18} {len(value) if isinstance(value, list) else value}")
    for name, entries in checked.violations.items():
        typer.echo(f"\n{name}: {VIOLATIONS[name]}")
        for entry in entries[:5]:
            typer.echo(f"  {entry}")
        if len(entries) > 5:
            typer.echo(f"  and {len(entries) - 5} more; --json FILE writes them all")
    write_figures(json_file, figures)
    if not checked.ok:
        raise DistillError(f"{run_dir} breaks a guarantee: {', '.join(checked.violations)}")


@app.command(rich_help_panel=RESULTS)
def version() -> None:
    """Print the versions of this package and of those that decide results."""
    from distill.metrics.summary import versions

    for name, number in versions().items():
        typer.echo(f"{name} {number}")


if __name__ == "__main__":
    main()
