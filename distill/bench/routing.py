"""What routing replay does: `distill bench routing`.

The quickstart's task with a student of 16 experts a layer, 4 for each token, all in bf16, trained with and
without `rollout.routing_replay`, seed by seed, by the objective that leans most on p/μ. The first step is
trained on rollouts of the very weights that are trained: what it finds between μ and p is rounding, and the
experts that rounding sends a token to.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from distill.bench import pipeline
from distill.bench.runner import Figures, Row, TrialCache, comparison, medians
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS: Final = 200
EXPERTS, CHOSEN = 16, 4
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


def run(folder: Path, seeds: int = 3) -> Figures:
    """Run what is missing in `folder`; every trial, and the medians. Raises DistillError when a run fails."""
    folder = folder.absolute()
    cache = TrialCache(folder / "trials.jsonl")
    trials: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        models = make_models(folder / "models", seed)
        for way, setting in WAYS.items():
            trials[way].append(trial(cache, folder, models, seed, setting))
    return {"medians": {way: medians(of, ROWS) for way, of in trials.items()}, "trials": trials}


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
        return figures(folder / "trial")

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


def table(report: Figures) -> str:
    """The medians side by side, as Markdown."""
    found = report["medians"]
    return "\n".join(comparison(found[LIVE], found[REPLAYED], ROWS, list(WAYS)))
