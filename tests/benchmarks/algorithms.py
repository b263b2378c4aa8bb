"""Distillation, SFT and rewards alone on a task: sums of one-digit numbers by SmolLM2-135M.

The teacher is SmolLM2-135M-Instruct after a lesson of worked sums; the student is the same model without the
lesson and without six of its layers. `make real` makes both folders. Three ways start from that student, and
again from what SFT made of it:

    full       the student's completions, the teacher's distribution, φ = 1 (docs/objectives.md)
    sft        the teacher's completions
    rewards    the student's completions and reasoning-gym's scorer, no teacher, as in configs/rewards.toml

Prompts, batch, trainer and held-out sums are those of that file. Each is a run as a user starts it; seconds
and tokens count from the end of its first step. `--figure` draws the curves.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import tomli_w
import torch
import typer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from distill import tasks
from distill.config.loading import read
from distill.tasks.teaching import made_once
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer
from tests.benchmarks import ROOT
from tests.benchmarks.asynchronous import REAL
from tests.benchmarks.figures import Figures, Folder, TrialCache, apart, command, cores, listing, run_steps

LESSON_STEPS, LESSON_ROWS, LESSON_RATE = 40, 32, 2e-4
NOT_TAUGHT: Final = -100
"""Label that transformers leaves out of the loss, as it is to leave padding behind a row."""
HELD_OUT, EVERY = 256, 10
FIGURES: Final = {"right": "pass_rate", "reverse KL": "reverse_kl", "ended": "ended", "length": "length_mean"}


class Way(NamedTuple):
    """A run: its steps, and its tables in place of those of configs/rewards.toml."""

    steps: int
    objective: Figures | None = None
    """None: the file's."""


FULL: Final = {"type": "full", "forward": 1.0}
SFT: Final = {"type": "sft"}
STARTS: Final = {
    "the pruned student": {"full": Way(20, FULL), "sft": Way(20, SFT), "rewards": Way(20)},
    "that after sft": {"full": Way(10, FULL), "sft": Way(10, SFT), "rewards": Way(20)},
}
FigureFile = Annotated[Path | None, typer.Option(help="Where the curves are drawn, as SVG or PNG.")]


def run(folder: Folder = Path("runs/bench-algorithms"), figure: FigureFile = None) -> Figures:
    """Teach the teacher, then run every way from the student, and from what SFT made of it."""
    folder = folder.absolute()
    base = read(ROOT / "configs/rewards.toml")
    base["prompts"]["options"]["tokenizer"] = str(REAL / "teacher")
    base["rollout"]["max_tokens"] = 32
    base["evaluation"] = {"every": EVERY, "prompts": HELD_OUT}
    teacher = made_once(folder / "lesson", partial(apart, teach, base)).teacher
    cache, points = TrialCache(folder), list[Figures]()
    student = REAL / "student-24"
    for number, (start, ways) in enumerate(STARTS.items()):
        for name, way in ways.items():
            run_dir = folder / f"{name}-{number}"
            tables = base | {"student": base["student"] | {"path": str(student)}}
            if way.objective is not None:
                tables |= {"objective": way.objective, "rollout": base["rollout"] | {"per_prompt": 1}}
                tables |= {"teachers": {"sums": {"path": str(teacher), "dtype": "bfloat16"}}}
                tables |= {"trainer": base["trainer"] | {"lr": 1e-4}}
            curve = cache.get({"way": name, "tables": tables}, partial(trial, run_dir, tables, way.steps))
            points += [{"student before": start, "way": name, **point} for point in curve["points"]]
        student = folder / "sft-0" / "final"
    if figure is not None:
        draw(points, figure)
    return {"cores": cores(), "points": points}


def teach(base: Figures, folder: Path) -> None:
    """Write folder/teacher: SmolLM2 after cross-entropy on sums that are worked term by term."""
    torch.manual_seed(0)
    torch.set_num_threads(cores())
    task = tasks.load("reasoning_gym", base["prompts"]["options"])
    tokenizer = load_tokenizer(ModelSource(path=str(REAL / "teacher")))
    model = AutoModelForCausalLM.from_pretrained(REAL / "teacher", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LESSON_RATE, weight_decay=0.0)
    for step in range(LESSON_STEPS):
        rows, labels = [], []
        for index in range(step * LESSON_ROWS, (step + 1) * LESSON_ROWS):
            prompt = task.prompt(0, index)
            assert prompt.token_ids is not None, "the task renders its prompts by the chat template"
            taught = [*tokenizer.encode(worked(prompt.text)), tokenizer.eos_token_id]
            rows.append(torch.tensor([*prompt.token_ids, *taught]))
            labels.append(torch.tensor([NOT_TAUGHT] * len(prompt.token_ids) + taught))
        ids_BT, labels_BT = pad_sequence(rows, True), pad_sequence(labels, True, NOT_TAUGHT)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids_BT, attention_mask=torch.ones_like(ids_BT), labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")


def worked(question: str) -> str:
    """`… problem: 4 + 3 - 2 =` → `4 + 3 = 7, 7 - 2 = 5`."""
    expression = re.search(r"-?\d+( [-+] \d+)+", question)
    assert expression, f"{question!r} holds no sum"
    first, *terms = re.findall(r"-?\d+|[-+] \d+", expression[0])
    signed = [int(term.replace(" ", "")) for term in terms]
    sums = pairwise(accumulate(signed, initial=int(first)))
    return ", ".join(f"{before} {term} = {after}" for term, (before, after) in zip(terms, sums, strict=True))


def trial(run_dir: Path, tables: Figures, steps: int) -> Figures:
    """What a run had learned at each of its evaluations, and after how many tokens and seconds."""
    file = run_dir.with_suffix(".toml")
    file.write_text(tomli_w.dumps(tables))
    rows = run_steps(run_dir, (file, []), steps, []).metrics
    steps_done = {row["step"]: row for row in rows if "train/loss" in row}
    first, points = steps_done[1], []
    for row in rows:
        if "eval/pass_rate" in row:
            done = steps_done.get(row["step"], first)
            tokens, seconds = (done[name] - first[name] for name in ("train/tokens_total", "time"))
            figures = {title: row.get(f"eval/{name}") for title, name in FIGURES.items()}
            points.append({"step": int(row["step"]), "tokens": tokens, "seconds": seconds} | figures)
    return {"points": points}


def table(report: Figures) -> str:
    """A line per evaluation, as Markdown."""
    return "\n".join(listing(report["points"]))


def draw(points: list[Figures], path: Path) -> None:
    """Held-out sums that are right over tokens and over seconds; one line per start and way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, unit in zip(axes, ("tokens", "seconds"), strict=True):
        for start, style in zip(STARTS, ("-", "--"), strict=True):
            for color, way in enumerate(STARTS[start]):
                line = [point for point in points if (point["student before"], point["way"]) == (start, way)]
                values = [[point[key] for point in line] for key in (unit, "right")]
                ax.plot(*values, style, color=f"C{color}", marker=".", label=f"{way}, {start}")
        ax.set_xlabel({"tokens": "tokens trained on", "seconds": "seconds of training"}[unit])
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out sums that are right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    command(run, table)
