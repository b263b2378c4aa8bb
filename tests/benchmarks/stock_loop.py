"""On-policy distillation as a plain loop of vLLM, transformers and PyTorch.

    python -P stock_loop.py JOB.json      fields, output and clock as of trl_peer.py; `bf16`: autocast

One process does everything in turns, with all threads: `LLM.generate` completes the batch, teacher and
student give the logits of all completion tokens, AdamW makes a step on fp32 weights, vLLM loads them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup


def padded(prompts: list[list[int]], completions: list[list[int]], pad: int) -> tuple[torch.Tensor, ...]:
    """Token ids [B, S], prompts to the left of one column; which are there; which of the last C columns, of
    completions, are."""
    before, behind = max(map(len, prompts)), max(map(len, completions))
    ids_BS = torch.full((len(prompts), before + behind), pad)
    there_BS = torch.zeros_like(ids_BS)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = before - len(prompt), before + len(completion)
        ids_BS[row, start:end], there_BS[row, start:end] = torch.tensor(prompt + completion), 1
    return ids_BS, there_BS, there_BS[:, before:].bool()


def log_probs(model: Any, ids_BS: torch.Tensor, there_BS: torch.Tensor, count: int) -> torch.Tensor:
    """Of the tokens in the last `count` columns, fp32 [B, C, V]."""
    positions_BS = (there_BS.cumsum(1) - 1).clamp(min=0)
    output = model(
        ids_BS, attention_mask=there_BS, position_ids=positions_BS, use_cache=False, logits_to_keep=count + 1
    )
    return output.logits[:, :-1].float().log_softmax(-1)


def main() -> None:
    """Train one job."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else it leaves out one core
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
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
    optimizer = torch.optim.AdamW(student.parameters(), job["rate"], (0.9, 0.95), weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, job["warmup"], job["steps"])
    folder, generated, paused = Path(job["output"]), 0, 0.0
    with (folder / "steps.jsonl").open("w", buffering=1) as file:
        for step in range(1, job["steps"] + 1):
            asked = prompts[(step - 1) * job["batch"] : step * job["batch"]]
            outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
            completions = [list(output.outputs[0].token_ids) for output in outputs]
            ids_BS, there_BS, trained_BC = padded(asked, completions, tokenizer.pad_token_id)
            with torch.autocast("cpu", torch.bfloat16, job["bf16"]):
                with torch.no_grad():
                    logq_BCV = log_probs(teacher, ids_BS, there_BS, trained_BC.shape[1])
                logp_BCV = log_probs(student, ids_BS, there_BS, trained_BC.shape[1])
            kl_BC = kl_div(logq_BCV, logp_BCV, reduction="none", log_target=True).sum(-1)
            kl_BC[trained_BC].mean().backward()
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
            now = time.time()
            file.write(json.dumps({"step": step, "time": now - paused, "generated": generated}) + "\n")
            if step in job["save_at"]:
                student.save_pretrained(folder / f"step-{step}")
                tokenizer.save_pretrained(folder / f"step-{step}")
            paused += time.time() - now
    os._exit(0)  # the engine has nothing to finish


if __name__ == "__main__":
    main()
