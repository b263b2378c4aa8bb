"""Rows that lie over several ranks give the loss and the gradients of whole rows, or are refused by name.

Four real ranks over gloo take the steps (tests/support/split_ranks.py). DeepSpeed's launcher and ZeRO-3 are
in tests/integration/test_sequence_parallel.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_families import FAMILIES
from launched_trainer import rows

from student_trainer.routing import LIVE
from student_trainer.sequence_split import SequenceGroup, SplitRows, split
from student_trainer.step import collate, divided
from student_trainer.varlen import PackedRows

ROOT = Path(__file__).parents[3]
WORLD = 4


def case(family: str, size: int = 2, packing: str = "varlen", attention: str = "sdpa", **more: Any) -> Any:
    return {"family": family, "size": size, "packing": packing, "attention": attention, **more}


SAME = {
    **{f"{family}, packed": case(family) for family in FAMILIES},
    "Qwen3, padded": case("Qwen3", packing="padded"),
    "Gemma3, padded": case("Gemma3", packing="padded", checkpointing=True),
    "GptOss, four ranks, padded, eager": case("GptOss", 4, "padded", "eager"),
    "DeepseekV3, four ranks": case("DeepseekV3", 4, checkpointing=True),
    "Qwen3, four ranks share two heads of keys": case("Qwen3", 4, attention="eager", kept=40),
    "Llama, four ranks share one head of keys": case("Llama", 4, more={"num_key_value_heads": 1}),
    "Qwen3, adapters": case("Qwen3", lora=True, checkpointing=True),
}
"""Every step beside that of one process with whole rows, with a discount."""
UNTOLD = "2 of 2 layers were not told how rows lie: set trainer.sequence_parallel = 1"
REFUSED = {
    "StableLm": (case("StableLm"), UNTOLD),
    "misplaced, packed": (case("Qwen3", misplaced=True), "rows together and rows alone differ by 0.0"),
    "misplaced, padded": (case("Gemma3", 4, "padded", misplaced=True), "rows together and rows alone differ"),
    "two heads": (case("Llama", 4, more={"num_attention_heads": 2}), "LlamaAttention has 2 heads, of keys"),
}


Found = list[dict[str, dict[str, Any]]]
"""Of every rank, what it found for each case."""


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Found:
    meeting, names = tmp_path_factory.mktemp("ranks") / "meet", [*SAME, *REFUSED]
    cases = json.dumps([*SAME.values(), *(one for one, _ in REFUSED.values())])
    script = str(ROOT / "tests/support/split_ranks.py")
    argv = [sys.executable, "-W", "ignore", script, str(WORLD), str(meeting)]
    subprocess.run(argv, input=cases, text=True, check=True, timeout=1200)
    found = [json.loads(Path(f"{meeting}.{rank}").read_text()) for rank in range(WORLD)]
    return [dict(zip(names, one, strict=True)) for one in found]


@pytest.mark.engine
@pytest.mark.parametrize("name", SAME)
def test_a_step_is_that_of_one_process_with_whole_rows(stepped: Found, name: str) -> None:
    for found in (one[name] for one in stepped):
        assert found["gradient"] < 1e-5, found["parameter"]
        assert found["check"] < 1e-5
        del found["metrics"]["tokens_per_slot"], found["expected"]["tokens_per_slot"]  # rows lie otherwise
        assert found["metrics"] == pytest.approx(found["expected"], rel=1e-5, abs=1e-6)


@pytest.mark.engine
def test_a_rank_keeps_its_share_of_the_activations(stepped: Found) -> None:
    """In bytes that the backward pass of one micro-batch needs."""
    for found in stepped:
        whole, part = found["Qwen3, four ranks share two heads of keys"]["kept"]
        assert part < 0.3 * whole


@pytest.mark.engine
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_see_whole_rows_is_refused_by_every_rank(stepped: Found, name: str) -> None:
    assert all(REFUSED[name][1] in found[name]["refused"] for found in stepped)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("varlen", [True, False], ids=["packed", "padded"])
def test_every_token_and_route_is_on_one_rank_and_rows_are_counted_once(size: int, varlen: bool) -> None:
    whole = collate(rows(3, range(4), False), 3, 30, varlen)
    places = whole.tokens_RL.numel()
    whole = replace(whole, routes_SMK=torch.arange(places, dtype=torch.int16)[:, None, None].expand(-1, 2, 2))
    parts = [divided(whole, SequenceGroup(rank, size)) for rank in range(size)]
    tokens_RL = torch.cat([part.tokens_RL for part in parts], 1)
    assert torch.equal(tokens_RL[:, : whole.tokens_RL.shape[1]], whole.tokens_RL)
    beyond = tokens_RL.shape[1] - whole.tokens_RL.shape[1]
    assert beyond < size
    token_C = torch.empty_like(whole.targets.token_N)
    before_C = torch.empty_like(token_C)
    for part in parts:
        assert isinstance(part.layout, SplitRows)
        index_C = part.layout.index_C
        token_C[index_C] = part.targets.token_N
        before_C[index_C] = part.tokens_RL.flatten()[part.positions_C]
        routes_S = part.routes_SMK[part.positions_C, 1, 1]
        assert torch.equal(routes_S.long(), whole.positions_C[index_C])
    assert torch.equal(token_C, whole.targets.token_N)
    assert torch.equal(before_C, whole.tokens_RL.flatten()[whole.positions_C])
    for name in ("rows", "tokens", "age", "filled", "truncated"):
        assert sum(part.counts[name] for part in parts) == whole.counts[name]
    assert sum(part.counts["slots"] for part in parts) == tokens_RL.numel()
    last = parts[-1]
    if beyond:
        assert (last.routes_SMK.unflatten(0, last.tokens_RL.shape)[:, -beyond:] == LIVE).all()


def test_places_are_those_in_the_whole_row_and_padding_is_a_row_of_its_own() -> None:
    packed = PackedRows((4, 3))
    tokens_RL, positions_C = torch.arange(7)[None], torch.tensor([1, 3, 5])
    of_rank = [split(SequenceGroup(rank, 4), tokens_RL, positions_C, packed) for rank in range(4)]
    assert [part.position_RL.tolist() for _, _, part in of_rank] == [[[0, 1]], [[2, 3]], [[0, 1]], [[2, 0]]]
    assert [positions.tolist() for _, positions, _ in of_rank] == [[1], [1], [1], []]
    assert of_rank[0][2].arguments(torch.device("cpu"))["cu_seq_lens_q"].tolist() == [0, 4, 7, 8]
    rows_RL = torch.arange(10).reshape(2, 5)
    _, positions, part = split(SequenceGroup(1, 2), rows_RL, torch.tensor([3, 9]), None)
    assert part.position_RL.tolist() == [[3, 4, 5]] * 2
    assert positions.tolist() == [0, 4]
