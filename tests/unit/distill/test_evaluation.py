"""Exact reverse KL against closed forms, on models small enough to enumerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distill.evaluation.evaluation import LanguageModel, Limits, compare, evaluate, sample
from transformers import Qwen3Config, Qwen3ForCausalLM

from distill.evaluation.models import load_student
from distill.prompts.stream import Prompt
from distill.tasks.sort_letters import STUDENT, letter_tokenizer, untaught
from sync.settings import ModelSource
from sync.wire import Version
from teacher_service.engines.head import find_head
from teacher_service.engines.sampling import completions

torch.set_num_threads(1)

ROWS, KNOWN, EOS = 12, 9, 1
"""Rows of the model, ids of the tokenizer (the rest are padding), the end id."""


def tiny(seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=ROWS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            max_position_embeddings=32,
            initializer_range=0.5,
        )
    ).eval()
    return LanguageModel(model, find_head(model, KNOWN))


PROMPTS = [Prompt(str(i), [2 + (i * j) % 5 for j in range(1, 2 + i % 4)]) for i in range(12)]
LIMITS = Limits(max_tokens=6, end_ids=(EOS,), batch=5, chunk=3)


def log_probs(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """[L, V] over the known ids, one sequence at a time and without padding or cache."""
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([tokens])).logits[0, :, :KNOWN].log_softmax(-1)


def by_hand(
    student: LanguageModel, teacher: LanguageModel, prompt: list[int], done: list[int]
) -> list[float]:
    logp, logq = (log_probs(model, prompt + done)[len(prompt) - 1 : -1] for model in (student, teacher))
    return (logp.exp() * (logp - logq)).sum(-1).tolist()


def test_the_figure_is_the_mean_over_tokens_of_the_full_sum_whatever_padding_batch_and_chunk() -> None:
    student, teacher = tiny(0), tiny(1)
    generator = torch.Generator().manual_seed(5)
    total, tokens = 0.0, 0
    for start in range(0, len(PROMPTS), 5):
        rows = [p.token_ids for p in PROMPTS[start : start + 5]]
        with torch.no_grad():
            sampled = sample(student, rows, LIMITS, generator)
            kl, count = compare(student, teacher, sampled, LIMITS.chunk)
        expected = [by_hand(student, teacher, r, c) for r, c in zip(rows, completions(sampled), strict=True)]
        assert count == sum(map(len, expected))
        assert kl == pytest.approx(sum(map(sum, expected)), rel=1e-4)
        total, tokens = total + kl, tokens + count
    assert total / tokens > 0.1


def test_a_model_against_itself_is_zero() -> None:
    student = tiny(0)
    found = evaluate(student, {"t": student}, PROMPTS, LIMITS, route=lambda _: "t")
    assert found.reverse_kl == pytest.approx(0.0, abs=1e-6)


def test_completions_are_drawn_from_the_student_at_temperature_one_and_padding_rows_never() -> None:
    student = tiny(0)
    limits = Limits(max_tokens=1, end_ids=(EOS,))
    with torch.no_grad():
        sampled = sample(student, [[3, 4]] * 20000, limits, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor(completions(sampled)).flatten(), minlength=ROWS).double() / 20000
    expected = log_probs(student, [3, 4])[-1].exp().double()
    assert counts[KNOWN:].sum() == 0
    spread = (expected * (1 - expected) / 20000).sqrt()
    assert ((counts[:KNOWN] - expected).abs() <= 5 * spread + 1e-9).all()


def test_a_completion_ends_with_the_first_end_token_or_at_the_limit() -> None:
    student = tiny(0)
    with torch.no_grad():
        found = completions(sample(student, [[3]] * 200, LIMITS, torch.Generator().manual_seed(0)))
    assert all(EOS not in one[:-1] for one in found)
    assert all(one[-1] == EOS or len(one) == LIMITS.max_tokens for one in found)
    assert {len(one) for one in found} == set(range(1, LIMITS.max_tokens + 1))


def test_each_prompt_is_compared_with_the_teacher_of_its_source() -> None:
    student, other = tiny(0), tiny(1)
    mixed = [Prompt(p.id, p.token_ids, "same" if i % 2 else "other") for i, p in enumerate(PROMPTS)]
    teachers = {"same": student, "other": other}
    found = evaluate(student, teachers, mixed, LIMITS, route=lambda source: source)
    alone = [p for p in mixed if p.source == "same"]
    assert evaluate(student, teachers, alone, LIMITS, route=lambda s: s).reverse_kl < 1e-6
    assert found.reverse_kl > 0.05


def test_pass_rate_and_truncation_are_shares_and_without_a_reward_function_there_is_none() -> None:
    student = tiny(0)
    route = {"route": lambda _: "t", "version": Version(1, 7)}
    rewarded = evaluate(
        student, {"t": student}, PROMPTS, LIMITS, reward_fn=lambda _, c: c[-1] == EOS, **route
    )
    assert rewarded.pass_rate == pytest.approx(1 - rewarded.truncated)
    assert 0 < rewarded.truncated < 1
    assert (rewarded.completions, rewarded.version) == (len(PROMPTS), Version(1, 7))
    assert evaluate(student, {"t": student}, PROMPTS, LIMITS, **route).pass_rate is None


def test_a_reward_above_zero_passes_however_high_it_is() -> None:
    student, rewards = tiny(0), iter([0.0, -1.0, 2.5] * len(PROMPTS))
    report = evaluate(
        student, {"t": student}, PROMPTS, LIMITS, reward_fn=lambda p, c: next(rewards), route=lambda _: "t"
    )
    assert report.pass_rate == (len(PROMPTS) // 3) / len(PROMPTS)


def test_the_same_seed_gives_the_same_report() -> None:
    student, teacher = tiny(0), tiny(1)

    def kl(seed: int) -> float:
        found = evaluate(student, {"t": teacher}, PROMPTS, LIMITS, route=lambda _: "t", seed=seed)
        return found.reverse_kl

    assert kl(3) == kl(3) != kl(4)


def test_a_version_of_a_model_with_code_of_its_own_brings_weights_alone(tmp_path: Path) -> None:
    """The folder of a version holds no code and names none; what runs is that of the student's own folder."""
    own, version = tmp_path / "own", tmp_path / "version"
    model = untaught(STUDENT)
    model.save_pretrained(own)
    letter_tokenizer().save_pretrained(own)
    (own / "modeling_x.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class Config(Qwen3Config):\n    model_type = 'x'\n"
        "class Model(Qwen3ForCausalLM):\n    config_class = Config\n"
    )
    auto_map = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    settings = json.loads((own / "config.json").read_text()) | {"model_type": "x", "auto_map": auto_map}
    (own / "config.json").write_text(json.dumps(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    model.save_pretrained(version)
    source = ModelSource(path=str(own), trust_remote_code=True)
    loaded = load_student(source, version, letter_tokenizer(), "cpu").model
    assert type(loaded).__module__.endswith("modeling_x")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
