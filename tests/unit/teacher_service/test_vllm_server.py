"""Engine "vllm" over servers, against hand-written ones that answer from a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from ports import answering
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from table_engine import TableEngine, random_table

from sync.base.errors import ConfigError, DataError, Unreachable
from sync.wire import unpack
from sync.wire.head import HeadShape, OutputHead
from teacher_service.config import TeacherConfig
from teacher_service.engines import base
from teacher_service.engines.vllm import ServedCompletions, ServedStates, VllmEngine, engine_args, on_cpu

V = 11
TABLE = random_table(V)
TRUTH = TableEngine(TABLE)
HEAD = OutputHead(torch.from_numpy(TABLE.T.copy()), None, HeadShape(TABLE.shape[1]))
CONFIG = TeacherConfig(path="org/m", engine="vllm", engine_url="http://teacher")
LONGER = CONFIG.model_copy(update={"max_length": 33})
ITEMS = [
    base.Item(np.array([1, 2, 3, 4], np.int32), 2, np.array([[0, -1], [5, 4]], np.int32)),
    base.Item(np.array([10, 0], np.int32), 1, np.array([[7, 7]], np.int32)),
]


class Server:
    """A vLLM server of the model "m": hidden states are one-hot, completions are `completion`."""

    def __init__(self, name: str = "m", length: int = 32, pools: bool = True) -> None:
        """`name`: empty for a server without a model."""
        self.card = {"id": name, "root": name, "max_model_len": length} if name else {}
        self.fail, self.pools, self.dropped = 0, pools, 0
        self.completion: dict[str, Any] = {"token_ids": [3, 5, 0], "finish_reason": "stop"}
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        if self.fail:
            self.fail -= 1
            return Response("loading", 503)
        if request.url.path == "/v1/models":
            return JSONResponse({"data": [self.card] if self.card else []})
        assert request.headers["content-type"] == "application/json"
        body = await request.json()
        self.bodies.append(body)
        if request.url.path == "/v1/completions":
            return JSONResponse({"choices": [self.completion]})
        if request.url.path != "/pooling" or not self.pools:
            return JSONResponse({"detail": "Not Found"}, 404)
        tokens = torch.tensor([token for ids in body["input"] for token in ids])
        states = torch.eye(V)[tokens[self.dropped :]].to(getattr(torch, body["embed_dtype"]))
        return Response(bytes(states.flatten().view(torch.uint8).numpy()))


SERVING = ExitStack()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    SERVING.close()


def url_of(server: Server) -> str:
    routes = [Route("/{path:path}", server.answer, methods=["GET", "POST"])]
    return SERVING.enter_context(answering(Starlette(routes=routes)))


def states(server: Server, config: TeacherConfig = CONFIG, width: int = V) -> ServedStates:
    return ServedStates(url_of(server), config, torch.float32, width)


def completions(server: Server) -> ServedCompletions:
    return ServedCompletions(url_of(server), CONFIG, range(V, V + 2))


def connected(server: Server, generator: Server | None = None) -> VllmEngine:
    other = None if generator is None else completions(generator)
    return VllmEngine(CONFIG, HEAD, torch.float32, states(server), other)


def scored(engine: VllmEngine, **options: Any) -> None:
    """Score ITEMS: what the table gives."""
    got, expected = (one.score(ITEMS, base.ScoreOptions(**options)) for one in (engine, TRUTH))
    for name in base.EngineScores.__slots__:
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_allclose(one, other, atol=2e-6, err_msg=name)


def test_hidden_states_of_a_server_give_the_tables_scores() -> None:
    """They are asked for as token ids without normalisation, and as their bits, not as JSON's decimals."""
    server = Server()
    engine = connected(server)
    scored(engine, topk=V, gather=2, entropy=True, hidden=True, temperature=0.7)
    asked = {"model": "m", "input": [[1, 2, 3, 4], [10, 0]], "use_activation": False}
    raw = {"encoding_format": "bytes_only", "embed_dtype": "float32", "endianness": "little"}
    assert server.bodies[-1].items() >= (asked | raw).items()
    np.testing.assert_array_equal(unpack(engine.head().weight), TABLE.T)
    engine.close()


def test_bfloat16_states_arrive_as_their_bits() -> None:
    served = ServedStates(url_of(Server()), CONFIG, torch.bfloat16, V)
    assert torch.equal(served.read(ITEMS), torch.eye(V, dtype=torch.bfloat16)[[2, 3, 10]])


def test_what_a_teacher_gives_follows_from_the_servers_it_has() -> None:
    info = connected(Server()).engine_info
    assert info.can == ("topk", "gather", "entropy", "hidden", "temperature")
    assert (info.vocab_size, info.hidden_size, info.max_length, info.dtype) == (V, V, 32, "float32")
    assert "generate" in connected(Server(), Server()).engine_info.can


def test_a_server_is_waited_for_at_the_start_later_unreachable_and_held_to_a_state_for_each_token() -> None:
    server = Server()
    server.fail = 3
    engine = connected(server)
    scored(engine)
    server.fail = 1
    with pytest.raises(Unreachable, match="answered 503"):
        engine.score(ITEMS, base.ScoreOptions())
    scored(engine)
    server.dropped = 1
    with pytest.raises(DataError, match="leaves tokens out"):
        engine.score(ITEMS, base.ScoreOptions())


@pytest.mark.parametrize(
    ("serves", "asked", "why"),
    [
        ({"name": "other"}, {}, r"serves 'other', not 'org/m'.*--served-model-name org/m"),
        ({}, {"config": LONGER}, r"max_length = 33, but the server at http://127.0.0.1:.* takes 32"),
        ({"pools": False}, {}, r"gives no hidden states .*404.*--runner pooling --convert embed"),
        ({}, {"width": 7}, "2 tokens of 28 bytes were expected, 88 bytes came back"),
        ({"name": ""}, {}, "lists no model of vLLM"),
    ],
    ids=["another model", "shorter sequences", "completions alone", "other states", "no model"],
)
def test_a_server_that_cannot_serve_this_teacher_is_refused_with_the_remedy(
    serves: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        states(Server(**serves), **asked)


PROMPTS = [base.EnginePrompt(np.array([1, 2], np.int32), 7), base.EnginePrompt(np.array([4], np.int32), 8)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_completions_of_a_generating_server_have_the_log_probabilities_of_scoring(temperature: float) -> None:
    generator = Server()
    engine = connected(Server(), generator)
    *_, texts = engine.generate(PROMPTS, base.GenerationParams(3, temperature, (0,)))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = np.concatenate([prompt.token_ids_P, [3, 5, 0]]).astype(np.int32)
        item = base.Item(whole, len(prompt.token_ids_P))
        expected = TRUTH.score([item], base.ScoreOptions(temperature=temperature)).logprob_C
        np.testing.assert_allclose(text.logprob_T, expected, atol=1e-6)
        np.testing.assert_array_equal(text.token_ids_T, [3, 5, 0])
        assert text.ended
    asked = {body["seed"]: body for body in generator.bodies}
    request = {"model": "m", "prompt": [1, 2], "seed": 7, "max_tokens": 3, "temperature": temperature}
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    more = {"stop_token_ids": [0], "logit_bias": {"11": -100, "12": -100}, "return_token_ids": True}
    assert asked[7] == request | neutral | more
    assert asked.keys() == {7, 8}
    engine.close()


def test_a_completion_has_a_time_limit_that_grows_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seconds = completions(Server()), list[float]()
    once = asked._peer.once

    def timed(path: str, body: bytes | None, timeout: float) -> memoryview:
        seconds.append(timeout)
        return once(path, body, timeout)

    monkeypatch.setattr(asked._peer, "once", timed)
    asked.complete(PROMPTS[0], base.GenerationParams(16384, 1.0, ()))
    assert seconds == [600 + 16384]


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ({"token_ids": [3, V], "finish_reason": "length"}, f"id {V} was generated, a row of the model that"),
        ({"text": "x", "finish_reason": "stop"}, "returns no token_ids"),
    ],
    ids=["an id without a token", "no ids"],
)
def test_a_completion_that_cannot_be_scored_is_refused(completion: dict[str, Any], why: str) -> None:
    generator = Server()
    generator.completion = completion
    with pytest.raises(DataError, match=why):
        list(connected(Server(), generator).generate(PROMPTS, base.GenerationParams(3, 1.0, ())))


def test_a_generating_server_with_less_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="generate_url takes 16 tokens, and 32 are scored"):
        connected(Server(), Server(length=16))


def test_engine_args_reach_vllm_as_they_are_beside_those_of_the_teacher() -> None:
    given = {"tensor-parallel-size": 2, "hf_overrides": {"rope_theta": 1.0}, "gpu_memory_utilization": 0.5}
    config = TeacherConfig(path="m", engine="vllm", max_length=64, engine_args=given)
    assert engine_args(config, torch.bfloat16) == {
        "model": "m",
        "revision": None,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "max_model_len": 64,
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"task": "token_embed", "use_activation": False},
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"head_dtype": "model", "rope_theta": 1.0},
    }


@pytest.mark.parametrize("name", ["enable-prefix-caching", "runner", "dtype"])
def test_engine_args_that_a_teacher_sets_itself_are_refused_by_name(name: str) -> None:
    config = TeacherConfig(path="m", engine="vllm", engine_args={name: True})
    with pytest.raises(ConfigError, match=f"engine_args sets {name.replace('-', '_')}, which follow"):
        engine_args(config, torch.float32)


def test_on_a_cpu_an_engine_is_one_process_unless_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    workers = {"tensor_parallel_size": 2, "enforce_eager": False}
    assert on_cpu(workers) == workers
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    one = {"enforce_eager": True, "distributed_executor_backend": "uni", "dtype": "float32"}
    assert on_cpu({"dtype": "float32"}) == one
    assert on_cpu(one | {"tensor_parallel_size": 1}) == one | {"tensor_parallel_size": 1}
    assert on_cpu({"distributed_executor_backend": "mp"})["distributed_executor_backend"] == "mp"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
