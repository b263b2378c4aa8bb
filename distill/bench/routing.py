"""What routing replay does: `distill bench routing`.

The quickstart's task with a student of 128 experts a layer, 8 for each token, all in bf16, trained with and
without `rollout.routing_replay`, seed by seed, by the objective that leans most on p/μ. The first step is
trained on rollouts of the very weights that are trained: what it finds between μ and p is rounding, and the
experts that rounding sends a token to.

Why so many experts: a token changes one where the margin between the last chosen and the first left out is
within rounding. bf16 rounds by a share of a logit, so the logits' scale does not matter; margins do, and they
shrink as experts grow in number: of this student with 16 experts, 4 for a token, 1 % of a token's routers
differ. Of Qwen3-30B-A3B, which has 48 layers of 128, 10 % are reported to differ between two engines, and
KL(μ‖p) to fall from 1.5e-3 to half of it with replay (arXiv 2510.11370). Four layers add up less rounding.
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
    from transformers import PreTrainedModel

STEPS: Final = 200
EXPERTS, CHOSEN = 128, 8
MIXTURE: Final = replace(STUDENT, layers=4)
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
"""Of the same tokens, all of version 0 in a run whose routes were recorded."""


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    trials: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        models = make_models(folder / "models", seed)
        for way, setting in WAYS.items():
            trials[way].append(trial(cache, folder, models, seed, setting))
    same = {way: medians([one["same"][way] for one in trials[REPLAYED]], SAME) for way in WAYS}
    return {"medians": {way: medians(of, ROWS) for way, of in trials.items()}, "same": same, "trials": trials}


def make_models(folder: Path, seed: int) -> Models:
    """The quickstart's teacher, and a student with experts that was taught a little."""

    def new(recipe: Recipe) -> PreTrainedModel:
        return untaught(recipe) if recipe == TEACHER else mixture(recipe)

    home, pair = folder / "sort_letters_experts", (TEACHER, MIXTURE)
    return taught_pair(home, pair, seed, letter_tokenizer(), new, lesson, (__file__,))


def mixture(recipe: Recipe) -> PreTrainedModel:
    """Random weights, fp32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=recipe.feed_forward // CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3MoeForCausalLM(config)


def trial(cache: TrialCache, folder: Path, models: Models, seed: int, setting: str) -> Figures:
    """One run, or what is kept of it."""

    def make() -> Figures:
        paths = [f"student.path={models.student}", f"teachers.sorter.path={models.teacher}"]
        pipeline.run_quickstart(folder, "trial", seed, STEPS, [*SETTINGS, *paths, setting])
        found = figures(folder / "trial")
        recorded = setting == WAYS[REPLAYED]
        return found | ({"same": same_tokens(folder / "trial", models.student)} if recorded else {})

    return cache.get({"seed": seed, "setting": setting, "models": models.student.parent.name}, make)


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
    """SAME of both ways: the completions that the student itself generated, through transformers in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    from student_trainer.routing import replayed, routers

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16).eval()
    routed, chosen = routers(model), list[torch.Tensor]()
    hooks = [
        one.module.register_forward_hook(lambda _, __, result: chosen.append(result[2])) for one in routed
    ]
    flips, log_rho = list[torch.Tensor](), {way: list[torch.Tensor]() for way in WAYS}
    for rollout in first_rollouts(run_dir):
        assert rollout.routes is not None, "the run recorded them"
        prompt, tokens = (unpack(one).astype(np.int64) for one in (rollout.prompt, rollout.tokens))
        ids_1L, logp_T = torch.from_numpy(np.r_[prompt, tokens])[None], unpack(rollout.logprob).copy()
        routes_SMK = torch.from_numpy(unpack(rollout.routes).astype(np.int64))
        for way, routes in ((LIVE, torch.full_like(routes_SMK, ROUTED_LIVE)), (REPLAYED, routes_SMK)):
            chosen.clear()
            with torch.no_grad(), replayed(routed, routes):
                logits_TV = model(input_ids=ids_1L[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
            p_T = logits_TV.float().log_softmax(-1).gather(1, ids_1L[0, len(prompt) :, None])[:, 0]
            log_rho[way].append(p_T - torch.from_numpy(logp_T))
            if way == LIVE:
                own_TMK = torch.stack(chosen, 1)[len(prompt) - 1 :].sort(-1).values
                flips.append((own_TMK != routes_SMK[len(prompt) - 1 :].sort(-1).values).any(-1))
    for hook in hooks:
        hook.remove()
    flips_TM = torch.cat(flips).double()
    shares = {"flips": float(flips_TM.mean()), "flipped": float(flips_TM.amax(1).mean())}
    return {
        way: {
            "same_kl": float((log_rho_T.expm1() - log_rho_T).mean()),
            "same_rho_max": float(log_rho_T.max().exp()),
            **(shares if way == LIVE else dict.fromkeys(shares, 0.0)),
        }
        for way, log_rho_T in ((way, torch.cat(of)) for way, of in log_rho.items())
    }


def first_rollouts(run_dir: Path) -> list[Rollout]:
    """Of a run, those that the weights it began with generated."""
    every = (record for _, record in read_all(run_dir / "journal") if isinstance(record, Rollout))
    return [one for one in every if not one.is_released and {span.version.step for span in one.spans} == {0}]


def table(report: Figures) -> str:
    """The medians side by side, as Markdown."""
    found = report["medians"]
    lines = comparison(found[LIVE], found[REPLAYED], ROWS, list(WAYS))
    found = report["same"]
    about = ["", "All tokens of version 0 of a run that recorded its routes, both ways:", ""]
    return "\n".join(lines + about + comparison(found[LIVE], found[REPLAYED], SAME, list(WAYS)))
