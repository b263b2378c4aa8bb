"""`distill sync …`: look after the published versions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from distill.cli.options import JsonFile, Published, RunDir, Target, Unmerged, write_figures
from sync.errors import DistillError

app = typer.Typer(help="Look after the published versions of a run.", no_args_is_help=True)


@app.command("ls")
def ls(run_dir: RunDir, json_file: JsonFile = None) -> None:
    """List every published version; fails when something in the store cannot be read."""
    from distill.published import listing

    found = listing(run_dir)
    write_figures(json_file, found)
    odd = [one for one in found if "problem" in one]
    for one in (one for one in found if "problem" not in one):
        base = f"on {one['base']}" if one["base"] else ""
        mark = "  latest" if one["latest"] else ""
        typer.echo(f"{one['version']}  {one['kind']:<5}  {one['bytes']:>12,} bytes  {base}{mark}")
    _tell(odd)


@app.command("verify")
def verify(
    run_dir: RunDir,
    engines: Annotated[bool, typer.Option("--engines", help="Prove it with two vLLM replicas")] = False,
    versions: Annotated[int, typer.Option(help="Random versions of that proof", min=1)] = 50,
    json_file: JsonFile = None,
) -> None:
    """Read every version back as a replica would; or prove with engines that random versions arrive whole."""
    if engines:
        _prove(run_dir, versions, json_file)
        return
    from distill.published import verification

    found = []
    for one in verification(run_dir):
        found.append(one)
        typer.echo(f"{one['version']}  {one['problem'] or 'whole'}")
    write_figures(json_file, found)
    if not found:
        raise DistillError(f"{run_dir} has no published version to verify: wait for the first one")
    broken = [one for one in found if one["problem"]]
    if broken:
        raise DistillError(f"{len(broken)} of {len(found)} versions cannot be read back: see above")


def _prove(run_dir: Path, versions: int, json_file: Path | None) -> None:
    import asyncio
    import tempfile

    from distill.cli.weight_identity import figures, lines, prove
    from distill.loading import load_run_dir

    student = load_run_dir(run_dir).student
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=".proof-") as work:
        proof = asyncio.run(prove(student, Path(work) / "work", versions))
    for line in lines(proof):
        typer.echo(line)
    write_figures(json_file, figures(proof))
    if not proof.holds:
        raise DistillError("the weights did not arrive as they left: see above")


@app.command("gc")
def gc(
    run_dir: RunDir,
    grace_seconds: Annotated[float, typer.Option(help="Spare what became superfluous since then")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed")] = False,
    json_file: JsonFile = None,
) -> None:
    """Remove versions that no reader needs; fails when something was left because it cannot be read."""
    from distill.published import collection

    done = collection(run_dir, grace_seconds, dry_run)
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"kept {len(done['kept'])}, {verb} {len(done['removed'])}, {done['bytes']:,} bytes")
    write_figures(json_file, done)
    _tell(done["odd"])


def _tell(odd: list[dict[str, Any]]) -> None:
    """Name what cannot be used. Raises DistillError when there is any."""
    for one in odd:
        typer.echo(f"{one['name']}  {one['problem']}")
    if odd:
        raise DistillError(
            f"{len(odd)} entries of the store cannot be used: see above; all others were handled"
        )


@app.command()
def export(run_dir: RunDir, target: Target, version: Published = "", adapter: Unmerged = False) -> None:
    """Write a published version as a Hugging Face folder; an adapter is merged into its base."""
    from distill.published import export_version

    typer.echo(f"{export_version(run_dir, version, target, adapter)} is in {target}")
