"""Every family with experts in vLLM's engines on a CPU, against transformers (docs/large-models.md)."""

from __future__ import annotations

from pathlib import Path

import families_in_vllm
import numpy as np
import pytest
import torch
from families_in_vllm import PROMPT
from route_recorder import written
from routed_models import NOT_UPDATED, SERVED, live_routes, save_for_vllm
from tiny_models import model_of

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-4
"""Nats, in fp32; other weights are 0.1 and more away."""
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in (*SERVED, *NOT_UPDATED):
        for seed, name in enumerate(("first", "second")):
            save_for_vllm(family, folder / family / name, seed)
    return folder


@pytest.fixture(scope="module")
def found(home: Path) -> Arrays:
    return written(families_in_vllm.__file__, home, *SERVED, *NOT_UPDATED, home / "found.npz")


def logp_of(folder: Path, tokens_RL: np.ndarray) -> np.ndarray:
    """Of all tokens but the first, as transformers computes it."""
    ids_RL = torch.from_numpy(tokens_RL)
    with torch.no_grad():
        logp_RLV = model_of(folder)(ids_RL[:, :-1]).logits.log_softmax(-1)
    return logp_RLV.gather(2, ids_RL[:, 1:, None])[..., 0].numpy()


@pytest.mark.parametrize("family", SERVED)
def test_a_replica_computes_what_transformers_does_before_and_after_an_update(
    family: str, found: Arrays, home: Path
) -> None:
    for name, other in (("first", "second"), ("second", "first")):
        tokens_RL, logp_RT = found[f"{family}/{name}/tokens"], found[f"{family}/{name}/logp"]
        own, others = (logp_of(home / family / one, tokens_RL)[:, PROMPT - 1 :] for one in (name, other))
        assert np.abs(own - logp_RT).max() < TOLERANCE
        assert np.abs(others - logp_RT).max() > 0.1


@pytest.mark.parametrize("family", SERVED)
def test_a_replica_records_the_experts_that_transformers_chooses(
    family: str, found: Arrays, home: Path
) -> None:
    for name in ("first", "second"):
        tokens_RL, routes_RTMK = found[f"{family}/{name}/tokens"], found[f"{family}/{name}/routes"]
        own_SMK = live_routes(model_of(home / family / name), torch.from_numpy(tokens_RL[:, :-1]))
        recorded_SMK = routes_RTMK.reshape(-1, *routes_RTMK.shape[2:])
        np.testing.assert_array_equal(np.sort(recorded_SMK, -1), own_SMK.sort(-1).values.numpy())


@pytest.mark.parametrize("family", NOT_UPDATED)
def test_an_update_that_vllm_would_make_in_part_is_refused(family: str, found: Arrays, home: Path) -> None:
    """Without the refusal the experts, their biases and the sinks stay, and the rest is replaced."""
    tokens_RL, logp_RT = found[f"{family}/first/tokens"], found[f"{family}/first/logp"]
    own = logp_of(home / family / "first", tokens_RL)[:, PROMPT - 1 :]
    assert np.abs(own - logp_RT).max() < TOLERANCE
    assert "past a reload, so that the old values would stay" in str(found[f"{family}/refused"])
