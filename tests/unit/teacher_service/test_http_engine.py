"""Engines over HTTP servers, against hand-written servers that answer from a table."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from table_engine import TableEngine, random_table

from sync.errors import ConfigError, DataError, Unreachable
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import EngineScores, Item, ScoreOptions
from teacher_service.engines.http_engine import CompletionsServer, HttpEngine, SGLangServer
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
    """A vLLM server: prompt_logprobs up to `max_logprobs`, gathering and echo when told so."""

    def __init__(self, max_logprobs: int = 8, gather: bool = True, echo: bool = False, tables: bool = True):
        self.max_logprobs, self.gather, self.echo, self.tables = max_logprobs, gather, echo, tables
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
        if k >= 0 and self.tables:
            choice["prompt_logprobs"] = [None, *(_table(a, b, k) for a, b in itertools.pairwise(ids))]
        if self.echo:
            values = [None, *(float(TABLE[a, b]) for a, b in itertools.pairwise(ids)), -0.5]
            choice["logprobs"] = {"token_logprobs": values}
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


E = TypeVar("E", bound=HttpEngine)


def connected(
    kind: type[E],
    handler: Callable[[httpx.Request], httpx.Response],
    config: TeacherConfig = CONFIG,
    vocab_size: int = V,
    retry_seconds: float = 0.3,
) -> E:
    transport = httpx.MockTransport(handler)
    return kind(config, vocab_size, retry_seconds=retry_seconds, transport=transport)


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
    engine = connected(VllmServer, Server())
    same(engine.score(ITEMS, options), TRUTH.score(ITEMS, options))
    assert engine.head() is None
    engine.close()


def test_a_vllm_teacher_offers_only_what_the_server_accepts() -> None:
    full, old = (connected(VllmServer, Server(n, gather)) for n, gather in ((8, True), (0, False)))
    assert (full.engine_info.can, full.engine_info.max_topk, full.engine_info.max_length) == (
        ("topk", "gather", "prompt"),
        8,
        32,
    )
    assert (old.engine_info.can, old.engine_info.max_topk) == (("prompt",), 0)


def test_rows_of_the_model_beyond_the_tokenizer_are_refused_instead_of_sent_to_the_trainer() -> None:
    engine = connected(VllmServer, Server(), vocab_size=V - 1)
    item = Item(np.array([1, 2, 3], np.int32), 1)
    assert (np.argsort(-TABLE[[1, 2]])[:, :8] == V - 1).any()
    with pytest.raises(DataError, match="holds id 10, a row of the model that the tokenizer with its 10 ids"):
        engine.score([item], ScoreOptions(topk=8))
    assert engine.score([item], ScoreOptions()).topk_ids_CK is None


def test_scores_are_asked_at_temperature_one_and_as_token_ids() -> None:
    server = Server()
    connected(VllmServer, server).score(ITEMS, ScoreOptions())
    assert server.bodies[-1] == {
        "model": "served",
        "prompt": [[1, 2, 3, 4], [10, 0]],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }


def test_a_completions_server_that_echoes_gives_the_sampled_tokens_scores() -> None:
    server = Server(echo=True, tables=False)
    engine = connected(CompletionsServer, server)
    same(engine.score(ITEMS, ScoreOptions()), TRUTH.score(ITEMS, ScoreOptions()))
    assert engine.engine_info.can == ("prompt",)


def test_a_server_without_prompt_logprobs_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="returns no log-probabilities of the prompt"):
        connected(CompletionsServer, Server())
    with pytest.raises(ConfigError, match="needs engine_url"):
        build(TeacherConfig(path="m", engine="openai"), V)


def test_a_server_that_comes_back_is_waited_for_and_one_that_does_not_is_gone() -> None:
    server = Server()
    engine = connected(VllmServer, server, retry_seconds=5)
    server.fail = 2
    same(engine.score(ITEMS, ScoreOptions()), TRUTH.score(ITEMS, ScoreOptions()))
    with pytest.raises(Unreachable, match="no answer"):
        connected(VllmServer, lambda request: httpx.Response(503))


def test_a_length_beyond_the_servers_is_refused() -> None:
    config = CONFIG.model_copy(update={"max_length": 33})
    with pytest.raises(ConfigError, match="max_length = 33, but the server takes 32"):
        connected(VllmServer, Server(), config)


def test_answers_for_other_tokens_are_not_taken_for_scores() -> None:
    def retokenised(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return Server()(request)
        return httpx.Response(200, json={"choices": [{"index": 0, "prompt_logprobs": [None] * 9}]})

    with pytest.raises(DataError, match="re-tokenises"):
        connected(VllmServer, retokenised).score(ITEMS[:1], ScoreOptions())


class SGLang:
    """An SGLang server: lists of [log-probability, id, text], the first entry of each null."""

    def __init__(self, cut: int = 0, shift: int = 0) -> None:
        self.cut, self.shift, self.zero = cut, shift, False
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "served", "max_model_len": 33}]})
        if request.url.path != "/generate":
            return httpx.Response(404, text="not found")
        body = json.loads(request.content)
        self.bodies.append(body)
        return httpx.Response(200, json=[self._answer(body, i) for i in range(len(body["input_ids"]))])

    def _answer(self, body: dict[str, Any], i: int) -> dict[str, Any]:
        ids, start = body["input_ids"][i], body["logprob_start_len"][i]
        pairs = list(itertools.pairwise(ids[start:]))[: len(ids) - self.cut]
        told = [(b + self.shift) % V for _, b in pairs]
        told = [b if b < V - 1 and not self.zero else 0 for b in told]  # SGLang keeps image tokens out so
        info: dict[str, Any] = {
            "input_token_logprobs": [
                [None, ids[start], None],
                *([float(TABLE[a, b]), t, None] for (a, b), t in zip(pairs, told, strict=True)),
            ]
        }
        if k := body.get("top_logprobs_num", 0):
            best = [_entries(a, np.argsort(-TABLE[a])[:k]) for a, _ in pairs]
            info["input_top_logprobs"] = [None, *best]
        if "token_ids_logprob" in body:
            wanted = body["token_ids_logprob"][i]
            info["input_token_ids_logprobs"] = [None, *(_entries(a, wanted) for a, _ in pairs)]
        return {"text": "", "meta_info": info}


def _entries(previous: int, ids: Any) -> list[list[Any]]:
    return [[float(TABLE[previous, v]), int(v), None] for v in ids]


@pytest.mark.parametrize(
    "options", [ScoreOptions(), ScoreOptions(topk=3), ScoreOptions(topk=8, gather=2), ScoreOptions(gather=2)]
)
def test_an_sglang_server_gives_the_tables_scores(options: ScoreOptions) -> None:
    server = SGLang()
    engine = connected(SGLangServer, server)
    same(engine.score(ITEMS, options), TRUTH.score(ITEMS, options))
    assert (engine.engine_info.can, engine.engine_info.max_length) == (("topk", "gather", "prompt"), 32)
    assert server.bodies[-1]["input_ids"] == [[1, 2, 3, 4], [10, 0]]
    assert server.bodies[-1]["logprob_start_len"] == [1, 0]
    assert server.bodies[-1]["sampling_params"] == {"max_new_tokens": 1, "temperature": 1.0}
    assert engine.head() is None
    engine.close()


def test_the_last_id_of_the_vocabulary_is_told_as_zero_and_scored_all_the_same() -> None:
    engine = connected(SGLangServer, SGLang())
    last = [Item(np.array([3, V - 1, 2], np.int32), 1)]
    same(engine.score(last, ScoreOptions()), TRUTH.score(last, ScoreOptions()))


def test_zero_is_believed_for_the_last_id_of_the_vocabulary_alone() -> None:
    server = SGLang()
    engine = connected(SGLangServer, server)
    server.zero = True
    with pytest.raises(DataError, match="re-tokenises"):
        engine.score([Item(np.array([3, 2, 1], np.int32), 1)], ScoreOptions())


def test_an_sglang_server_that_answers_for_other_tokens_or_too_few_is_not_believed() -> None:
    server = SGLang()
    engine = connected(SGLangServer, server)
    server.shift = 1
    with pytest.raises(DataError, match="re-tokenises"):
        engine.score(ITEMS, ScoreOptions())
    server.shift, server.cut = 0, 3
    with pytest.raises(DataError, match="has 1 entries for 2 positions"):
        engine.score(ITEMS, ScoreOptions())


def test_a_server_that_is_no_sglang_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="does not answer /generate like SGLang"):
        connected(SGLangServer, Server(gather=False))
    with pytest.raises(ConfigError, match="engine = 'sglang' needs engine_url"):
        build(TeacherConfig(path="m", engine="sglang"), V)
