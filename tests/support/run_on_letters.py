"""A whole run of two tiny random models, as a command that can be started, killed and resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from distill.tasks.sort_letters import STUDENT, TEACHER, letter_tokenizer
from distill.tasks.teaching import new_model

ROOT = Path(__file__).parents[2]
NAME, BATCH, CHECKPOINT_EVERY = "survivor", 8, 4
CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
steps = {steps}
grace_seconds = 30
start_seconds = 1200
[student]
path = "{folder}/student"
engine_args = {{ max-model-len = 64, max-num-seqs = 32, num-gpu-blocks-override = 64, enforce-eager = true }}
[teachers.only]
path = "{folder}/teacher"
threads = 1
env = {{ OMP_NUM_THREADS = "1" }}
[prompts]
type = "task"
task = "sort_letters"
[rollout]
batch = {batch}
max_tokens = 12
max_in_flight = 32
[buffer]
max_staleness = 2
[trainer]
ranks = 2
deepspeed = "{root}/configs/deepspeed/zero3_cpu.json"
lr = 2e-3
threads = 1
checkpoint_every = {checkpoint_every}
[tracking]
wandb = "disabled"
"""


def command(folder: Path, steps: int, *settings: str) -> list[str]:
    """`distill run` of a configuration in `folder`, its models beside it; `settings`: KEY=VALUE over it."""
    torch.manual_seed(0)
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        new_model(recipe, letter_tokenizer()).to(torch.bfloat16).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
    sizes = {"steps": steps, "batch": BATCH, "checkpoint_every": CHECKPOINT_EVERY}
    path = folder / f"{NAME}.toml"
    path.write_text(CONFIG.format(folder=folder, root=ROOT, name=NAME, **sizes))
    over = [word for setting in ("evaluation=false", *settings) for word in ("--set", setting)]
    return [sys.executable, "-m", "distill.cli.main", "run", str(path), *over]
