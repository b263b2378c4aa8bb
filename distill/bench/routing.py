"""What routing replay does: `distill bench routing`.

The quickstart's task with students of 4 layers of experts, all in bf16. Rounding: tokens that a replica
samples before any training, by its log-probabilities and by those of transformers with the same weights and
the trainer's fp32 logits, routed again and replayed. Learning: the taught student of
few experts, trained with and without `rollout.routing_replay`, by the objective that leans most on p/μ.

A token changes an expert where the margin between the last chosen and the first left out is within
rounding. bf16 rounds by a share of a logit, so the scale of a router's logits does not matter. Margins do,
and they shrink as experts grow in number. What a change costs depends on what experts add to the stream of
hidden states: little in a student that was hardly taught from small random weights, much where weights are
drawn wide. So students differ in both. Of Qwen3-30B-A3B, 48 layers of 128 experts, 8 for a token, 10 % of a
token's routers are reported to differ between two engines, and KL(μ‖p) to fall from 1.5e-3 to half of it by
replay (arXiv 2510.11370).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from distill.bench import pipeline
from distill.bench.runner import Figures, TrialCache, markdown
from distill.bench.sync_transports import completed, started
from distill.tasks import Models, sort_letters
from distill.tasks.sort_letters import EOS_ID, LONGEST, PAD_ID, STUDENT, VOCABULARY, lesson, letter_tokenizer
from distill.tasks.teaching import Recipe, taught_pair
from student_trainer.head import project
from student_trainer.routing import LIVE as ROUTED_LIVE
from student_trainer.routing import replayed, routers
from sync.wire import Generated, GeneratePrompt, GenerateRequest, Sampling, unpack

STEPS, PROMPTS, CONTEXT = 200, 256, 64
TAUGHT: Final = replace(STUDENT, layers=4)
UNTAUGHT: Final = replace(TAUGHT, steps=0)


@dataclass(frozen=True)
class Start:
    """A student before its first step."""

    recipe: Recipe
    experts: int
    chosen: int
    """Of the experts, for a token; each is as wide as a dense layer divided by so many."""
    std: float
    """Standard deviation of the weights as drawn."""

    def __str__(self) -> str:
        taught = f"taught {self.recipe.steps} steps" if self.recipe.steps else "untaught"
        return f"{self.experts} experts, {self.chosen} chosen, drawn with {self.std}, {taught}"


STARTS: Final = {
    "wide-16": Start(UNTAUGHT, 16, 4, 0.15),
    "wide-128": Start(UNTAUGHT, 128, 8, 0.15),
    "wide-16-taught": Start(TAUGHT, 16, 4, 0.15),
    "16": Start(TAUGHT, 16, 4, 0.02),
    "128": Start(TAUGHT, 128, 8, 0.02),
}
LEARNS: Final = "16"
LIVE, REPLAYED = "routed again", "replayed"
WAYS: Final = {LIVE: "rollout.routing_replay=false", REPLAYED: "rollout.routing_replay=true"}
SETTINGS: Final = (
    "trainer.lr=5e-4",
    'objective={type="sampled"}',
    "evaluation.every=0",
    "preflight.mismatch_tolerance=1",
)
ROWS: Final = {
    "mismatch_kl": ("KL(μ‖p) of the first step, nats per token", ".1e"),
    "rho_max": ("largest ρ of the first step", ".2f"),
    "effective_sample_size": ("effective sample size of all steps", ".3f"),
    "dearest": ("largest ρ of all steps", ".1f"),
    "reverse_kl": ("reverse KL at the end", ".3f"),
    "pass_rate": ("pass rate at the end", ".1%"),
    "step_ms": ("ms per step, median", ".0f"),
}
"""Of a run of STEPS."""
SAME: Final = {
    "added": ("norm that experts add to the stream", ".0%"),
    "flips": ("routers of a token that choose otherwise", ".1%"),
    "flipped": ("tokens with one or more of them", ".1%"),
    "live_kl": ("KL(μ‖p), nats per token, routed again", ".1e"),
    "kl": ("the same, replayed", ".1e"),
    "falls_by": ("falls by", ".1f"),
    "live_rho_max": ("largest ρ, routed again", ".2f"),
    "rho_max": ("the same, replayed", ".2f"),
}
"""Of the same tokens."""


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; the figures of every seed. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    models = {name: [make_models(folder / "models", seed, name) for seed in range(seeds)] for name in STARTS}
    return {
        "same": {
            name: [same_tokens(cache, folder, one.student, seed) for seed, one in enumerate(of)]
            for name, of in models.items()
        },
        "learned": {
            way: [trial(cache, folder, one, seed, way) for seed, one in enumerate(models[LEARNS])]
            for way in WAYS
        },
    }


def make_models(folder: Path, seed: int, name: str) -> Models:
    """The quickstart's teacher, and the student of STARTS[name]."""
    start = STARTS[name]
    home, pair = folder / f"student_{name}", (UNTAUGHT, start.recipe)
    as_drawn_and_taught = taught_pair(
        home, pair, seed, letter_tokenizer(), lambda _: mixture(start), lesson, (__file__,)
    )
    return Models(sort_letters.make_models(folder, seed).teacher, as_drawn_and_taught.student)


def mixture(start: Start) -> PreTrainedModel:
    """Random weights, fp32; as many parameters for a token, whatever the experts."""
    recipe = start.recipe
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=32,
        num_experts=start.experts,
        num_experts_per_tok=start.chosen,
        moe_intermediate_size=recipe.feed_forward // start.chosen,
        norm_topk_prob=True,
        initializer_range=start.std,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3MoeForCausalLM(config)


def trial(cache: TrialCache, folder: Path, models: Models, seed: int, way: str) -> Figures:
    """ROWS of one run, or what is kept of it."""
    paths = [f"student.path={models.student}", f"teachers.sorter.path={models.teacher}"]
    return pipeline.trial(cache, folder, [*SETTINGS, *paths, WAYS[way]], seed, STEPS, figures)


def figures(run_dir: Path, _: pipeline.CpuProfile) -> Figures:
    """Of a finished run."""
    lines, after = pipeline.step_lines(run_dir), json.loads((run_dir / "summary.json").read_text())["after"]
    first: dict[str, Any] = lines[0]
    return {
        "mismatch_kl": first["train/mismatch_kl"],
        "rho_max": first["train/rho_max"],
        "effective_sample_size": fmean(line["train/effective_sample_size"] for line in lines),
        "dearest": max(line["train/rho_max"] for line in lines),
        "reverse_kl": after["reverse_kl"],
        "pass_rate": after["pass_rate"],
        "step_ms": pipeline.median_gap_ms(lines),
    }


def same_tokens(cache: TrialCache, folder: Path, student: Path, seed: int) -> Figures:
    """SAME: what a replica samples, through transformers in bf16; or what is kept of it.

    Letters: T tokens of a completion, M layers of experts, K experts of a token, H hidden size.
    """

    def make() -> Figures:
        samples = asyncio.run(sampled(folder / "replicas" / student.parent.name, student, seed))
        model = AutoModelForCausalLM.from_pretrained(
            student, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        return compared(model, samples)

    return cache.get({"seed": seed, "samples": PROMPTS, "student": student.parent.name}, make)


async def sampled(work: Path, student: Path, seed: int) -> list[tuple[list[int], Generated]]:
    """Prompts of the task and their completions, by a replica as a run starts it."""
    task = sort_letters.make()
    prompts = [list(task.prompt(seed, index).token_ids or ()) for index in range(PROMPTS)]
    request = GenerateRequest(
        sampling=Sampling(max_tokens=LONGEST + 3, stop_token_ids=[EOS_ID], routes=True),
        prompts=[GeneratePrompt(str(index), ids, seed=index) for index, ids in enumerate(prompts)],
    )
    async with started(student, work, context=CONTEXT, routes=True) as replica:
        return [one async for one in completed(replica, request)]


def compared(model: Any, samples: Sequence[tuple[list[int], Generated]]) -> Figures:
    """SAME of prompts and completions."""
    found: Figures = {}
    for prefix, replay in {"live_": False, "": True}.items():
        parts = [computed(model, prompt, answer, replay) for prompt, answer in samples]
        log_rho_T, differs_TM, added_TM = (torch.cat(of).double() for of in zip(*parts, strict=True))
        found[f"{prefix}kl"] = float((log_rho_T.expm1() - log_rho_T).mean())
        found[f"{prefix}rho_max"] = float(log_rho_T.max().exp())
        if not replay:
            found |= {
                "added": float(added_TM.mean()),
                "flips": float(differs_TM.mean()),
                "flipped": float(differs_TM.amax(1).mean()),
            }
    return found


def computed(model: Any, prompt: list[int], answer: Generated, replay: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[T]: log p/μ of the completion's tokens; bool [T, M]: whether other experts computed them; [T, M]: norm
    of what these added to a layer's output, as a share of the output's."""
    assert answer.routes is not None, "they were asked for"
    routes_SMK = torch.from_numpy(unpack(answer.routes).astype(np.int64))
    ids_1L, first = torch.tensor([[*prompt, *unpack(answer.token_ids).tolist()]]), len(prompt) - 1
    routed, layers = routers(model), model.model.layers
    taken_SMK = routes_SMK if replay else torch.full_like(routes_SMK, ROUTED_LIVE)
    chosen, added, out = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    hooks = [
        *(one.module.register_forward_hook(lambda *of: chosen.append(of[2][2])) for one in routed),
        *(layer.mlp.register_forward_hook(lambda *of: added.append(of[2][0])) for layer in layers),
        *(layer.register_forward_hook(lambda *of: out.append(of[2][0])) for layer in layers),
    ]
    with torch.no_grad(), replayed(routed, taken_SMK):
        hidden_TH = model.model(input_ids=ids_1L[:, :-1], use_cache=False).last_hidden_state[0, first:]
        logp_TV = project(hidden_TH, model.lm_head.weight, None).log_softmax(-1)
    for hook in hooks:
        hook.remove()
    logp_T = logp_TV.gather(1, ids_1L[0, first + 1 :, None])[:, 0]
    own_TMK, recorded_TMK = (one[first:].sort(-1).values for one in (torch.stack(chosen, 1), routes_SMK))
    added_TM, out_TM = (torch.stack(of, 1)[first:].float().norm(dim=-1) for of in (added, out))
    log_rho_T = logp_T - torch.from_numpy(unpack(answer.logprob).copy())
    return log_rho_T, (own_TMK != recorded_TMK).any(-1), added_TM / out_TM


def table(report: Figures) -> str:
    """Both parts as Markdown, the seeds side by side."""
    same = {
        str(STARTS[name]): [one | {"falls_by": one["live_kl"] / one["kl"]} for one in of]
        for name, of in report["same"].items()
    }
    pairs = list(zip(*(report["learned"][way] for way in WAYS), strict=True))
    lines = ["The same tokens both ways, of every seed", ""]
    lines += markdown(
        ["", *same],
        (
            [title, *(", ".join(format(one[key], form) for one in of) for of in same.values())]
            for key, (title, form) in SAME.items()
        ),
    )
    lines += ["", f"{STARTS[LEARNS]}: {STEPS} steps, {' → '.join(WAYS)}", ""]
    lines += markdown(
        ["", *(f"seed {seed}" for seed in range(len(pairs)))],
        (
            [title, *(" → ".join(format(one[key], form) for one in pair) for pair in pairs)]
            for key, (title, form) in ROWS.items()
        ),
    )
    return "\n".join(lines)
