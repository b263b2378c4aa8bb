"""A run on words: two tiny random Qwen3 models, prompts in a JSONL file, a configuration that joins them."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_replica import save_model

ROOT = Path(__file__).parents[2]
CONFIG = """
[run]
name = "{name}"
folder = "{folder}/runs"
steps = {steps}
start_seconds = 1200
[student]
path = "{folder}/student"
[student.engine_args]
max-model-len = 64
kv-cache-memory-bytes = 67108864
enforce-eager = true
[teachers.teacher]
path = "{folder}/teacher"
dtype = "float32"
threads = 1
[prompts]
type = "jsonl"
path = "{folder}/prompts.jsonl"
template = "plain"
[rollout]
batch = 16
max_tokens = 16
[trainer]
ranks = {ranks}
deepspeed = "{root}/configs/deepspeed/zero3_cpu.json"
threads = 1
[tracking]
wandb = "disabled"
"""


def prepare(folder: Path, name: str, steps: int, ranks: int = 1, more: str = "") -> Path:
    """Write models, prompts and NAME.toml into `folder`; that file. `more`: further tables of it.

    The run is made in `folder`/runs/NAME.
    """
    for seed, role in enumerate(("student", "teacher")):
        save_model("Qwen3", seed, folder / role, end=True)
    prompts = (json.dumps({"prompt": f"w{2 + i % 60} w{2 + i * 7 % 60}"}) + "\n" for i in range(800))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    path = folder / f"{name}.toml"
    path.write_text(CONFIG.format(name=name, folder=folder, steps=steps, ranks=ranks, root=ROOT) + more)
    return path


def over(*settings: str) -> list[str]:
    """The arguments that lay KEY=VALUE over a configuration."""
    return [word for setting in settings for word in ("--set", setting)]
