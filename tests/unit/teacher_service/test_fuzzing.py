"""Malformed requests against the app over a table: refused with a reason, and nothing breaks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fuzz import Request, fuzz
from msgspec.structs import replace
from served_teacher import serving
from table_engine import TableEngine, random_table

from sync import wire
from sync.base.errors import WireError
from sync.wire import ScoreRequest, TeacherGenerateRequest, TeacherPrompt, encode, pack
from teacher_service.batching import Work
from teacher_service.messages import BadRequest, Call, read_generate

V = 11
ENGINE = TableEngine(random_table(V), max_length=64)
IDS = pack(np.array([1, 2, 3], np.int32))
GOOD = TeacherGenerateRequest(prompts=[TeacherPrompt("a", IDS, 1), TeacherPrompt("b", IDS, 2)], max_tokens=5)
SCORED = ScoreRequest(sequences=[wire.ScoreSequence("a", IDS, 1)], want=wire.Want(topk=2))


@pytest.mark.parametrize("good", [SCORED, GOOD], ids=["score", "generate"])
async def test_malformed_requests_of_each_route_are_refused_with_a_reason(good: Request) -> None:
    async with serving(ENGINE) as url:
        statuses, unexplained = await fuzz(url, 800, good)
    assert unexplained == []
    assert statuses[400] > 150
    assert statuses[422] > 20


def changed(**change: object) -> Call:
    return read_generate(encode(replace(GOOD, **change)), ENGINE.engine_info, set())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 64}, "max_tokens is 64, this teacher takes 1 to 63"),
        ({"stop_token_ids": [V]}, "stop id 11 is outside the vocabulary of"),
    ],
)
def test_a_request_to_generate_that_cannot_be_served_is_refused_as_a_whole(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(reason)) as refusal:
        changed(**change)
    assert refusal.value.status == 422


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [TeacherPrompt("x", IDS, 2**32)]}, "prompts[0].seed`, which is 4294967296"),
        ({"max_tokens": 0}, "max_tokens`, which is 0"),
        ({"temperature": float("nan")}, "temperature`, which is nan"),
        ({"temperature": 0.0}, "temperature`, which is 0.0"),
    ],
)
def test_a_number_out_of_its_range_is_no_request(change: dict[str, object], place: str) -> None:
    with pytest.raises(WireError, match=re.escape(f"at `$.{place}")):
        changed(**change)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (TeacherPrompt("x", pack(np.array([1, V], np.int32)), 0), "token_ids is 11 in one place or more"),
        (TeacherPrompt("x", pack(np.zeros(60, np.int32)), 0), "pass this teacher's 64"),
    ],
)
def test_a_prompt_that_cannot_be_completed_is_refused_alone(prompt: TeacherPrompt, reason: str) -> None:
    completed, refused = changed(prompts=[GOOD.prompts[0], prompt]).admitted
    assert isinstance(completed, Work)
    assert reason in refused
