"""TRL's trainers, and a plain loop of vLLM, transformers and PyTorch: each as its user would start it.

    python -P peer_loops.py TRL|loop JOB.json      TRL in an environment without us; fields: see `peers.job`

TRL has the settings that are meant to be fastest on a CPU; completions come from transformers' `generate`,
its default. Its vLLM mode was not tried on a CPU. The loop does everything in turns, with all threads.

Either writes a line per step to OUTPUT/steps.jsonl, named as in a run's metrics.jsonl; `time` is in seconds
without those of saving. Checkpoints are OUTPUT/step-N.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

Job = dict[str, Any]


class Steps:
    """Writes steps.jsonl and saves checkpoints, off the clock."""

    def __init__(self, job: Job) -> None:
        self._folder, self._save_at, self._paused = Path(job["output"]), set(job["save_at"]), 0.0
        self._file = (self._folder / "steps.jsonl").open("w", buffering=1)

    def made(self, step: int, generated: int, model: Any, tokenizer: Any) -> None:
        """An optimizer step was made."""
        now = time.time()
        line = {"step": step, "time": now - self._paused}
        line |= {"rollout/tokens_total": generated, "train/tokens_total": generated}
        self._file.write(json.dumps(line) + "\n")
        if step in self._save_at:
            for part in (model, tokenizer):
                part.save_pretrained(self._folder / f"step-{step}")
        self._paused += time.time() - now


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last integer of a completion is the answer."""
    last = [re.findall(r"-?[0-9]+", text)[-1:] for text in completions]
    return [float(found == [expected]) for found, expected in zip(last, answer, strict=True)]


def by_trl(job: Job, steps: Steps) -> None:
    """The same optimizer, schedule and objective (reverse KL) as our run."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    settings = {"output_dir": job["output"], "use_cpu": True, "seed": job["seed"], "max_steps": job["steps"]}
    settings |= {"per_device_train_batch_size": job["batch"], "max_completion_length": job["max_tokens"]}
    settings |= {"learning_rate": job["lr"], "warmup_steps": job["warmup_steps"], "bf16": job["bf16"]}
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0}
    settings |= {"lr_scheduler_type": "linear", "temperature": 1.0, "gradient_checkpointing": False}
    settings |= {"shuffle_dataset": False, "logging_strategy": "no", "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True}
    rows = {"prompt": job["prompts"]}
    if job["teacher"] is None:
        kind, given, rows["answer"] = trl.GRPOTrainer, {"reward_funcs": right}, job["answers"]
        low, high = job["clip"]
        settings |= {"beta": 0.0, "loss_type": "grpo", "epsilon": low, "epsilon_high": high}
        arguments = trl.GRPOConfig(**settings, num_generations=job["per_prompt"])
    else:
        kind, given = trl.DistillationTrainer, {"teacher_model": job["teacher"]}
        arguments = trl.DistillationConfig(**settings, beta=1.0)

    class Counted(kind):  # all that it generates is trained on
        generated = 0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.generated += int(output["completion_mask"].sum())
            return output

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            steps.made(state.global_step, learner.generated, model, learner.processing_class)

    given |= {"args": arguments, "train_dataset": Dataset.from_dict(rows), "callbacks": [Recorder()]}
    learner = Counted(model=job["student"], **given)
    first = learner.processing_class(text=job["prompts"][:1])["input_ids"][0]
    assert first == job["first_prompt"], f"{first} where our run sees {job['first_prompt']}"
    learner.train()


def padded(rows: Sequence[Sequence[int]], value: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, S], and which of them are there."""
    ids = [torch.tensor(row) for row in rows]
    there = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, value, side), pad_sequence(there, True, 0, side)


def log_probs(model: Any, ids_BS: torch.Tensor, there_BS: torch.Tensor, count: int) -> torch.Tensor:
    """Of the tokens in the last `count` columns, fp32 [B, C, V]."""
    positions_BS = (there_BS.cumsum(1) - 1).clamp(min=0)
    output = model(
        ids_BS, attention_mask=there_BS, position_ids=positions_BS, use_cache=False, logits_to_keep=count + 1
    )
    return output.logits[:, :-1].float().log_softmax(-1)


def by_loop(job: Job, steps: Steps) -> None:
    """Reverse KL over the whole vocabulary; with `bf16` under autocast."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else it leaves out one core
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup
    from vllm import LLM, SamplingParams

    torch.manual_seed(job["seed"])
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32).train()
    teacher = AutoModelForCausalLM.from_pretrained(job["teacher"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["student"])
    prompts = [tokenizer(text)["input_ids"] for text in job["prompts"]]
    assert prompts[0] == job["first_prompt"], f"{prompts[0]} where our run sees {job['first_prompt']}"
    settings = {"enforce_eager": True, "enable_prefix_caching": False}
    settings |= {"max_model_len": max(map(len, prompts)) + job["max_tokens"]}
    dtype = "bfloat16" if job["bf16"] else "float32"
    engine = LLM(job["student"], dtype=dtype, seed=job["seed"], gpu_memory_utilization=0.2, **settings)
    sampling = SamplingParams(temperature=1.0, max_tokens=job["max_tokens"], detokenize=False)
    optimizer = torch.optim.AdamW(student.parameters(), job["lr"], (0.9, 0.95), weight_decay=0.0)
    schedule, generated = get_linear_schedule_with_warmup(optimizer, job["warmup_steps"], job["steps"]), 0
    for step in range(job["steps"]):
        asked = prompts[step * job["batch"] : (step + 1) * job["batch"]]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        before, (behind_BC, trained_BC) = padded(asked, 0, "left"), padded(completions, 0, "right")
        ids_BS, there_BS = torch.cat([before[0], behind_BC], 1), torch.cat([before[1], trained_BC], 1)
        with torch.autocast("cpu", torch.bfloat16, job["bf16"]):
            with torch.no_grad():
                logq_BCV = log_probs(teacher, ids_BS, there_BS, trained_BC.shape[1])
            logp_BCV = log_probs(student, ids_BS, there_BS, trained_BC.shape[1])
        kl_BC = kl_div(logq_BCV, logp_BCV, reduction="none", log_target=True).sum(-1)
        kl_BC[trained_BC.bool()].mean().backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": student.named_parameters()})
        if student.config.tie_word_embeddings:  # vLLM 0.32 leaves a CPU's packed copy of it as it was
            engine.apply_model(
                lambda model: model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
            )
        generated += int(trained_BC.sum())
        steps.made(step + 1, generated, student, tokenizer)
    os._exit(0)  # the engine has nothing to finish


if __name__ == "__main__":
    train = {"TRL": by_trl, "loop": by_loop}[sys.argv[1]]
    job = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(job["threads"])
    train(job, Steps(job))
