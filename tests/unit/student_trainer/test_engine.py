"""The learning rate of each step: closed forms, transformers, and what a checkpoint may not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from student_trainer.config import TrainerSettings
from student_trainer.engine import apply_rate, hyperparameters, without_randomness

STEPS, WARMUP, RATE = 24, 5, 2e-3


def settings(kind: str, warmup: int = WARMUP) -> TrainerSettings:
    return TrainerSettings(deepspeed=Path("x.json"), lr=RATE, warmup_steps=warmup, lr_schedule=kind)


def optimizer(rate: float = RATE, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, **more)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_rates_are_those_of_transformers_schedules(kind: str) -> None:
    theirs, ours = optimizer(), optimizer()
    known = transformers.get_scheduler(kind, theirs, WARMUP, STEPS)
    given = hyperparameters(ours.param_groups)
    for step in range(STEPS):
        apply_rate(ours.param_groups, given, settings(kind).lr_share(step, STEPS))
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-18)
        theirs.step()
        known.step()


def test_a_constant_rate_warms_up_and_stays() -> None:
    shares = [settings("constant").lr_share(step, STEPS) for step in range(8)]
    assert shares == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    assert settings("constant", warmup=0).lr_share(0, STEPS) == 1.0


def test_a_run_as_short_as_its_warm_up_still_has_a_rate() -> None:
    assert settings("linear", warmup=4).lr_share(3, 4) == 0.75
    assert settings("cosine", warmup=4).lr_share(9, 4) == 0.0


def test_a_restored_optimizer_trains_with_what_is_configured_and_keeps_its_moments() -> None:
    saved = optimizer(rate=1.0, betas=(0.1, 0.2), weight_decay=0.5)
    saved.param_groups[0]["params"][0].grad = torch.ones(1)
    saved.step()
    resumed = optimizer(weight_decay=0.1)
    given = hyperparameters(resumed.param_groups)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.param_groups[0]["lr"] == 1.0, "the checkpoint's rate is restored"
    apply_rate(resumed.param_groups, given, 0.5)
    (group,) = resumed.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (RATE / 2, (0.9, 0.999), 0.1)
    assert resumed.state[group["params"][0]]["step"] == 1


def test_groups_with_rates_of_their_own_keep_their_ratio() -> None:
    groups = [{"params": [], "lr": 0.02}, {"params": [], "lr": 0.001}]
    given = hyperparameters(groups)
    for share in (0.5, 0.25):
        apply_rate(groups, given, share)
    assert [group["lr"] for group in groups] == [0.005, 0.00025]


# --- the trained p is the sampled p: a model's own dropout and router jitter play no part -------------------


SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = [
    GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=32, layerdrop=0.5),
    LlamaConfig(**SMALL, intermediate_size=32, attention_dropout=0.2),
    MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, router_jitter_noise=0.3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_training_mode_does_not_change_the_logits(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        assert not torch.equal(model.train()(tokens).logits, expected)
        torch.testing.assert_close(without_randomness(model).train()(tokens).logits, expected)
    assert model.training
