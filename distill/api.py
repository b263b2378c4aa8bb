"""The functions of `import distill`, which the command line calls too.

Each raises DistillError with the message that the command would show. `run`, `preflight` and `evaluate` start
servers, have an event loop of their own and go one at a time in a process; call them from any thread. In the
main thread a run stops in order at SIGINT and SIGTERM.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sync.base.errors import ConfigError, DataError, DistillError, Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from distill.config import RunConfig as Config
    from distill.metrics.results import Run, Summary
    from distill.planning.forecast import Forecast

_working: Final = threading.Lock()


class Ready(NamedTuple):
    """What `preflight` found of a configuration that can run."""

    config: Config
    """With what the file left open filled in."""
    prompts: int | None
    """To train on; None: endless."""
    held_out: int


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, or of a run's folder, with overrides such as "run.steps=10" over it.

    Its secrets are kept out of everything that this process logs. Raises ConfigError with a line for every
    key that cannot be used.
    """
    from distill.config.loading import load
    from sync.base.secrets import redact_process

    config = load(Path(path), overrides)
    redact_process()
    return config


def run(
    config: Config,
    *,
    resume: bool = False,
    console: Console | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Summary:
    """Start every role, distil, evaluate, write a model folder; returns what summary.json holds.

    `resume`: go on from the last checkpoint; a run that is complete returns at once. `console`: where
    progress is shown; None: stderr. `seconds`: durations of steps before this one, added to the total. The
    caller looks at `problems` of the summary: what the end did not show, such as a last evaluation that
    failed. Raises Interrupted after a stop signal, DistillError when the run fails; no process is left.
    """
    from distill.launch.run import run as launch

    with _alone("run"):
        summary = asyncio.run(launch(config, resume=resume, console=console, seconds=seconds))
    return cast("Summary", summary)


def preflight(config: Config, *, engines: bool = False, say: Callable[[str], None] | None = None) -> Ready:
    """Check models, tokenizers, prompts, ports, memory, disk and store of a run; train nothing.

    `engines`: start every server too, probe it and stop it, where `cluster.type` is local. `say` gets a line
    for each finding as it is made. Raises ConfigError, DataError or StoreError for what would keep the run
    from starting.
    """
    from distill.launch.preflight import check_arguments, check_machine, prepare, run_preflight
    from sync.base.secrets import redact

    tell = say or (lambda line: None)
    with _alone("preflight"):
        settings, split, *_, machines = prepare(config, tell)
        for line in machines:
            tell(line)
        check_machine(settings)
        check_arguments(settings)
        if engines:
            asyncio.run(run_preflight(settings, split, lambda finding: tell(redact(finding.line))))
    count = len(split.train) if isinstance(split.train, Sized) else None
    return Ready(settings, count, len(split.held_out))


def plan(
    config: Config,
    *,
    device: str = "",
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
    measured: Path | str | None = None,
    probe: bool = False,
    say: Callable[[str], None] | None = None,
) -> Forecast:
    """Compute memory, seconds of each stage, bottleneck, weight sync, record and hours.

    `device`: h200, h100, a100, l4, rtx4090 or cpu; "": this machine's. `prompt_tokens`, `completion_tokens`:
    mean lengths; None: upper bounds, or those of `measured`, the folder of a run whose speeds replace the
    assumed ones. `probe`: make that run now, for 40 seconds or six steps after its start-up, in a temporary
    folder beside the run's; `say` gets its state. Without it nothing is started. What does not fit is the
    result's `refusal`. Raises ConfigError for unknown devices, models that cannot be read, roles without
    GPUs, a probe of roles elsewhere and speeds of a run whose student generates nothing, DataError for a
    folder without a run's files, DistillError when a probe fails.
    """
    from distill.planning.forecast import forecast
    from distill.planning.measured import check_student_generates

    if probe and measured is not None:
        raise ConfigError("--probe measures, and --measured names a run that has: leave one of them out")
    run_dir = None if measured is None else Path(measured)
    with ExitStack() as stack:
        if probe:
            check_student_generates(config, "--probe")
            stack.enter_context(_alone("plan"))
            run_dir = stack.enter_context(_probed(config, say or (lambda line: None)))
        return forecast(config, device, prompt_tokens, completion_tokens, run_dir)


@contextmanager
def _probed(config: Config, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of a probe's run, meanwhile."""
    from distill.launch.probe import NAME, probe

    config.run.folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="probe-", dir=config.run.folder) as folder:
        try:
            run_dir = asyncio.run(probe(config, Path(folder), say))
        except DistillError as error:
            logs, kept = Path(folder) / NAME / "logs", Path(f"{folder}-logs")
            if isinstance(error, Interrupted | ConfigError | DataError) or not logs.is_dir():
                raise
            logs.rename(kept)
            told = str(error).replace(str(logs), str(kept))
            raise DistillError(f"the probe failed; its logs are in {kept}, remove them: {told}") from None
        yield run_dir


def evaluate(
    config: Config,
    model: Path | str | None = None,
    *,
    completions: Path | str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Reverse KL (nats per token), pass rate and named sets of a model folder, by servers started for it.

    `model` None: `student.path`. `completions`: a new folder for what was generated. `say` gets a line when
    each stage begins. Raises ConfigError for a folder that holds no model, or servers of a cluster.
    """
    from distill.launch.evaluate import evaluate_folder

    folder, texts = (None if path is None else Path(path) for path in (model, completions))
    with _alone("evaluate"):
        return evaluate_folder(config, folder, texts, say or (lambda line: None))


def load_run(folder: Path | str) -> Run:
    """Configuration, metrics, summary, evaluations and samples of a run, finished or not.

    Raises DataError for a folder without figures.
    """
    from distill.metrics.results import read_run

    return read_run(Path(folder))


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Around what needs this process, and an event loop, for itself. Raises ConfigError when it has not."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise ConfigError(
            f"distill.{name} was called inside a running event loop, such as a notebook's, and needs its "
            f"own: write `await asyncio.to_thread(distill.{name}, config)`"
        )
    if not _working.acquire(blocking=False):
        raise ConfigError(
            f"distill.{name} was called while this process runs, checks or evaluates a configuration: wait "
            "for that, or use another process"
        )
    try:
        yield
    finally:
        _working.release()
