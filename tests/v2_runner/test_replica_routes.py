"""A replica on vLLM's second model runner, as on GPUs: routes are those that the engine records itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from routed_models import chosen
from tiny_models import model_of
from vllm_replica import CHOSEN, EXPERTS, TOKEN, Server, Versions, generate, more_tokens, save_experts, update

from sync.base.errors import RemoteError
from sync.wire import Generated, Routing, Sampling, Version, checks, unpack

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make v2-runner"),
]
PROMPTS = [[2 + i, 3, 4 + 3 * i] for i in range(4)]
ROUTING = Routing(layers=1, chosen=CHOSEN, experts=EXPERTS)
"""The first of two layers has none."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_experts(tmp_path_factory.mktemp("routes"), mlp_only_layers=[0])


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[Server]:
    work, second = folders[0].parent, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    with Server(folders[0], work, 0, routes=True, dtype="float32", env=second) as server:
        Versions(work / "store", folders)
        server.wait()
        yield server


def found(prompt: list[int], answer: Generated) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and sorted routes of the whole sequence."""
    tokens = np.array([*prompt, *unpack(answer.token_ids)])
    assert checks.routes(answer.routes, len(tokens) - 1, ROUTING) is None
    return tokens, np.sort(unpack(answer.routes), -1)


async def test_routes_and_masks_are_those_of_transformers(server: Server, folders: list[Path]) -> None:
    cut = {"max_tokens": 16, "top_k": 12, "top_p": 0.9, "mask": True, "routes": True}
    async with server.peer() as peer:
        answers = await generate(peer, PROMPTS, **cut)
    assert "Using V2 Model Runner" in server.log.read_text()
    model = model_of(folders[0])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert checks.generated(answer, Sampling(**cut), 64) is None
        tokens, routes = found(prompt, answer)
        np.testing.assert_array_equal(routes, chosen(model, tokens))
        with torch.no_grad():
            logits_TV = model(torch.from_numpy(tokens[None])).logits[0, len(prompt) - 1 : -1]
        parts = logits_TV, answer.mask.padded(), tokens[len(prompt) :], unpack(answer.logprob)
        for row_V, ids, token, logp in zip(*parts, strict=True):
            assert abs(row_V[token] - row_V[ids[ids >= 0]].logsumexp(0) - logp) < 1e-3


async def test_no_request_for_routes_reads_a_prefix_from_the_cache(
    server: Server, folders: list[Path]
) -> None:
    prompt = np.random.default_rng(0).integers(2, 64, 150).tolist()
    async with server.peer() as peer:
        answers = [(await generate(peer, [prompt], max_tokens=2, routes=True))[0] for _ in range(2)]
    model = model_of(folders[0])
    for answer in answers:
        tokens, routes = found(prompt, answer)
        np.testing.assert_array_equal(routes, chosen(model, tokens))
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=120) as client:
        metrics = (await client.get(f"{server.url}/metrics")).text
    (hits,) = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total{")]
    assert float(hits.split()[-1]) == 0


async def test_what_the_time_limit_ends_has_the_routes_of_what_was_written(
    server: Server, folders: list[Path]
) -> None:
    async with server.peer() as peer:
        for seconds in (0.5, 2.0, 8.0, 32.0):
            (answer,) = await generate(peer, PROMPTS[:1], max_tokens=480, routes=True, max_seconds=seconds)
            if answer.token_ids.shape[0]:
                break
    assert answer.finish_reason == "time"
    tokens, routes = found(PROMPTS[0], answer)
    np.testing.assert_array_equal(routes, chosen(model_of(folders[0]), tokens))


async def test_after_a_swap_earlier_tokens_keep_the_routes_that_sampled_from_them(
    server: Server, folders: list[Path]
) -> None:
    async with server.peer() as peer:
        flight = asyncio.create_task(generate(peer, PROMPTS, max_tokens=120, routes=True))
        await more_tokens(peer, flight, 40)
        with pytest.raises(RemoteError, match="would share prefixes between versions"):
            await update(peer, 2, kv_on_swap="keep")
        await update(peer, 2)
        answers = await flight
    models = [model_of(folder) for folder in folders]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [span.version for span in answer.spans] == [Version(0, 0), Version(1, 2)]
        tokens, routes = found(prompt, answer)
        old = len(prompt) + answer.spans[1].start - 1
        before, after = (chosen(model, tokens) for model in models)
        np.testing.assert_array_equal(routes[:old], before[:old])
        np.testing.assert_array_equal(routes[old:], after[old:])
        assert (before[old:] != after[old:]).any((1, 2)).mean() > 0.5, "else it proves nothing"
