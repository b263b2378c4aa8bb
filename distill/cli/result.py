"""What a run's end prints: figures before and after, where time and tokens went, and every file by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from sync.base.errors import DistillError

if TYPE_CHECKING:
    from distill.metrics.results import Summary

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
    "journal": "every rollout, with versions and scores: distill audit RUN",
    "ledger": "what each rank trained on",
    "mirrors": "local copies of the weights",
    "anchors": "versions on their way to the store",
    "scores": "scores that teachers kept",
    "slots": "which teachers held a GPU slot",
    "wandb": "for Weights & Biases: wandb sync",
    "tensorboard": "for TensorBoard",
}
"""Name in a run's folder, and what it is for."""


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
