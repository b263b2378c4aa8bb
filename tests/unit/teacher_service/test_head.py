"""The head that is read from a checkpoint without its layers, against the whole model's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sync.base.errors import ConfigError
from teacher_service.config import TeacherConfig
from teacher_service.engines.head import CPU_COLUMNS, OutputHead, find_head, largest, load_head, log_sum_exp

VOCAB, PADDED = 37, 48
SMALL = {
    "vocab_size": PADDED,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
        ("Phi", {}),
        ("Granite", {"logits_scaling": 4.0}),
        ("Cohere", {"logit_scale": 0.0625}),
    ],
    ids=["untied", "tied", "mixture of experts", "soft cap", "bias", "divided", "multiplied"],
)
def test_a_head_without_its_model_is_the_head_of_the_model(kind: str, more: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SMALL, **more)
    ).eval()
    if (bias := getattr(model.lm_head, "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    model.save_pretrained(tmp_path)
    head, dtype, rows = load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU)
    assert (dtype, rows) == (torch.float32, PADDED)
    for name, expected in dataclasses.asdict(find_head(model, VOCAB)).items():
        got = getattr(head, name)
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected, name
    assert len(head.weight_VH) == VOCAB


def test_precision_is_the_checkpoints_unless_another_is_named(tmp_path: Path) -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU).dtype == torch.bfloat16
    assert load_head(TeacherConfig(path=str(tmp_path), dtype="float32"), VOCAB, CPU).dtype == torch.float32


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be readable here, also when a server computes"):
        load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU)


def test_logits_of_a_bf16_model_are_the_products_of_what_it_holds_summed_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    exact = hidden.double() @ weight.double().T
    logits = OutputHead(weight, None).placed(CPU).logits(hidden)
    assert logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 1e-4  # bf16 would round these to 0.1
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]


def test_a_head_that_bf16_cannot_hold_is_multiplied_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).bfloat16(), torch.randn(500, 64)
    exact = hidden.double() @ weight.double().T
    assert float((OutputHead(weight, None).placed(CPU).logits(hidden) - exact).abs().max()) < 1e-4


@pytest.mark.parametrize(("width", "k"), [(37, 37), (37, 1), (519, 64), (520, 64), (4096, 64), (4103, 64)])
def test_the_largest_of_each_row_are_those_of_topk(width: int, k: int) -> None:
    values = torch.stack([torch.randperm(width) for _ in range(9)]).float()
    top, places = largest(values, k)
    expected = values.topk(k, dim=1)
    assert torch.equal(top, expected.values)
    assert torch.equal(places, expected.indices)


def test_of_equal_values_the_largest_are_different_places() -> None:
    values = torch.randint(3, (9, 600)).float()
    top, places = largest(values, 64)
    assert torch.equal(top, values.topk(64, dim=1).values)
    assert torch.equal(values.gather(1, places), top)
    assert all(len(set(row)) == 64 for row in places.tolist())


@pytest.mark.parametrize("width", [1, CPU_COLUMNS, CPU_COLUMNS + 1, 3 * CPU_COLUMNS])
def test_the_sum_by_parts_is_that_of_whole_rows(width: int) -> None:
    values = 20 * torch.randn(5, width)
    assert torch.allclose(log_sum_exp(values).double(), values.double().logsumexp(1), atol=1e-5)
