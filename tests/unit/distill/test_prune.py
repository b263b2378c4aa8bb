"""Layers are left out by what they cost, and what is left is a model folder like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from distill import prune
from distill.tasks.sort_letters import letter_tokenizer
from sync.base.errors import ConfigError


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Four layers, of which 2 adds nothing to the stream and 1 next to nothing."""
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id, layer_types=["full_attention"] * 4,
        )
    )  # fmt: skip
    with torch.no_grad():
        for place, share in ((1, 1e-3), (2, 0.0)):
            layer = model.model.layers[place]
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rows = [{"prompt": "".join(letters)} for letters in ("abc", "xyz", "hello", "world", "qrs")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "teacher"


def test_the_layers_that_cost_least_go_and_a_layer_that_adds_nothing_costs_nothing(teacher: Path) -> None:
    lines: list[str] = []
    student = teacher.parent / "student"
    assert prune.prune(str(teacher), student, 2, str(teacher.parent / "rows.jsonl"), lines.append) == [1, 2]
    assert lines[0] == "layer 2 goes: 3 layers are 0.000 nats from the teacher"
    assert lines[1].startswith("layer 1 goes: 2 layers are 0.0")
    whole, left = (AutoModelForCausalLM.from_pretrained(path) for path in (teacher, student))
    assert (left.config.num_hidden_layers, left.config.layer_types) == (2, ["full_attention"] * 2)
    for ours, theirs in ((0, 0), (1, 3)):
        assert torch.equal(
            left.model.layers[ours].mlp.up_proj.weight, whole.model.layers[theirs].mlp.up_proj.weight
        )
    ids = torch.tensor([[3, 5, 7]])
    assert torch.allclose(left(ids).logits, whole(ids).logits, atol=0.05)
    assert AutoTokenizer.from_pretrained(student).get_vocab() == letter_tokenizer().get_vocab()


def test_the_cost_is_the_divergence_of_the_two_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert prune.kl(p.log(), q.log()) == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("layers", [0, 4])
def test_a_number_of_layers_that_leaves_none_or_all_is_refused(teacher: Path, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"--layers {layers}: .* has 4, keep 1 to 3 of them"):
        prune.prune(str(teacher), teacher.parent / "s", layers, str(teacher.parent / "rows.jsonl"))


def test_a_folder_that_holds_something_is_not_written_into(teacher: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty"):
        prune.prune(str(teacher), teacher, 2, str(teacher.parent / "rows.jsonl"))
