"""A plan after its probe against a run of its own: `distill bench plan`.

Three shapes, each planned with `--probe`, run for as many steps as the plan puts into RUN_SECONDS after the
warm-up, and planned so again: the mean of both plans leaves out what drifts on the machine meanwhile. All
begin with the same models. A plan leaves out evaluations, samples and trackers, and so do these runs.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from rich.console import Console

from distill import api, quickstart
from distill.bench.runner import Figures, TrialCache, markdown
from distill.config import RunConfig
from distill.planning.measured import WARM_UP_SECONDS, measure
from distill.tasks.teaching import Recipe, make_tokenizer, new_model, save_pair

GOAL: Final = 0.2
"""Farthest that a planned step may be from the measured one, as a share of that."""
RUN_SECONDS: Final = 30.0
"""Of the run's steps, after WARM_UP_SECONDS."""
WORDS: Final = ("<pad>", "<eos>", *(f"w{number}" for number in range(510)))
END_ID: Final = 1
UNTAUGHT: Final[Mapping[str, Any]] = {"steps": 0, "rows": 0, "rate": 0, "muon": False, "both_choices": False}
PROMPTS: Final = 4096


class Shape(NamedTuple):
    """Random models of WORDS, which seldom end a completion; prompts of four words."""

    student: Recipe
    teacher: Recipe
    batch: int
    max_tokens: int


SHAPES: Final[Mapping[str, Shape | None]] = {
    "the quickstart": None,
    "completions of 192 tokens": Shape(
        Recipe(96, 2, 3, 1, 256, **UNTAUGHT), Recipe(128, 3, 4, 2, 384, **UNTAUGHT), 32, 192
    ),
    "3.3 M student, 13 M teacher": Shape(
        Recipe(256, 4, 8, 4, 768, **UNTAUGHT), Recipe(384, 6, 12, 6, 1536, **UNTAUGHT), 48, 32
    ),
}
"""None: the quickstart's own models and task."""


def run(folder: Path) -> Figures:
    """Try what is missing in `folder`. Raises DistillError when a probe or a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    return {name: cache.get({"shape": name}, partial(_trial, folder, name)) for name in SHAPES}


def _trial(folder: Path, name: str) -> Figures:
    with tempfile.TemporaryDirectory(prefix="trial-", dir=folder) as place:
        config = configured(Path(place), SHAPES[name])
        found = api.plan(config, probe=True)
        assert found.measured is not None, "it was calibrated"
        steps = math.ceil((WARM_UP_SECONDS + RUN_SECONDS) / found.plan.step_seconds)
        steps += config.buffer.max_staleness + 1  # for which nothing is generated, and which do not count
        section = config.run.model_copy(update={"steps": steps})
        api.run(config.model_copy(update={"run": section}), console=Console(quiet=True))
        reached = measure(config.run_dir)
        again = api.plan(config, probe=True).plan.step_seconds
    return {
        "steps": steps,
        "completion_tokens": reached.lengths.completion,
        "assumed": found.measured[1].step_seconds,
        "planned": found.plan.step_seconds,
        "planned_again": again,
        "measured": reached.step_seconds,
        "ratio": reached.step_seconds / mean([found.plan.step_seconds, again]),
    }


def configured(folder: Path, shape: Shape | None) -> RunConfig:
    """The quickstart in `folder`; with a shape its models, prompts and lengths."""
    path, settings = quickstart.source(0)
    settings += [f"run.folder={folder}", "evaluation=false"]
    settings += ["tracking.wandb=disabled", "tracking.samples_every=0"]
    if shape is not None:
        settings += [*_shaped(folder, shape)]
    return api.load_config(path, settings)


def _shaped(folder: Path, shape: Shape) -> list[str]:
    tokenizer = make_tokenizer(WORDS, r"w\d+", WORDS[END_ID], WORDS[0])
    longest = 8 + shape.max_tokens
    models = [new_model(recipe, len(WORDS), END_ID, 0) for recipe in (shape.teacher, shape.student)]
    for model in models:
        model.config.max_position_embeddings = longest
    save_pair(folder, tokenizer, *models)
    rows = ("".join(WORDS[2 + (i * k) % 510] for k in (1, 7, 31, 77)) for i in range(PROMPTS))
    lines = "\n".join(json.dumps({"prompt": row}) for row in rows)
    (folder / "prompts.jsonl").write_text(lines)
    prompts = f'{{type="jsonl", path="{folder}/prompts.jsonl", template="plain"}}'
    return [
        f"student.path={folder}/student",
        f"student.engine_args.max-model-len={longest}",
        f"teachers.sorter.path={folder}/teacher",
        f"prompts={prompts}",
        f"rollout.batch={shape.batch}",
        f"rollout.max_tokens={shape.max_tokens}",
        "rollout.request_size=16",
        "trainer.ranks=1",
    ]


def table(report: Figures) -> str:
    """The report as Markdown."""
    head = ["shape", "tokens a completion", "assumed, s a step", "after a probe", "measured"]
    head += ["after another probe", "ratio"]
    rows = [
        [
            name,
            f"{one['completion_tokens']:.0f}",
            *(f"{one[key]:.3g}" for key in ("assumed", "planned", "measured", "planned_again")),
            f"{one['ratio']:.2f}" + ("" if abs(one["ratio"] - 1) <= GOAL else f" (goal: within {GOAL:.0%})"),
        ]
        for name, one in report.items()
    ]
    return "\n".join(markdown(head, rows))
