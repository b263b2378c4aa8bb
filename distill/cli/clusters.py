"""`distill slurm` and `distill kubernetes`: a run as a job, and as one file for kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distill import api
from distill.cli.options import Config, Overrides, Resume
from sync.base import durable


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
    from distill.launch.kubernetes import render
    from distill.launch.manifest import Target

    name = api.load_config(config, overrides).run.name
    target = Target(
        image,
        namespace or None,
        None if volume in ("", "none") else volume,
        volume != "none",
        storage,
        gpus,
        secret or None,
    )
    file = out or Path(f"{name}.yaml")
    text = render(config, overrides, target, str(file))
    durable.write(file, text.encode(), mode=0o600)  # it holds the token
    typer.echo("\n".join(line[2:] for line in text.splitlines() if line.startswith("#")))
