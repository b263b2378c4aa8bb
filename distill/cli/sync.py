"""`distill sync …`: the published versions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli.options import JsonFile, RunDir, working, write_figures
from sync.base.errors import ConfigError, DistillError

app = typer.Typer(help="List, verify and clean up the published versions of a run.", no_args_is_help=True)


@app.command("ls")
def list_versions(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """List every published version; fail when something in the store is unreadable."""
    from distill.published import listing

    versions = listing(run_dir)
    write_figures(json_file, versions)
    for version in (entry for entry in versions if "problem" not in entry):
        base = f"on {version['base']}" if version["base"] else ""
        mark = "  latest" if version["latest"] else ""
        typer.echo(f"{version['version']}  {version['kind']:<5}  {version['bytes']:>12,} bytes  {base}{mark}")
    _report_unusable([entry for entry in versions if "problem" in entry])


@app.command("verify")
def verify_versions(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """Read every version back as a replica would."""
    from distill.published import verification

    checked = []
    for version in verification(run_dir):
        checked.append(version)
        typer.echo(f"{version['version']}  {version['problem'] or 'whole'}")
    write_figures(json_file, checked)
    if not checked:
        raise DistillError(f"{run_dir} has no published version to verify: wait for the first one")
    if broken := [entry for entry in checked if entry["problem"]]:
        raise DistillError(f"{len(broken)} of {len(checked)} versions cannot be read back: see above")


@app.command("gc")
def collect_versions(
    run_dir: RunDir,
    grace_seconds: Annotated[float, typer.Option(help="Keep what was in use so recently.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Remove versions that no reader needs; fail when something unreadable was left."""
    from distill.published import collection

    done = collection(run_dir, grace_seconds, dry_run)
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"kept {len(done['kept'])}, {verb} {len(done['removed'])}, {done['bytes']:,} bytes")
    write_figures(json_file, done)
    _report_unusable(done["odd"])


def _report_unusable(odd: list[dict[str, Any]]) -> None:
    for version in odd:
        typer.echo(f"{version['name']}  {version['problem']}")
    if odd:
        raise DistillError(
            f"{len(odd)} entries of the store cannot be used: see above; all others were handled"
        )


@app.command()
def export(
    run_dir: RunDir,
    target: Annotated[Path, typer.Argument(help="Folder to create.", metavar="TARGET")],
    version: Annotated[str, typer.Option(help="Such as L000-v00000120; default: the newest.")] = "",
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter, unmerged.")] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the folder to this model on the Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create that model as private.")] = False,
) -> None:
    """Write a published version as a Hugging Face folder with a model card; merge an adapter into its base.

    Example: distill export runs/NAME model --version L000-v00000120
    """
    from distill.published import export_version, hub_has, push

    if push_to_hub is not None and hub_has(push_to_hub):
        typer.echo(f"{push_to_hub} exists: the upload adds a commit to it.", err=True)
        try:
            answer = typer.prompt("its name, to go on", default="", show_default=False, err=True)
        except typer.Abort:
            answer = ""
        if answer != push_to_hub:
            raise ConfigError(
                f"--push-to-hub {push_to_hub} names a model that exists, and {answer!r} was given as its "
                "name: repeat the name at the prompt or on standard input, or choose a new one"
            )
    with working(f"reading {version or 'the newest version'} of {run_dir}"):
        exported = export_version(run_dir, version, target, adapter, push_to_hub)
    typer.echo(f"{exported} is in {target}")
    if push_to_hub is not None:
        with working(f"uploading to {push_to_hub}"):
            url = push(target, push_to_hub, exported, private)
        typer.echo(f"uploaded: {url}")
