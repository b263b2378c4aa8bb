"""A real vLLM engine records the experts of every token; transformers' routers choose the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import route_recorder
import torch
from route_recorder import ASKED, COMPLETION, PROMPT, SEQUENCES
from routed_models import chosen
from tiny_models import model_of
from vllm_replica import CHOSEN, EXPERTS, save_experts

from sync.base.errors import ConfigError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_experts(tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def found(folders: list[Path]) -> Arrays:
    return route_recorder.written(route_recorder.__file__, *folders, folders[0].parent / "found.npz")


def sequences(found: Arrays, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, routes) of all sequences of this name."""
    names = [key.removesuffix("/tokens") for key in found if key.startswith(name) and key.endswith("/tokens")]
    return [(found[f"{one}/tokens"], found[f"{one}/routes"]) for one in names]


def test_recorded_routes_are_those_of_transformers_at_every_position(
    found: Arrays, folders: list[Path]
) -> None:
    assert found["happened prompts_in_part"] > 0
    assert found["happened preempted"] > 1, "the swap is one"
    model, first = model_of(folders[0]), sequences(found, "first")
    assert len(first) == SEQUENCES
    assert [int(found[f"shape {name}"]) for name in ("layers", "chosen", "experts")] == [2, CHOSEN, EXPERTS]
    for tokens, routes in first:
        assert routes.shape == (PROMPT + COMPLETION - 1, 2, CHOSEN)
        assert routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(routes, -1), chosen(model, tokens))


def test_after_a_swap_of_weights_earlier_tokens_keep_the_routes_that_sampled_from_them(
    found: Arrays, folders: list[Path]
) -> None:
    ((tokens, routes),) = sequences(found, "swapped")
    old, (before, after) = int(found["old rows"]), (chosen(model_of(folder), tokens) for folder in folders)
    assert PROMPT < old < len(routes) - 10
    recorded = np.sort(routes, -1)
    np.testing.assert_array_equal(recorded[:old], before[:old])
    np.testing.assert_array_equal(recorded[old:], after[old:])
    assert (before != after).any((1, 2)).mean() > 0.9, "else it proves nothing"


def test_a_second_turn_brings_the_routes_that_the_first_did_not_and_those_stay(
    found: Arrays, folders: list[Path]
) -> None:
    """The swap was between the turns: the whole context was computed again, by other routers."""
    first, ((tokens, routes),) = found["first-0/routes"], sequences(found, "turn")
    assert len(first) == PROMPT + COMPLETION - 1
    assert len(routes) == len(tokens) - 1 - len(first) == 1 + ASKED + COMPLETION - 1
    before, after = (chosen(model_of(folder), tokens) for folder in folders)
    joined = np.sort(np.concatenate([first, routes]), -1)
    np.testing.assert_array_equal(joined[: len(first)], before[: len(first)])
    np.testing.assert_array_equal(joined[len(first) :], after[len(first) :])


def test_of_a_request_that_wants_no_routes_none_are_held(found: Arrays) -> None:
    assert found["held beside an evaluation"] == 1, "the turn of an episode"


def test_routes_of_requests_that_were_left_are_dropped(found: Arrays) -> None:
    assert found["held before and after"].tolist() == [1, 1], "the request that runs"


# --- what is refused --------------------------------------------------------------------------------------


def engine(**changed: Any) -> tuple[Any, Any]:
    """A model runner without experts, and how it was started."""
    from vllm.config import CompilationMode

    runner = SimpleNamespace(model=torch.nn.Linear(1, 1), _model_forward=None, query_start_loc=None)
    parts: dict[str, dict[str, Any]] = {
        "cache_config": {"enable_prefix_caching": False},
        "compilation_config": {"mode": CompilationMode.NONE},
        "parallel_config": {"pipeline_parallel_size": 1, "data_parallel_size": 1},
        "model_config": {"supports_multimodal_inputs": False},
    }
    config = SimpleNamespace(speculative_config=changed.pop("speculative_config", None))
    for name, fields in parts.items():
        fields = {key: changed.pop(key, value) for key, value in fields.items()}
        setattr(config, name, SimpleNamespace(**fields))
    for name in changed:
        delattr(runner, name)
    return runner, config


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({}, "no mixture-of-experts layer"),
        ({"enable_prefix_caching": True}, "set enable-prefix-caching = false"),
        ({"mode": 3}, "set enforce-eager = true"),
        ({"speculative_config": object()}, "speculative decoding was not tried"),
        ({"pipeline_parallel_size": 2}, "set pipeline-parallel-size = 1"),
        ({"data_parallel_size": 2}, "set data-parallel-size = 1"),
        ({"supports_multimodal_inputs": True}, "a model of text alone"),
        ({"_model_forward": None}, "types is another model runner"),
    ],
)
def test_an_engine_that_cannot_record_its_routes_is_refused_by_name(changed: Any, match: str) -> None:
    from sync.vllm.engine import record_routes

    with pytest.raises(ConfigError, match=rf"cannot record the experts of its tokens: .*{match}"):
        record_routes(*engine(**changed))
