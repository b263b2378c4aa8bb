"""The transformers engine against a plain forward pass of one sequence at a time, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3ForCausalLM

from sync.base.errors import ConfigError
from sync.weights.snapshots import checkpoint
from sync.wire import unpack
from sync.wire.head import HeadShape, OutputHead
from teacher_service.config import TeacherConfig
from teacher_service.engines import base
from teacher_service.engines.base import EnginePrompt, Item, ScoreOptions
from teacher_service.engines.head import CPU_COLUMNS, find_head, largest, load_head, log_sum_exp
from teacher_service.engines.transformers import (
    TransformersEngine,
    check_fits,
    inverse,
    load,
    rectangles,
)

VOCAB = 37
"""Ids of the tokenizer; the model has PADDED rows."""
PADDED = 48
SIZE = {"vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = SIZE | ATTENTION | NO_ENDS | {"initializer_range": 0.3}
ROUTED = SMALL | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8}
ROUTED |= {"q_lora_rank": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
"""A bias of the router that is trained and stored is a buffer."""
HEADS = {
    "soft cap": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "bias": ("Phi", {}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
    "multiplied": ("Cohere", {"logit_scale": 0.0625}),
}
EVERYTHING = ScoreOptions(topk=5, gather=3, entropy=True, hidden=True)
LENGTHS = [9, 3, 17, 2, 9, 30, 5, 12]


@pytest.fixture(scope="session")
def qwen() -> Qwen3ForCausalLM:
    """A random Qwen3 in float32 with PADDED rows in its head."""
    return small("Qwen3", {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False}, seed=0)


def random_items(seed: int, lengths: list[int], k: int = 0) -> list[Item]:
    """Items of the given lengths, scored from a random position on; k gather ids each, some of them -1."""
    rng = np.random.default_rng(seed)
    items = []
    for length in lengths:
        first = int(rng.integers(1, length))
        gather = rng.integers(-1, VOCAB, (length - first, k)).astype(np.int32) if k else None
        items.append(Item(rng.integers(0, VOCAB, length).astype(np.int32), first, gather))
    return items


@torch.inference_mode()
def plain_logprobs(model: Any, item: Item, temperature: float = 1.0) -> np.ndarray:
    """float64 [T, V]: log-softmax over the tokenizer's rows of the whole model's logits."""
    ids = torch.from_numpy(item.token_ids_L.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, item.first - 1 : -1, :VOCAB]
    return (logits.double() / temperature).log_softmax(-1).numpy()


def close(got: np.ndarray | None, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0)


def check_against_plain(
    model: Any, engine: TransformersEngine, tolerance: float = 1e-5, temperature: float = 1.0
) -> None:
    items = random_items(1, LENGTHS, k=3)
    scores = engine.score(items, EVERYTHING._replace(temperature=temperature))
    assert engine.engine_info.vocab_size == VOCAB < PADDED
    logp_CV = np.concatenate([plain_logprobs(model, item, temperature) for item in items])
    targets_C = np.concatenate([item.token_ids_L[item.first :] for item in items])
    wanted_CK = np.concatenate([item.gather_ids_TK for item in items if item.gather_ids_TK is not None])
    rows = np.arange(len(targets_C))
    best_CK = np.argsort(-logp_CV, axis=1)[:, :5]
    close(scores.logprob_C, logp_CV[rows, targets_C], tolerance)
    assert np.array_equal(scores.topk_ids_CK, best_CK)
    close(scores.topk_logprob_CK, logp_CV[rows[:, None], best_CK], tolerance)
    close(scores.gathered_CK, np.where(wanted_CK < 0, 0, logp_CV[rows[:, None], wanted_CK]), tolerance)
    close(scores.entropy_C, -(np.exp(logp_CV) * logp_CV).sum(1), tolerance)
    if temperature == 1:
        close(logprobs_from_head(engine, scores), logp_CV, tolerance)


def logprobs_from_head(engine: TransformersEngine, scores: base.EngineScores) -> np.ndarray:
    """float64 [C, V]: what a reader computes from hidden states and the Head message, by its formula."""
    head = engine.head()
    logits = scores.hidden_CH.astype(np.float64) @ unpack(head.weight).astype(np.float64).T
    if head.bias is not None:
        logits += unpack(head.bias)
    logits *= head.scale
    if head.soft_cap is not None:
        logits = head.soft_cap * np.tanh(logits / head.soft_cap)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sizes", [{}, {"batch_tokens": 20, "head_chunk": 3}], ids=str)
def test_every_score_equals_that_of_a_plain_forward_pass(qwen: Any, sizes: Any, temperature: float) -> None:
    engine = TransformersEngine(qwen, VOCAB, TeacherConfig(path="m", **sizes))
    check_against_plain(qwen, engine, 1e-5 if temperature == 1 else 2e-5, temperature)


def test_no_more_than_a_chunk_of_logits_exists_at_once(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def watched(head: OutputHead, hidden_CH: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_CH))
        return original(head, hidden_CH)

    engine = TransformersEngine(qwen, VOCAB, TeacherConfig(path="m", head_chunk=7))
    original = OutputHead.logits
    monkeypatch.setattr(OutputHead, "logits", watched)
    items = random_items(7, LENGTHS)
    engine.score(items, EVERYTHING._replace(gather=0))
    positions = sum(item.positions for item in items)
    assert rows == [7] * (positions // 7) + [positions % 7] * (positions % 7 > 0)


def small(kind: str, more: dict[str, Any], seed: int = 1) -> Any:
    """A random model of a family, its head's bias too."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SMALL | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    if (bias := getattr(model.lm_head, "bias", None)) is not None:
        torch.nn.init.normal_(bias)
    return model


@pytest.mark.parametrize("head", HEADS)
def test_heads_with_cap_bias_or_scale_are_reproduced(head: str) -> None:
    model = small(*HEADS[head])
    check_against_plain(model, TransformersEngine(model, VOCAB), 2e-5)


def test_a_length_beyond_the_models_own_and_a_head_that_is_not_linear_are_refused() -> None:
    class Squashed(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden.sin())

    model = small("Qwen3", {"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"65 is beyond the model.s own limit of 64"):
        TransformersEngine(model, VOCAB, TeacherConfig(path="m", max_length=65))
    model.lm_head = Squashed(32, PADDED, bias=False)
    with pytest.raises(ConfigError, match="not reproduced"):
        TransformersEngine(model, VOCAB)


def test_bfloat16_hidden_states_travel_as_their_bits(qwen: Any) -> None:
    model = type(qwen)(qwen.config).to(torch.bfloat16)
    engine = TransformersEngine(model, VOCAB)
    items = random_items(5, LENGTHS)
    scores = engine.score(items, ScoreOptions(hidden=True))
    assert scores.hidden_CH.dtype == np.uint16
    hidden, weight = widen(scores.hidden_CH), widen(unpack(engine.head().weight))
    logits = torch.from_numpy(hidden @ weight.T).bfloat16().float().numpy()
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    targets = np.concatenate([item.token_ids_L[item.first :] for item in items])
    close(scores.logprob_C, logp[np.arange(len(targets)), targets], 1e-4)


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def overwrite_weights(folder: Path) -> None:
    """As a mirror does, in place."""
    for bits in checkpoint.bits(checkpoint.tensors(folder), writable=True).values():
        bits[:] = 7


@pytest.mark.parametrize("routed", [False, True], ids=["parameters", "buffers"])
def test_a_teacher_that_left_its_files_does_not_change_with_them(
    qwen: Any, tmp_path: Path, routed: bool
) -> None:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**ROUTED)) if routed else qwen
    model.save_pretrained(tmp_path)
    engine = load(TeacherConfig(path=str(tmp_path), device="cpu"), VOCAB, leave_files=True)
    loaded = engine._model.state_dict()
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    overwrite_weights(tmp_path)
    assert [name for name, tensor in before.items() if not torch.equal(tensor, loaded[name])] == []


def test_a_model_is_spread_over_all_devices_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(path: str, **options: Any) -> Any:
        asked.update(options)
        places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": "disk"}
        return SimpleNamespace(hf_device_map=places)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    why = "'m' does not fit on its 2 GPUs: 1 parts such as lm_head are left over"
    with pytest.raises(ConfigError, match=why):
        load(TeacherConfig(path="m"), VOCAB)
    assert asked["device_map"] == "auto"
    check_fits("m", {"model.embed_tokens": 0, "model.layers.1": 1, "lm_head": "cuda:1"})


def test_scores_do_not_depend_on_where_the_parts_of_a_model_are(qwen: Any, tmp_path: Path) -> None:
    """Weights of the layers are on disk and come to the CPU for each pass: accelerate's hooks, as on GPUs."""
    qwen.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map=places | {"model.layers.0": "cpu", "model.layers.1": "disk"},
        offload_folder=tmp_path / "offload",
    )
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta
    engine = TransformersEngine(spread, VOCAB)
    check_against_plain(qwen, engine)
    completions_of(engine, [EnginePrompt(np.array([3, 1], np.int32), 0)], base.GenerationParams(4, 1.0, ()))


def completions_of(
    engine: TransformersEngine, prompts: list[EnginePrompt], generation: base.GenerationParams
) -> list[base.EngineCompletion]:
    *steps, completions = engine.generate(prompts, generation)
    assert steps.count(None) == len(steps) <= generation.max_tokens
    return completions


def test_a_model_that_is_closed_between_two_steps_completes_what_it_began(qwen: Any) -> None:
    """As of a teacher that follows the student: its next version may come meanwhile."""
    engine = TransformersEngine(qwen, VOCAB)
    prompts, generation = [EnginePrompt(np.array([3, 1], np.int32), 0)], base.GenerationParams(4, 1.0, ())
    steps = engine.generate(prompts, generation)
    next(steps)
    engine.close()
    *_, (completion,) = steps
    (whole,) = completions_of(TransformersEngine(qwen, VOCAB), prompts, generation)
    np.testing.assert_array_equal(completion.token_ids_T, whole.token_ids_T)


def test_a_completion_has_the_scores_it_is_given_and_does_not_depend_on_its_batch(qwen: Any) -> None:
    engine = TransformersEngine(qwen, VOCAB)
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, VOCAB, length).astype(np.int32) for length in (3, 9, 1, 5)]
    prompts = [EnginePrompt(ids_P, seed) for seed, ids_P in enumerate(ids)]
    generation = base.GenerationParams(12, 1.0, (4, 5))
    together = completions_of(engine, prompts, generation)
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = completions_of(engine, [prompt], generation)
        np.testing.assert_array_equal(alone.token_ids_T, one.token_ids_T)
        whole = np.concatenate([prompt.token_ids_P, one.token_ids_T])
        scores = engine.score([Item(whole, len(prompt.token_ids_P))], ScoreOptions())
        close(one.logprob_T, scores.logprob_C)
        assert one.token_ids_T.max() < VOCAB
        assert one.ended == (one.token_ids_T[-1] in (4, 5))
        assert not np.isin(one.token_ids_T[:-1], (4, 5)).any()
        assert one.ended or len(one.token_ids_T) == 12


def test_tokens_are_drawn_as_often_as_the_model_says(qwen: Qwen3ForCausalLM) -> None:
    """Also at another temperature; 5 standard errors."""
    engine = TransformersEngine(qwen, VOCAB)
    prompt, count = np.array([3, 1, 4], np.int32), 4000
    for temperature in (1.0, 2.0):
        prompts = [EnginePrompt(prompt, seed) for seed in range(count)]
        completions = completions_of(engine, prompts, base.GenerationParams(1, temperature, ()))
        counts = np.bincount([one.token_ids_T[0] for one in completions], minlength=VOCAB)
        (logp_V,) = plain_logprobs(qwen, Item(np.append(prompt, 0), len(prompt)), temperature)
        p_V = np.exp(logp_V)
        assert (np.abs(counts / count - p_V) < 5 * np.sqrt(p_V / count) + 1e-3).all()
        close(completions[0].logprob_T, logp_V[completions[0].token_ids_T])


def test_a_draw_at_the_edges_takes_no_id_of_probability_zero() -> None:
    """Numbers 0, between, just below 1 and 1, on cumulative sums that end below, at and above 1."""
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    for total in (0.999, 1.0, 1.001):
        sum_V = torch.tensor([0.0, 0.25, 0.25, 0.75, 1.0, 1.0]) * total
        for number, expected in ((0.0, 1), (0.2, 1), (0.25, 3), (0.5, 3), (0.75, 4), (below, 4), (1.0, 4)):
            assert inverse(sum_V[None], torch.tensor([[number]])).item() == expected, (total, number)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(1, 200), st.integers(0, 100))
def test_every_sequence_lies_in_one_rectangle_within_budget_and_padding(
    sizes: list[int], budget: int, overhead: int
) -> None:
    groups = rectangles(sizes, budget, overhead)
    assert sorted(row for rows in groups for row in rows) == list(range(len(sizes)))
    for rows in groups:
        width = max(sizes[row] for row in rows)
        assert width == sizes[rows[0]]
        assert len(rows) == 1 or width * len(rows) <= budget
        assert sum(width - sizes[row] for row in rows) <= overhead


# --- the head that is read from a checkpoint without its layers ---------------------------------------------


CPU = torch.device("cpu")
LAYERS = {
    "untied": ("Qwen3", {"tie_word_embeddings": False}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "mixture": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


@pytest.mark.parametrize("kind", HEADS | LAYERS)
def test_a_head_without_its_model_is_the_head_of_the_model(kind: str, tmp_path: Path) -> None:
    model = small(*(HEADS | LAYERS)[kind])
    model.save_pretrained(tmp_path)
    head, dtype, rows = load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU)
    assert (dtype, rows) == (torch.float32, PADDED)
    for name, expected in vars(find_head(model, VOCAB)).items():
        got = getattr(head, name)
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected, name
    assert len(head.weight_VH) == VOCAB


def test_precision_is_the_checkpoints_unless_another_is_named_and_a_folder_without_one_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="must be readable here, also when a server computes"):
        load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU)
    small("Qwen3", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    for named, dtype in (({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32)):
        assert load_head(TeacherConfig(path=str(tmp_path), **named), VOCAB, CPU)[1] == dtype


def test_logits_of_bf16_states_are_rounded_as_a_models_own_unless_the_head_is_exact() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    head, summed = OutputHead(weight, None, HeadShape(500)).placed(CPU), hidden.double() @ weight.double().T
    assert torch.equal(head.logits(hidden), torch.nn.functional.linear(hidden, weight).float())
    for exact in (head.exact(), replace(head, weight_VH=weight.float())):
        logits = exact.logits(hidden)
        assert logits.dtype == torch.float32
        assert float((logits - summed).abs().max()) < 1e-4  # bf16 rounds these to 0.1


@pytest.mark.parametrize(("width", "k"), [(37, 37), (37, 1), (519, 64), (520, 64), (4096, 64), (4103, 64)])
def test_the_largest_of_each_row_are_those_of_topk_in_different_places(width: int, k: int) -> None:
    """Also of equal values, where topk's places are others."""
    different, equal = torch.stack([torch.randperm(width) for _ in range(9)]), torch.randint(3, (9, width))
    assert torch.equal(largest(different.float(), k)[1], different.topk(k, dim=1).indices)
    for values in (different.float(), equal.float()):
        top, places = largest(values, k)
        assert torch.equal(top, values.topk(k, dim=1).values)
        assert torch.equal(values.gather(1, places), top)
        assert all(len(set(row)) == k for row in places.tolist())


@pytest.mark.parametrize("width", [1, CPU_COLUMNS, CPU_COLUMNS + 1, 3 * CPU_COLUMNS])
def test_the_sum_by_parts_is_that_of_whole_rows(width: int) -> None:
    values = 20 * torch.randn(5, width)
    assert torch.allclose(log_sum_exp(values).double(), values.double().logsumexp(1), atol=1e-5)


def test_a_head_that_was_loaded_does_not_change_with_its_file(tmp_path: Path) -> None:
    small("Qwen3", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    head, *_ = load_head(TeacherConfig(path=str(tmp_path)), VOCAB, CPU)
    before = head.weight_VH.clone()
    overwrite_weights(tmp_path)
    assert torch.equal(head.weight_VH, before)
