"""Rows laid end to end give the loss and the gradients of rows alone, or the model is refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attention_families import FAMILIES, VOCAB, model
from torch import Tensor

from student_trainer.config import LoRAConfig
from student_trainer.engine import Student, check_rows, head_shape, with_adapters
from student_trainer.varlen import (
    TOGETHER,
    PackedRows,
    groups_of,
    replace_attention,
    row_attention,
    window_of,
)
from sync.base.errors import ConfigError

LENGTHS = (9, 1, 4, 12, 2)


def student(network: Any, varlen: bool = True) -> Student:
    return Student(network, head_shape(network.config, VOCAB, 1.0), 8, varlen)


def packed(family: str, attention: str = "sdpa") -> Any:
    network = model(family)
    replace_attention(network, attention)
    return network


CPU = torch.device("cpu")
TOKENS = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))


def loss_and_gradients(network: Any, together: bool, apart: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Of a random function of every hidden state, so that no position is left out.

    `apart`: the model is told where the rows begin that are `together`.
    """
    parts, device = [TOKENS] if together else TOKENS.split(LENGTHS), network.device
    more = PackedRows(LENGTHS).arguments(device) if together and apart else {}
    states = [network.base_model(part[None].to(device), use_cache=False, **more)[0][0] for part in parts]
    hidden_SH = torch.cat(states)
    weight_SH = torch.randn(hidden_SH.shape, generator=torch.Generator().manual_seed(7)).to(hidden_SH)
    loss = (hidden_SH * weight_SH).sum() + hidden_SH.square().mean()
    network.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in network.parameters() if p.grad is not None]


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest over parameters, as a share of the largest gradient of that parameter."""
    pairs = list(zip(one, other, strict=True))
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_rows_alone(family: str, attention: str) -> None:
    loss, gradients = loss_and_gradients(model(family), together=False)
    network = packed(family, attention)
    found, others = loss_and_gradients(network, together=True)
    assert float(found) == pytest.approx(float(loss), rel=1e-6, abs=2e-5)
    assert difference(others, gradients) <= 3e-6
    assert check_rows(student(network), student(network), CPU) <= 1e-5
    moved, _ = loss_and_gradients(model(family), together=True, apart=False)
    assert abs(float(moved - loss)) > 0.01, "one sequence of all tokens is another function"


def test_short_rows_of_bf16_on_a_cpu_have_the_gradients_of_fp32() -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    states = [draw(2, heads, 48, 16).bfloat16() for heads in (4, 2, 2)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [part.to(dtype, copy=True).requires_grad_() for part in states]
        attended, _ = row_attention(torch.nn.Module(), *leaves, None)
        attended.float().square().sum().backward()
        results.append([attended.detach(), *(leaf.grad for leaf in leaves)])
    for half, single in zip(*results, strict=True):
        error = (half.float() - single).norm() / single.norm()
        assert half.dtype == torch.bfloat16
        assert error < 2.1e-3, "rounding of what goes in and comes out"


def test_recomputed_activations_give_the_same_gradients() -> None:
    _, gradients = loss_and_gradients(packed("Gemma3"), together=True)
    network = packed("Gemma3")
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert network.is_gradient_checkpointing
    _, again = loss_and_gradients(network, together=True)
    assert difference(gradients, again) == 0.0


def test_adapters_hand_on_where_rows_begin() -> None:
    pupil = student(with_adapters(packed("Qwen3"), LoRAConfig(rank=2), 0))
    assert check_rows(pupil, pupil, CPU) <= 1e-5


@pytest.mark.parametrize(("mask", "sliding_window"), [(1, None), (None, 1), (1, 4)])
def test_a_window_of_1_shows_a_token_itself_alone(mask: int | None, sliding_window: int | None) -> None:
    """Whether it comes in the place of a mask, by its name, or as both, which then says less."""
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    found, _ = row_attention(torch.nn.Module(), query, key, value, mask, sliding_window=sliding_window)
    torch.testing.assert_close(found, value.transpose(1, 2))


def test_rows_of_about_one_length_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And long ones alone: about Σ l² products and not (Σ l)²."""
    sizes: list[tuple[int, int, int]] = []

    def counted(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Tensor:
        sizes.append((query.shape[0], query.shape[2], key.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(query, key, *rest, **more)

    monkeypatch.setattr("student_trainer.varlen.scaled_dot_product_attention", counted)
    loss_and_gradients(packed("Llama", "sdpa"), together=True)
    assert sizes == 2 * [(3, 4, 4), (2, 12, 12)], "1, 4 and 2 tokens; 9 and 12"
    short = TOGETHER // 64
    assert groups_of((8,) * (short + 1), CPU).sizes == [(short, 8), (1, 8)]
    assert groups_of((300, 7, 301, 299), CPU).sizes == [(1, 7), (1, 300), (1, 301), (1, 299)]


def test_a_model_with_attention_of_its_own_is_refused_by_name() -> None:
    why = "BloomForCausalLM does not take its attention from"
    with pytest.raises(ConfigError, match=rf'packing = "varlen".*{why}.*set trainer.packing = "padded"'):
        replace_attention(model("Bloom", n_layer=1, n_head=4), "sdpa")


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal = False"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask of its own"),
    ],
)
def test_what_is_not_computed_row_by_row_is_refused(asked: dict[str, Any], name: str) -> None:
    states = torch.zeros(1, 2, 4, 8)
    given = {"attention_mask": None, "use_cache": False, "position_ids": torch.zeros(1)}
    row_attention(torch.nn.Module(), states, states, states, **given)
    with pytest.raises(ConfigError, match=f"Module asks for {name}, which is not computed"):
        row_attention(torch.nn.Module(), states, states, states, **given | asked)


def test_masks_other_than_causal_ones_are_refused() -> None:
    assert window_of(config=None) is None
    assert window_of(config=None, local_size=7) == 7
    for more in ({"use_vmap": True}, {"allow_is_bidirectional_skip": True}, {"attention_mask": TOKENS}):
        with pytest.raises(ConfigError, match="NoneType asks for a mask that is not causal"):
            window_of(config=None, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_each_other_are_noticed_at_the_start(dtype: torch.dtype) -> None:
    from transformers import AttentionInterface

    def leaking(module: Any, *states: Any, packed_rows: PackedRows | None = None, **more: Any) -> Any:
        return row_attention(module, *states, **more)

    AttentionInterface.register("leaking", leaking)
    network = model("Qwen3").to(dtype)
    network.set_attn_implementation("leaking")
    pupil = student(network)
    with pytest.raises(
        ConfigError, match=r"Qwen3ForCausalLM with attention 'leaking': .* differ by .*padded"
    ):
        check_rows(pupil, pupil, CPU)
    replace_attention(network, "sdpa")
    assert check_rows(pupil, pupil, CPU) < (1e-5 if dtype == torch.float32 else 0.03)
    assert network.config._attn_implementation == "row_attention"


def test_layers_that_are_not_told_where_rows_begin_are_counted() -> None:
    """StableLM hands nothing on to its attention function."""
    pupil = student(packed("StableLm", "sdpa"))
    with pytest.raises(ConfigError, match=r'2 of 2 layers were not told how rows lie: .*packing = "padded"'):
        check_rows(pupil, pupil, CPU)


def test_padded_rows_are_compared_with_rows_alone_too() -> None:
    """In transformers, torch's attention leaves out Gemma 2's cap."""
    plain, capless = student(model("Gemma2", "eager"), False), student(model("Gemma2", "sdpa"), False)
    assert check_rows(plain, plain, CPU) < 1e-5
    with pytest.raises(ConfigError, match=r"Gemma2.* with attention 'sdpa': .*trainer.attention = \"eager\""):
        check_rows(capless, capless, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["Qwen3", "Mistral", "Gemma2"])
def test_a_gpus_kernel_computes_the_same_in_half_precision(family: str) -> None:
    wanted = loss_and_gradients(packed(family, "sdpa").double(), together=True)[1]
    network = packed(family, "sdpa").bfloat16().cuda()
    found = [grad.double().cpu() for grad in loss_and_gradients(network, together=True)[1]]
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 0.1 * float(other.norm()) + 0.01
