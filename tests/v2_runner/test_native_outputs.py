"""What vLLM's second model runner gives by itself is what ours gives on the first one, and transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import native_outputs
import numpy as np
import pytest
import route_recorder
from native_outputs import CUTS
from route_recorder import COMPLETION, PROMPT, SEQUENCES, written
from routed_models import chosen
from tiny_models import model_of
from vllm_replica import CHOSEN, logp_TV, save_experts

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make v2-runner"),
]
Arrays = dict[str, np.ndarray]
ROUNDING = 1e-4
"""Nats between vLLM and transformers in fp32; seen: 1.2e-6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("native"))[0]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return model_of(folder)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Arrays:
    """By our record, on the first model runner."""
    return written(route_recorder.__file__, folder, folder, folder.parent / "recorded.npz")


@pytest.fixture(scope="module")
def native(folder: Path, recorded: Arrays) -> Arrays:
    files = (folder.parent / f"{name}.npz" for name in ("recorded", "native"))
    return written(native_outputs.__file__, folder, *files)


def test_native_routes_are_those_of_our_record_on_the_first_runner_and_of_transformers(
    native: Arrays, recorded: Arrays, model: Any
) -> None:
    """The second runner reads, in parts, what the first one generated."""
    for index in range(SEQUENCES):
        tokens, ours = recorded[f"first-{index}/tokens"], recorded[f"first-{index}/routes"]
        theirs = native[f"read-{index}/native_routes"]
        assert len(tokens) == len(theirs) == PROMPT + COMPLETION > 2 * 24, "the token that it adds has none"
        assert theirs.dtype == ours.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(theirs[:-1], -1), np.sort(ours, -1))
        np.testing.assert_array_equal(np.sort(ours, -1), chosen(model, tokens))


def test_native_routes_survive_preemption(native: Arrays, model: Any) -> None:
    assert native["preempted"] > 0
    for index in range(SEQUENCES):
        tokens, routes = native[f"own-{index}/tokens"], native[f"own-{index}/native_routes"]
        assert routes.shape == (PROMPT + COMPLETION - 1, 2, CHOSEN)
        np.testing.assert_array_equal(np.sort(routes, -1), chosen(model, tokens))


@pytest.mark.parametrize("cut", CUTS)
def test_the_kept_ids_with_a_finite_log_probability_are_the_native_sampling_mask(
    native: Arrays, model: Any, cut: str
) -> None:
    sizes: set[int] = set()
    for index in range(3):
        names = ("tokens", "logp", "mask_sizes", "mask_ids", "native_mask_sizes", "native_mask_ids")
        held = {name: native[f"{cut}-{index}/{name}"] for name in names}
        np.testing.assert_array_equal(held["mask_sizes"], held["native_mask_sizes"])
        masks, theirs = (
            np.split(held[f"{whose}mask_ids"], held["mask_sizes"].cumsum()[:-1]) for whose in ("", "native_")
        )
        prompt, completion = held["tokens"][:PROMPT].tolist(), held["tokens"][PROMPT:].tolist()
        rows_TV = logp_TV(model, prompt, completion, CUTS[cut].get("temperature", 1.0))
        parts = masks, theirs, rows_TV, completion, held["logp"]
        for ids, native_ids, row_V, token, logp in zip(*parts, strict=True):
            assert sorted(ids) == sorted(native_ids)
            assert token in ids
            assert abs(row_V[token] - row_V[ids.astype(np.int64)].logsumexp(0) - logp) < ROUNDING
        sizes |= {*held["mask_sizes"].tolist()}
    assert max(sizes) < native_outputs.VOCABULARY
    assert sizes == {7} if cut == "top_k" else len(sizes) > 2
