"""`distill slurm`: a run as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill import api
from distill.cli.options import Config, Overrides, Resume


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
    from distill.launch.slurm import submit as jobs

    scripts = jobs.write(api.load_config(config, overrides), config, overrides, out, resume)
    for line in scripts.lines:
        typer.echo(line)
    if not submit:
        typer.echo(f"\nsubmit it:      sbatch {scripts.job}")
        return
    job = jobs.submit(scripts.job)
    typer.echo(f"\njob {job}")
    typer.echo(f"log:            tail -F {scripts.job.parent}/job-{job}.log")
    typer.echo(f"stop in order:  scancel --batch --signal=TERM {job}")
