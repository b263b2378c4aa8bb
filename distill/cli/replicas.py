"""`distill replicas`: who writes for a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distill.cli.options import Controller

if TYPE_CHECKING:
    from sync.wire import Message, Replicas

app = typer.Typer(help="Let student replicas join and leave a run that goes on.", no_args_is_help=True)
ASK_SECONDS = 30.0


@app.command("ls")
def ls(controller: Controller) -> None:
    """List the replicas of a run: name, phase, version, completions in flight, URL."""
    _show(_ask(controller, "/v1/replicas", None))


@app.command("add")
def add(
    url: Annotated[str, typer.Argument(help="Of a replica that `distill student` serves", metavar="URL")],
    controller: Controller,
    name: Annotated[str, typer.Option(help="Default: the next free student-N")] = "",
) -> None:
    """Let a replica join; it is brought to the newest version before it is asked anything."""
    from sync.wire import ReplicaJoins

    _show(_ask(controller, "/v1/replicas/join", ReplicaJoins(url=url, name=name or None)))


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="As `distill replicas ls` says", metavar="NAME")],
    controller: Controller,
) -> None:
    """Let a replica leave; what it has not finished is asked elsewhere. Its process goes on."""
    from sync.wire import ReplicaLeaves

    _show(_ask(controller, "/v1/replicas/leave", ReplicaLeaves(name=name)))


def _ask(controller: str, path: str, body: Message | None) -> Replicas:
    from sync.client import BlockingPeer, token_from_environment
    from sync.wire import Replicas

    peer = BlockingPeer(controller, token_from_environment(), ASK_SECONDS)
    try:
        return peer.call(path, body, Replicas)
    finally:
        peer.close()


def _show(found: Replicas) -> None:
    for one in found.replicas:
        version = one.version or "the model folder"
        typer.echo(f"{one.name:<12} {one.phase:<11} {version!s:<16} {one.in_flight:>5} in flight  {one.url}")
