"""The engine of a vLLM server, against a hand-written one that answers from a table."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from table_engine import TableEngine, random_table

from sync.errors import ConfigError, DataError, Unreachable
from teacher_service.config import TeacherConfig
from teacher_service.engines.base import EngineScores, Item, ScoreOptions
from teacher_service.engines.vllm import VllmServer

V = 11
TABLE = random_table(V)
TRUTH = TableEngine(TABLE)
CONFIG = TeacherConfig(path="m", engine="vllm", engine_url="http://teacher")
ITEMS = [
    Item(np.array([1, 2, 3, 4], np.int32), 2, np.array([[0, -1], [5, 4]], np.int32)),
    Item(np.array([10, 0], np.int32), 1, np.array([[7, 7]], np.int32)),
]


class Server:
    """A vLLM server: prompt_logprobs up to `max_logprobs`, gathering when told so."""

    def __init__(self, max_logprobs: int = 8, gather: bool = True):
        self.max_logprobs, self.gather = max_logprobs, gather
        self.fail = 0
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.fail:
            self.fail -= 1
            return httpx.Response(503, text="loading")
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served", "max_model_len": 33}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if request.url.path == "/v1/completions":
            return self._completions(body)
        return self._generate(body)

    def _completions(self, body: dict[str, Any]) -> httpx.Response:
        k = body.get("prompt_logprobs", -1)
        if k > self.max_logprobs:
            return httpx.Response(
                400, json={"error": {"message": f"greater than max allowed: {self.max_logprobs}"}}
            )
        choices = [self._choice(i, ids, k) for i, ids in enumerate(body["prompt"])]
        return httpx.Response(200, json={"choices": choices[::-1]})

    def _choice(self, index: int, ids: list[int], k: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if k >= 0:
            choice["prompt_logprobs"] = [None, *(_table(a, b, k) for a, b in itertools.pairwise(ids))]
        return choice

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        if not self.gather:
            return httpx.Response(
                400, json={"error": "prompt_logprob_token_ids requires the V2 model runner"}
            )
        options = body["sampling_params"]
        ids, start = body["token_ids"], options["prompt_logprob_start"]
        rows = [
            [float("-inf") if v < 0 else TABLE[ids[start + i], v] for v in row]
            for i, row in enumerate(options["prompt_logprob_token_ids"])
        ]
        assert len(rows) == len(ids) - 1 - start
        file = io.BytesIO()
        np.save(file, np.array(rows, np.float32))
        text = base64.b64encode(file.getvalue()).decode()
        return httpx.Response(200, json={"prompt_token_id_logprobs": text})


def _table(previous: int, token: int, k: int) -> dict[str, dict[str, float]]:
    order = np.argsort(-TABLE[previous])
    rank = {int(v): r + 1 for r, v in enumerate(order)}
    return {
        str(v): {"logprob": float(TABLE[previous, v]), "rank": rank[v]} for v in {token, *order[:k].tolist()}
    }


def connected(
    handler: Callable[[httpx.Request], httpx.Response],
    config: TeacherConfig = CONFIG,
    vocab_size: int = V,
) -> VllmServer:
    transport = httpx.MockTransport(handler)
    return VllmServer(config, vocab_size, transport)


def same(got: EngineScores, expected: EngineScores) -> None:
    for name in EngineScores.__slots__:
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_allclose(one, other, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "options", [ScoreOptions(), ScoreOptions(topk=3), ScoreOptions(topk=8, gather=2), ScoreOptions(gather=2)]
)
def test_a_vllm_server_gives_the_tables_scores(options: ScoreOptions) -> None:
    engine = connected(Server())
    same(engine.score(ITEMS, options), TRUTH.score(ITEMS, options))
    assert engine.head() is None
    engine.close()


def test_a_vllm_teacher_offers_only_what_the_server_accepts() -> None:
    full, old = (connected(Server(n, gather)) for n, gather in ((8, True), (0, False)))
    assert (full.engine_info.can, full.engine_info.max_topk, full.engine_info.max_length) == (
        ("topk", "gather", "prompt", "generate"),
        8,
        32,
    )
    assert (old.engine_info.can, old.engine_info.max_topk) == (("prompt", "generate"), 0)


def test_rows_of_the_model_beyond_the_tokenizer_are_refused_instead_of_sent_to_the_trainer() -> None:
    engine = connected(Server(), vocab_size=V - 1)
    item = Item(np.array([1, 2, 3], np.int32), 1)
    assert (np.argsort(-TABLE[[1, 2]])[:, :8] == V - 1).any()
    with pytest.raises(DataError, match="holds id 10, a row of the model that the tokenizer with its 10 ids"):
        engine.score([item], ScoreOptions(topk=8))
    assert engine.score([item], ScoreOptions()).topk_ids_CK is None


def test_scores_are_asked_at_temperature_one_and_as_token_ids() -> None:
    server = Server()
    connected(server).score(ITEMS, ScoreOptions())
    assert server.bodies[-1] == {
        "model": "served",
        "prompt": [[1, 2, 3, 4], [10, 0]],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }


def test_a_server_that_does_not_answer_is_unreachable_and_no_fault_of_a_sequence() -> None:
    server = Server()
    engine = connected(server)
    server.fail = 1
    with pytest.raises(Unreachable, match="answered 503"):
        engine.score(ITEMS, ScoreOptions())
    same(engine.score(ITEMS, ScoreOptions()), TRUTH.score(ITEMS, ScoreOptions()))


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    server = Server()
    server.fail = 3
    same(connected(server).score(ITEMS, ScoreOptions()), TRUTH.score(ITEMS, ScoreOptions()))


def test_a_length_beyond_the_servers_is_refused() -> None:
    config = CONFIG.model_copy(update={"max_length": 33})
    with pytest.raises(ConfigError, match="max_length = 33, but the server takes 32"):
        connected(Server(), config)


def test_answers_for_other_tokens_are_not_taken_for_scores() -> None:
    def retokenised(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return Server()(request)
        return httpx.Response(200, json={"choices": [{"index": 0, "prompt_logprobs": [None] * 9}]})

    with pytest.raises(DataError, match="re-tokenises"):
        connected(retokenised).score(ITEMS[:1], ScoreOptions())
