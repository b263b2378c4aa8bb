"""Every rule on a request: what passes, and what the refusal says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sync.base.errors import TooLarge
from sync.wire import Array, ScoreRequest, ScoreSequence, Want, pack
from teacher_service.engines.base import EngineInfo, Item
from teacher_service.messages import BadRequest, admit, check_reply_size, check_score, model_fingerprint

INFO = EngineInfo("m", "float32", "table", 10, 4, 8, ("topk", "gather", "entropy", "hidden"))
SAMPLED_ONLY = EngineInfo("m", "float32", "openai", 10, 0, 8, (), max_topk=0)
GOOD = ScoreSequence("a", pack(np.array([1, 2, 3, 4], np.int32)), 2)


def changed(**fields: Any) -> ScoreSequence:
    return msgspec.structs.replace(GOOD, **fields)


def ids(*values: int) -> Array:
    return pack(np.array(values, np.int32))


def test_a_good_sequence_keeps_its_ids_and_is_scored_from_its_start_on() -> None:
    item = admit(GOOD, INFO)
    assert (item.token_ids_L.tolist(), item.first, item.positions) == ([1, 2, 3, 4], 2, 2)
    check_score(ScoreRequest(sequences=[GOOD]), SAMPLED_ONLY)


@pytest.mark.parametrize(
    ("sequence", "says"),
    [
        (changed(token_ids=ids(1), start=1), "1 tokens, this teacher takes 2 to 8"),
        (changed(token_ids=ids(*range(9))), "9 tokens, this teacher takes 2 to 8"),
        (changed(token_ids=ids(), start=1), "empty"),
        (changed(start=0), "start is 0, the first completion token must be in 1 … 3"),
        (changed(start=4), "start is 4"),
        (changed(token_ids=ids(1, 2, 10)), "token_ids is 10 in one place or more, and must be ids of"),
        (changed(token_ids=ids(1, -1, 3)), "token_ids is -1 in one place or more"),
        (changed(token_ids=pack(np.array([1, 2, 3], np.int64))), "of dtype i8, and must be i4"),
        (changed(token_ids=pack(np.array([[1, 2, 3]], np.int32))), "of shape [1, 3], and must be"),
        (changed(token_ids=Array("i4", (3,), b"123")), "3 bytes, and must be 12 bytes"),
        (changed(token_ids=Array("i4", (2**62,), b"")), "must be 18446744073709551616 bytes"),
        (changed(token_ids=Array("i4", (-3,), b"")), "of shape [-3]"),
        (changed(gather_ids=ids(1, 2)), "must be of shape [any, any]"),
        (changed(gather_ids=pack(np.zeros((3, 2), np.int32))), "shape [3, 2], expected [2, K >= 1]"),
        (changed(gather_ids=pack(np.zeros((2, 0), np.int32))), "empty"),
        (changed(gather_ids=pack(np.full((2, 2), 10, np.int32))), "gather_ids is 10 in one place or more"),
        (changed(gather_ids=pack(np.full((2, 2), -2, np.int32))), "gather_ids is -2 in one place or more"),
    ],
)
def test_a_bad_sequence_is_refused_with_its_value_and_rule(sequence: ScoreSequence, says: str) -> None:
    assert says in admit(sequence, INFO)


@pytest.mark.parametrize(
    ("request_", "info", "says"),
    [
        (ScoreRequest(sequences=[GOOD], want=Want(topk=11)), INFO, "topk is 11, this teacher gives 0 to 10"),
        (ScoreRequest(sequences=[GOOD], want=Want(topk=1)), SAMPLED_ONLY, "cannot give 'topk'"),
        (ScoreRequest(sequences=[GOOD], want=Want(hidden=True)), SAMPLED_ONLY, "cannot give 'hidden'"),
        (ScoreRequest(sequences=[changed(gather_ids=ids(1))]), SAMPLED_ONLY, "cannot give 'gather'"),
        (ScoreRequest(sequences=[GOOD], want=Want(temperature=0.7)), INFO, "cannot give 'temperature'"),
    ],
)
def test_what_a_teacher_cannot_do_is_refused_as_a_whole(
    request_: ScoreRequest, info: EngineInfo, says: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        check_score(request_, info)
    assert refusal.value.status == 422
    assert says in str(refusal.value)


def test_several_answers_beyond_the_limit_are_refused_before_they_are_computed_and_one_never_is() -> None:
    item, row = Item(np.zeros(8, np.int32), 1), 8 + 8 * 3 + 4 * 4
    check_reply_size([item, item], Want(topk=3, hidden=True), INFO, 14 * row)
    with pytest.raises(TooLarge, match="the answer would take"):
        check_reply_size([item, item], Want(topk=4, hidden=True), INFO, 14 * row)
    check_reply_size([item], Want(topk=3, hidden=True), INFO, 1)


def test_the_fingerprint_changes_with_weights_revision_and_precision_alone(tmp_path: Path) -> None:
    weights = bytearray(range(256)) * 8192
    (tmp_path / "model.safetensors").write_bytes(weights)
    engine_info = EngineInfo(str(tmp_path), "float32", "transformers", 8, 8, 64, ())
    first = model_fingerprint(engine_info)
    assert model_fingerprint(engine_info) == first
    others = [replace(engine_info, dtype="bfloat16"), replace(engine_info, revision="b")]
    found = {first, *map(model_fingerprint, others)}
    for place in (0, len(weights) - 1):  # training changes far more than one byte
        changed = bytearray(weights)
        changed[place] ^= 1
        (tmp_path / "model.safetensors").write_bytes(changed)
        found.add(model_fingerprint(engine_info))
    (tmp_path / "model.safetensors").write_bytes(weights + b"0")
    found.add(model_fingerprint(engine_info))
    assert len(found) == 6
    assert len(model_fingerprint(replace(engine_info, model="org/name"))) == 64
