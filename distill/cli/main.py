"""The command line. Heavy imports stay inside the commands, so that help and errors come at once."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distill import api
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
from sync.base import durable
from sync.base.errors import DataError, DistillError
from sync.base.secrets import redact, redact_process

if TYPE_CHECKING:
    from distill.config import RunConfig
    from distill.metrics.results import Summary
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
RESET, QUIT = "/reset", "/quit"
RUNS, RESULTS, ROLES = "Runs", "Results of a run", "Roles on several machines"
POLL_SECONDS: Final = 0.5  # between looks at the logs that are followed
MADE: Final = {
    "final": "the trained model: distill chat RUN, distill export RUN FOLDER",
    "best": "the version that evaluated best",
    "best.json": "which that is",
    "report.html": "one page with curves, samples and configuration",
    "report.png": "its picture",
    "summary.json": "figures of the whole run",
    "metrics.jsonl": "figures of every step and evaluation",
    "samples.jsonl": "completions that were trained on: distill samples RUN",
    "evaluations": "completions of held-out prompts",
    "quarantine.jsonl": "completions that were not trained on: distill samples RUN --order quarantined",
    "timeline.jsonl": "who worked and who waited: distill trace RUN",
    "config.json": "the configuration as it ran",
    "logs": "a log of each role: distill logs RUN",
    "roles": "what each role was started with",
    "controller.json": "where the controller was",
    "lock": "held while the run goes on",
    "store": "published versions of the weights: distill sync ls RUN",
    "checkpoints": "to go on from: distill run CONFIG --resume",
    "run.db": "every rollout, with versions and scores: distill sql RUN, distill audit RUN",
    "arrays": "tokens, log-probabilities and scores of rollouts that a resume needs",
    "ledger": "what each rank trained on",
    "mirrors": "local copies of the weights",
    "anchors": "versions on their way to the store",
    "scores": "scores that teachers kept",
    "slots": "which teachers held a GPU slot",
    "wandb": "for Weights & Biases: wandb sync",
    "tensorboard": "for TensorBoard",
}
"""Name in a run's folder, and what it is for."""
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
        bool,
        typer.Option(
            "--dry-run", help="Print configuration, commands, what --resume goes on from; start nothing."
        ),
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
        if resume:
            typer.echo("\n".join(["", *dry.resume_lines(settings)]))
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


@app.command(rich_help_panel=RUNS)
def prune(
    teacher: Annotated[str, typer.Argument(help="Model folder or Hub id.", metavar="TEACHER")],
    student: Annotated[Path, typer.Argument(help="New folder.", metavar="STUDENT")],
    layers: Annotated[int, typer.Option(help="Layers that the student keeps.")],
    prompts: Annotated[str, typer.Option(help="JSONL, CSV or Parquet file, folder or Hub id.")],
) -> None:
    """Make a student of a teacher: leave out the layers that cost least on your prompts.

    Example: distill prune Qwen/Qwen3-1.7B student --layers 20 --prompts rows.jsonl
    """
    from distill.prune import prune as leave_out

    gone = leave_out(teacher, student, layers, prompts, typer.echo)
    typer.echo(f"{student}: {teacher} without layers {', '.join(map(str, gone))}; train it before you use it")


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


def show(console: Console, folder: Path, summary: Summary, models: Mapping[str, str] = {}) -> None:
    """Print the result of the run in `folder`; `models`: others that were made for it, path → what it is.

    Raises DistillError with what is wrong with its end.
    """
    from distill.metrics.summary import before_and_after, longest_waits, use_of_tokens

    table = Table("", "before", "after")
    for row in before_and_after(summary):
        table.add_row(*row)
    if table.rows:
        console.print(table)
    made = {f"{folder / name}": what for name, what in MADE.items() if (folder / name).exists()}
    made |= models
    lines = [
        f"tokens: {use_of_tokens(summary)}",
        f"waited: {longest_waits(summary)}",
        *(f"warning: {text}" for text in summary.get("warnings", [])),  # none in one of an earlier release
        *(f"{path:<{max(map(len, made))}}  {what}" for path, what in made.items()),
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    if summary["problems"]:
        raise DistillError("\n".join(summary["problems"]))


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


@app.command(rich_help_panel=ROLES)
def kubernetes(
    config: Config,
    overrides: Overrides,
    image: Annotated[str, typer.Option(help="Container image that has `distill`.", metavar="IMAGE")],
    namespace: Annotated[str, typer.Option(help="Of all objects; default: kubectl's.")] = "",
    volume: Annotated[
        str,
        typer.Option(
            help="Existing claim for the run's folder; default: a new one. none: no volume, and nothing is "
            "left of the run but what its store holds.",
            metavar="CLAIM",
        ),
    ] = "",
    storage: Annotated[str, typer.Option(help="Size of the new claim.")] = "500Gi",
    secret: Annotated[
        str,
        typer.Option(
            help="Existing Secret whose keys become variables of every pod: HF_TOKEN, WANDB_API_KEY, …",
            metavar="SECRET",
        ),
    ] = "",
    gpus: Annotated[bool, typer.Option("--gpus/--no-gpus", help="Whether pods ask for GPUs.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: RUN.yaml here.", metavar="FILE")
    ] = None,
) -> None:
    """Write a run as one YAML file: a JobSet with a Job for every role, its token, files and volume.

    Example: distill kubernetes configs/examples/each_role_alone.toml --image registry.example/distill:0.1
    """
    from distill.launch.kubernetes import Target, render

    name = api.load_config(config, overrides).run.name
    keeps = volume != "none"
    target = Target(image, namespace, volume if keeps else "", keeps, storage, gpus, secret)
    file = out or Path(f"{name}.yaml")
    text = render(config, overrides, target, str(file))
    durable.write(file, text.encode(), mode=0o600)  # it holds the token
    typer.echo("\n".join(line[2:] for line in text.splitlines() if line.startswith("#")))


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
    if isinstance(body, ServerLeaves):
        peer.call("/v1/servers/leave", body, Servers)
    elif body is not None and (warning := peer.call("/v1/servers", body, ServerLease).warning):
        typer.echo(f"distill: {warning}", err=True)
    for server in peer.call("/v1/servers", None, Servers).servers:
        version = (
            f"{server.version or 'the model folder'!s:<16} {server.in_flight:>5} in flight"
            if server.phase
            else ""
        )
        typer.echo(
            f"{server.name:<18} {server.phase or '':<11} {version:<32} {server.url or 'not registered'}"
        )


@app.command(rich_help_panel=ROLES)
def slurm(
    config: Config,
    overrides: Overrides,
    submit: Annotated[bool, typer.Option("--submit", help="Have Slurm queue it.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for scripts, token and logs; default: slurm/ in the run's folder."),
    ] = None,
    resume: Resume = False,
) -> None:
    """Write the job of a configuration whose cluster.type is "slurm"; with --submit, queue it too.

    The job runs `distill run`, is told before its time is over, and is requeued until the run is complete.

    Example: distill slurm configs/examples/slurm.toml --submit
    """
    from distill.launch.slurm import job as jobs

    script, lines = jobs.write(api.load_config(config, overrides), config, overrides, out, resume)
    typer.echo("\n".join(lines))
    if not submit:
        typer.echo(f"\nsubmit it:      sbatch {script}")
        return
    job = jobs.submit(script)
    typer.echo(f"\njob {job}")
    typer.echo(f"log:            tail -F {script.parent}/job-{job}.log")
    typer.echo(f"stop in order:  scancel --batch --signal=TERM {job}")


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
    typer.echo("\n".join(lines(figures)))
    write_figures(json_file, figures)


app.command(rich_help_panel=RESULTS)(cli_sync.export)


@app.command(rich_help_panel=RESULTS)
def chat(
    run_dir: RunDir,
    version: Annotated[str, typer.Option(help="final, best, or one that `distill sync ls` lists.")] = "final",
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Default: rollout.temperature of the run.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer; default: rollout.max_tokens of the run.")
    ] = None,
    teacher: Annotated[bool, typer.Option("--teacher/--no-teacher", help="Ask the teachers too.")] = True,
) -> None:
    """Talk to a run's student and its teachers side by side; /reset begins anew, /quit ends.

    Example: echo "What is 7 times 8?" | distill chat runs/NAME
    """
    from distill.launch.chat import chatting

    console, options = Console(), {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in options.items() if value is not None}
    with ExitStack() as stack:
        with working("distill chat") as say:
            talk = stack.enter_context(chatting(run_dir, version, teacher, sampling, say))
        for prompt in _prompts():
            if prompt == QUIT:
                break
            if prompt == RESET:
                talk.conversations.reset()
                continue
            with working("generating"):
                answers = talk.answer(prompt)
            table = Table(
                title=None if sys.stdin.isatty() else Text(prompt), title_justify="left", expand=True
            )
            for name in answers:
                table.add_column(Text(name), ratio=1, overflow="fold")
            table.add_row(*map(Text, answers.values()))
            console.print(table)


def _prompts() -> Iterator[str]:
    """Lines of stdin that are not empty, without surrounding space. Raises DataError for bytes."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  # keys and history of `input`
    lines = iter(lambda: input("> "), None) if sys.stdin.isatty() else sys.stdin
    try:
        yield from (text for line in lines if (text := line.strip()))
    except EOFError:
        return
    except UnicodeDecodeError as error:
        raise DataError(f"stdin holds bytes that are not {error.encoding}: convert its prompts") from None


@app.command(rich_help_panel=RESULTS)
def logs(
    run_dir: RunDir,
    role: Annotated[str, typer.Argument(help="Default: every role.", metavar="[ROLE]")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each role.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")
    ] = False,
) -> None:
    """Print the last lines that the roles of a run on this machine have logged.

    Example: distill logs runs/NAME trainer --follow
    """
    for line in role_lines(run_dir / "logs", role, lines, follow):
        typer.echo(redact(line))


def role_lines(folder: Path, role: str, count: int, follow: bool) -> Iterator[str]:
    """The last `count` lines of each log, then with `follow` every further whole line, without an end.

    Raises DataError where there is no log, or none of this role.
    """
    from distill.launch.supervise import last_lines

    ends = {path: path.stat().st_size for path in sorted(folder.glob("*.log")) if role in ("", path.stem)}
    if not ends:
        there = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none"
        raise DataError(f"{folder} holds no log of {role or 'any role'}: roles with a log are {there}")
    for path in ends:
        yield from (f"{path.stem:<12} {line}" for line in last_lines(path, count))
    while follow:
        time.sleep(POLL_SECONDS)
        for path in sorted(folder.glob(f"{role or '*'}.log")):
            with path.open("rb") as file:
                file.seek(ends.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                ends[path] = ends.get(path, 0) + len(whole) + 1
                yield from (f"{path.stem:<12} {line}" for line in whole.decode(errors="replace").split("\n"))


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

    console, decode = Console(), of.decoder(run_dir)
    if order == "quarantined":
        texts = [
            of.shown_quarantined(completion, decode)
            for completion in of.read_quarantine(run_dir)[: -count - 1 : -1]
        ]
    else:
        texts = [of.shown(sample, decode) for sample in of.choose(of.read_samples(run_dir), order, count)]
    for text in texts:
        console.print(text, end="\n\n", soft_wrap=True)


@app.command(rich_help_panel=RESULTS)
def trace(run_dir: RunDir) -> None:
    """Write trace.json: every role on one clock, for ui.perfetto.dev or chrome://tracing."""
    from distill.metrics.trace import write_trace

    typer.echo(write_trace(run_dir))


@app.command(rich_help_panel=RESULTS)
def sql(
    run_dir: RunDir,
    question: Annotated[
        str,
        typer.Argument(help="A SELECT; default: every table and view, with its columns.", metavar="SELECT"),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Ask the record of a run, finished or not, a question in SQL, and print the answer as a table.

    Example: distill sql runs/NAME "SELECT reason, count(*) FROM rollout GROUP BY reason"
    """
    from distill.record.reader import ask, lines

    columns, rows = ask(run_dir, question)
    typer.echo("\n".join(lines(columns, rows)))
    write_figures(json_file, [dict(zip(columns, row, strict=True)) for row in rows])


@app.command(rich_help_panel=RUNS)
def why(run_dir: RunDir) -> None:
    """Print what a run waits for, from the trainer's wait down to its root, with seconds.

    Example: distill why runs/NAME
    """
    from distill.cli.why import lines

    typer.echo("\n".join(lines(run_dir)))


@app.command(rich_help_panel=RESULTS)
def audit(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """Check a run's guarantees against its record, the trainer's ledger and the checkpoints."""
    from dataclasses import asdict

    from distill.record.audit import VIOLATIONS
    from distill.record.audit import audit as check

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
