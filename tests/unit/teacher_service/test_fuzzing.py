"""Malformed requests against the app over a table: refused with a reason, and nothing breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fuzz import Request, fuzz
from msgspec.structs import replace
from ports import client
from served_teacher import serving
from table_engine import TableEngine, random_table

from sync import wire
from sync.wire import Array, ScoreRequest, TeacherGenerateRequest, TeacherPrompt, encode, pack
from teacher_service import messages

V = 11
IDS = pack(np.array([1, 2, 3], np.int32))
GOOD = TeacherGenerateRequest(prompts=[TeacherPrompt("a", IDS, 1), TeacherPrompt("b", IDS, 2)], max_tokens=5)
SCORED = ScoreRequest(sequences=[wire.ScoreSequence("a", IDS, 1)], want=wire.Want(topk=2))


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(TableEngine(random_table(V), max_length=64)) as url:
        yield url


async def generated(url: str, **change: Any) -> httpx.Response:
    async with client(base_url=url) as http:
        return await http.post("/v1/generate", content=encode(replace(GOOD, **change)))


@pytest.mark.parametrize("good", [SCORED, GOOD], ids=["score", "generate"])
async def test_malformed_requests_of_each_route_are_refused_with_a_reason(url: str, good: Request) -> None:
    statuses, unexplained = await fuzz(url, 800, good)
    assert unexplained == []
    assert statuses[400] > 150
    assert statuses[422] > 20


async def test_a_route_that_breaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "read_generate", lambda *_, **__: 1 / 0)
    async with serving(TableEngine(random_table(V), max_length=64)) as url:
        with pytest.raises(AssertionError):
            await fuzz(url, 20, GOOD)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"prompts": []}, 422, "no prompts: send at least one"),
        ({"max_tokens": 0}, 422, "max_tokens is 0, this teacher takes 1 to 63"),
        ({"max_tokens": -(2**63)}, 422, "max_tokens is -9223372036854775808"),
        ({"max_tokens": 64}, 422, "max_tokens is 64"),
        ({"temperature": float("nan")}, 422, "temperature is nan, it must be >= 0.001"),
        ({"temperature": float("inf")}, 422, "temperature is inf"),
        ({"temperature": -1.0}, 422, r"temperature is -1.0"),
        ({"stop_token_ids": [V]}, 422, "stop id 11 is outside the vocabulary of"),
        ({"deadline": float("nan")}, 422, "deadline is nan"),
        ({"prompts": GOOD.prompts * 100, "max_tokens": 9}, 413, "2400 tokens pass queue_tokens"),
    ],
)
async def test_a_request_to_generate_that_cannot_be_served_is_refused_as_a_whole(
    url: str, change: dict[str, object], status: int, reason: str
) -> None:
    answer = await generated(url, **change)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (TeacherPrompt("x", pack(np.array([1, V], np.int32)), 0), "token_ids is 11 in one place or more"),
        (TeacherPrompt("x", pack(np.array([-1], np.int32)), 0), "token_ids is -1 in one"),
        (TeacherPrompt("x", pack(np.zeros(60, np.int32)), 0), "pass this teacher's 64"),
        (TeacherPrompt("x", pack(np.zeros(0, np.int32)), 0), "is empty"),
        (TeacherPrompt("x", Array("i4", (2**62,), b"1234"), 0), "must be 18446744073709551616 bytes"),
        (TeacherPrompt("x", IDS, -1), "seed is -1"),
        (TeacherPrompt("x", IDS, 2**32), "seed is 4294967296"),
    ],
)
async def test_a_prompt_that_cannot_be_completed_is_refused_alone(
    url: str, prompt: TeacherPrompt, reason: str
) -> None:
    answer = await generated(url, prompts=[GOOD.prompts[0], prompt])
    assert answer.status_code == 200
    completed, refused = msgspec.msgpack.decode(answer.content)["results"]
    assert completed["type"] == "TeacherCompletion"
    assert reason in refused["error"]
