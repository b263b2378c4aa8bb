"""A run on words: two tiny random Qwen3 models, prompts in a JSONL file, a configuration that joins them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_replica import save_model
from whole_run import written


def prepare(folder: Path, name: str, steps: int, **more: dict[str, Any]) -> Path:
    """Write models, prompts and NAME.toml into `folder`; that file. `more`: sections, laid over its own.

    The run is made in `folder`/runs/NAME.
    """
    for seed, role in enumerate(("student", "teacher")):
        save_model("Qwen3", seed, folder / role, end=True)
    prompts = (json.dumps({"prompt": f"w{2 + i % 60} w{2 + i * 7 % 60}"}) + "\n" for i in range(800))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    engine_args = {"max-model-len": 64, "kv-cache-memory-bytes": 1 << 26, "enforce-eager": True}
    teacher = {"path": str(folder / "teacher"), "dtype": "float32"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"folder": folder / "runs"},
        "student": {"engine_args": engine_args},
        "teachers": {"teacher": teacher},
        "prompts": {"type": "jsonl", "path": folder / "prompts.jsonl", "template": "plain"},
        "rollout": {"batch": 16, "max_tokens": 16},
    }
    return written(folder / f"{name}.toml", steps, sections, more)
