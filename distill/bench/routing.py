"""What routing replay does: `distill bench routing`.

The quickstart's task with students of 4 layers of experts, all in bf16. Rounding: tokens that a student
samples before its first step, by the rollout engine's log-probabilities and by transformers' of the same
weights, routed again and replayed. Learning: the student of few experts, trained with and without
`rollout.routing_replay`, by the objective that leans most on p/μ.

A token changes an expert where the margin between the last chosen and the first left out is within
rounding. bf16 rounds by a share of a logit, so the scale of a router's logits does not matter. Margins do,
and they shrink as experts grow in number, which is why a student with as many as real ones is measured too.
Of Qwen3-30B-A3B, 48 layers of 128 experts, 8 for a token, 10 % of a token's routers are reported to differ
between two engines, and KL(μ‖p) to fall from 1.5e-3 to half of it by replay (arXiv 2510.11370); four layers
add up less rounding.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distill.bench import pipeline
from distill.bench.runner import Figures, Row, TrialCache, comparison, medians
from distill.run_log.journal import read_all
from distill.run_log.records import Rollout
from distill.tasks import Models
from distill.tasks.sort_letters import (
    EOS_ID,
    PAD_ID,
    STUDENT,
    TEACHER,
    VOCABULARY,
    lesson,
    letter_tokenizer,
    untaught,
)
from distill.tasks.teaching import Recipe, taught_pair
from student_trainer.routing import LIVE as ROUTED_LIVE
from sync.wire import unpack

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

STEPS, FEW_STEPS = 200, 3
MIXTURE: Final = replace(STUDENT, layers=4)
EXPERTS: Final = {16: 4, 128: 8}
"""Of a layer → of a token in it."""
LEARNS: Final = 16
LIVE, REPLAYED = "routed again", "replayed"
WAYS: Final = {LIVE: "rollout.routing_replay=false", REPLAYED: "rollout.routing_replay=true"}
SETTINGS: Final = (
    "trainer.lr=5e-4",
    'objective={type="sampled"}',
    "evaluation.every=0",
    "preflight.mismatch_tolerance=1",
)
ROWS: Final = {
    "mismatch_kl": Row("KL(μ‖p) at version 0, nats per token", ".2e", -1),
    "rho_max": Row("largest ρ at version 0", ".3f", -1),
    "effective_sample_size": Row("effective sample size of all steps", ".3f", 1),
    "dearest": Row("largest ρ of all steps", ".1f", -1),
    "reverse_kl": Row("reverse KL at the end", ".3f", -1),
    "pass_rate": Row("pass rate at the end", ".1%", 1),
    "step_ms": Row("ms per step, median", ".0f", -1),
}
SAME: Final = {
    "same_kl": Row("KL(μ‖p), nats per token", ".2e", -1),
    "same_rho_max": Row("largest ρ", ".3f", -1),
    "flips": Row("routers of a token that choose other experts", ".1%"),
    "flipped": Row("tokens with one or more of them", ".1%"),
}
"""Of the same tokens, all that the weights of the start sampled."""


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    same: dict[int, list[Figures]] = {experts: [] for experts in EXPERTS}
    trials: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        students = {experts: make_models(folder / "models", seed, experts) for experts in EXPERTS}
        for experts, models in students.items():
            same[experts].append(trial(cache, folder, models, seed, WAYS[REPLAYED], FEW_STEPS))
        for way, setting in WAYS.items():
            trials[way].append(trial(cache, folder, students[LEARNS], seed, setting))
    of_same = {
        experts: {way: medians([one[way] for one in of], SAME) for way in WAYS}
        for experts, of in same.items()
    }
    learned = {way: medians(of, ROWS) for way, of in trials.items()}
    return {"medians": learned, "same": of_same, "trials": trials, "same_trials": same}


def make_models(folder: Path, seed: int, experts: int) -> Models:
    """The quickstart's teacher, and a student with experts that was taught a little."""

    def new(recipe: Recipe) -> PreTrainedModel:
        return untaught(recipe) if recipe == TEACHER else mixture(recipe, experts)

    home, pair = folder / f"sort_letters_{experts}_experts", (TEACHER, MIXTURE)
    return taught_pair(home, pair, seed, letter_tokenizer(), new, lesson, (__file__,))


def mixture(recipe: Recipe, experts: int) -> PreTrainedModel:
    """Random weights, fp32; as many parameters for a token, whatever the experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=EXPERTS[experts],
        moe_intermediate_size=recipe.feed_forward // EXPERTS[experts],
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3MoeForCausalLM(config)


def trial(
    cache: TrialCache, folder: Path, models: Models, seed: int, setting: str, steps: int = STEPS
) -> Figures:
    """One run, or what is kept of it: of few steps SAME of both ways, else ROWS."""

    def make() -> Figures:
        paths = [f"student.path={models.student}", f"teachers.sorter.path={models.teacher}"]
        pipeline.run_quickstart(folder, "trial", seed, steps, [*SETTINGS, *paths, setting])
        few = steps < STEPS
        return same_tokens(folder / "trial", models.student) if few else figures(folder / "trial")

    name = models.student.parent.name
    return cache.get({"seed": seed, "setting": setting, "models": name, "steps": steps}, make)


def figures(run_dir: Path) -> Figures:
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


def same_tokens(run_dir: Path, student: Path) -> Figures:
    """SAME of both ways: the completions that the student itself generated, through transformers in bf16.

    Letters: T tokens of a completion, M layers of experts, K experts of a token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16).eval()
    found = dict[str, Figures]()
    for way in WAYS:
        parts = [computed(model, rollout, way == REPLAYED) for rollout in first_rollouts(run_dir)]
        log_rho_T, differs_TM = (torch.cat(of).double() for of in zip(*parts, strict=True))
        found[way] = {
            "same_kl": float((log_rho_T.expm1() - log_rho_T).mean()),
            "same_rho_max": float(log_rho_T.max().exp()),
            "flips": float(differs_TM.mean()),
            "flipped": float(differs_TM.amax(1).mean()),
        }
    return found


def computed(model: Any, rollout: Rollout, replay: bool) -> tuple[Tensor, Tensor]:
    """[T]: log p/μ of the completion's tokens, and bool [T, M]: whether other experts computed them."""
    import torch

    from student_trainer.routing import replayed, routers

    assert rollout.routes is not None, "the run recorded them"
    prompt, tokens = (unpack(one).astype(np.int64) for one in (rollout.prompt, rollout.tokens))
    routes_SMK = torch.from_numpy(unpack(rollout.routes).astype(np.int64))
    ids_1L, first, chosen = (
        torch.from_numpy(np.r_[prompt, tokens])[None],
        len(prompt) - 1,
        list[torch.Tensor](),
    )
    routed = routers(model)
    hooks = [
        one.module.register_forward_hook(lambda _, __, result: chosen.append(result[2])) for one in routed
    ]
    with (
        torch.no_grad(),
        replayed(routed, routes_SMK if replay else torch.full_like(routes_SMK, ROUTED_LIVE)),
    ):
        logits_TV = model(input_ids=ids_1L[:, :-1], use_cache=False).logits[0, first:]
    for hook in hooks:
        hook.remove()
    logp_T = logits_TV.float().log_softmax(-1).gather(1, ids_1L[0, first + 1 :, None])[:, 0]
    own_TMK, recorded_TMK = (one[first:].sort(-1).values for one in (torch.stack(chosen, 1), routes_SMK))
    return logp_T - torch.from_numpy(unpack(rollout.logprob).copy()), (own_TMK != recorded_TMK).any(-1)


def first_rollouts(run_dir: Path) -> list[Rollout]:
    """Of a run, those that the weights it began with generated."""
    every = (record for _, record in read_all(run_dir / "journal") if isinstance(record, Rollout))
    return [one for one in every if not one.is_released and {span.version.step for span in one.spans} == {0}]


def table(report: Figures) -> str:
    """The medians side by side, as Markdown."""
    found, lines = report["medians"], list[str]()
    for experts, same in report["same"].items():
        lines += [f"{experts} experts a layer, {EXPERTS[experts]} for a token: the same tokens both ways", ""]
        lines += [*comparison(same[LIVE], same[REPLAYED], SAME, list(WAYS)), ""]
    lines += [f"{LEARNS} experts: {STEPS} steps", ""]
    return "\n".join(lines + comparison(found[LIVE], found[REPLAYED], ROWS, list(WAYS)))
