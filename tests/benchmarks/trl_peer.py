"""TRL's on-policy distillation, or its GRPO, as its user would start it, in an environment without us.

    python -P trl_peer.py JOB.json      fields: see `peers.job`

Its settings are meant to be its fastest on a CPU: no gradient checkpointing, no logging, the whole batch in
one generation and one backward pass. Student and teacher share the process and its threads; completions come
from transformers' `generate`, TRL's default. Its vLLM mode was not tried on a CPU.

Writes a line per step to OUTPUT/steps.jsonl, {"step", "time", "generated"}: `time` is in seconds without
those of saving, `generated` counts completion tokens from the start. Checkpoints are OUTPUT/step-N.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer


def counted(trainer: type[Any]) -> type[Any]:
    """A trainer that counts the completion tokens which it generates; all of them are trained on."""

    class Counted(trainer):
        generated = 0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.generated += int(output["completion_mask"].sum())
            return output

    return Counted


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last integer of a completion is the answer."""
    last = [re.findall(r"-?[0-9]+", text)[-1:] for text in completions]
    return [float(found == [expected]) for found, expected in zip(last, answer, strict=True)]


class Recorder(TrainerCallback):
    """Writes steps.jsonl and saves checkpoints, off the clock."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder, self.save_at = Path(job["output"]), set(job["save_at"])
        self.trainer: Any = None
        self.paused = 0.0
        self.file = (self.folder / "steps.jsonl").open("w", buffering=1)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """One optimizer step was made."""
        now = time.time()
        assert self.trainer is not None, "set before training"
        line = {"step": state.global_step, "time": now - self.paused, "generated": self.trainer.generated}
        self.file.write(json.dumps(line) + "\n")
        if state.global_step in self.save_at:
            folder = self.folder / f"step-{state.global_step}"
            model.save_pretrained(folder)
            self.trainer.processing_class.save_pretrained(folder)
        self.paused += time.time() - now


def main() -> None:
    """Train one job: the same optimizer, schedule and objective (reverse KL) as our run."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    recorder = Recorder(job)
    settings = {"output_dir": job["output"], "use_cpu": True, "seed": job["seed"], "max_steps": job["steps"]}
    settings |= {"per_device_train_batch_size": job["batch"], "max_completion_length": job["max_tokens"]}
    settings |= {"learning_rate": job["rate"], "lr_scheduler_type": "linear", "warmup_steps": job["warmup"]}
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0}
    settings |= {"temperature": 1.0, "bf16": job["bf16"], "gradient_checkpointing": False}
    settings |= {"shuffle_dataset": False, "logging_strategy": "no", "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True}
    rows = {"prompt": job["prompts"]}
    shared = {"model": job["student"], "callbacks": [recorder]}
    if job["teacher"] is None:
        settings |= {"beta": 0.0, "num_generations": job["per_prompt"], "loss_type": "grpo"}
        settings |= {"epsilon": job["clip"][0], "epsilon_high": job["clip"][1]}
        data = Dataset.from_dict(rows | {"answer": job["answers"]})
        trainer = counted(GRPOTrainer)(
            **shared, reward_funcs=right, args=GRPOConfig(**settings), train_dataset=data
        )
    else:
        trainer = counted(DistillationTrainer)(
            **shared,
            teacher_model=job["teacher"],
            args=DistillationConfig(**settings, beta=1.0),
            train_dataset=Dataset.from_dict(rows),
        )
    first = trainer.processing_class(text=job["prompts"][:1])["input_ids"][0]
    assert first == job["first_prompt"], f"TRL would see {first} where our run sees {job['first_prompt']}"
    recorder.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
