"""The benchmark of routing replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from routed_models import live_routes

from distill.bench import routing
from distill.run_log.records import Rollout
from student_trainer.routing import replayed, routers
from sync.wire import Version, VersionSpan, pack


@pytest.mark.parametrize("experts", routing.EXPERTS)
def test_the_students_layers_all_have_experts(experts: int) -> None:
    found = routers(routing.mixture(routing.MIXTURE, experts))
    assert [(one.experts, one.chosen) for one in found] == [(experts, routing.EXPERTS[experts])] * 4


def test_figures_are_of_the_first_step_of_all_steps_and_of_the_end(tmp_path: Path) -> None:
    steps = [(1e-3, 1.5, 0.9), (None, 4.0, 0.7), (None, 2.0, 0.8)]
    lines = [
        {"time": 10.0 + i, "train/loss": 0.0, "train/rho_max": rho, "train/effective_sample_size": size}
        | ({} if kl is None else {"train/mismatch_kl": kl})
        for i, (kl, rho, size) in enumerate(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"after": {"reverse_kl": 0.25, "pass_rate": 0.5}}))
    found = routing.figures(tmp_path)
    assert found.pop("effective_sample_size") == pytest.approx(0.8)
    assert found == {
        "mismatch_kl": 1e-3,
        "rho_max": 1.5,
        "dearest": 4.0,
        "reverse_kl": 0.25,
        "pass_rate": 0.5,
        "step_ms": 1000.0,
    }


def test_ways_are_compared_on_the_tokens_that_the_first_weights_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """μ is the model through what was recorded: its own routes, but others in a layer of two tokens."""
    torch.manual_seed(0)
    model = routing.mixture(replace(routing.MIXTURE, width=32, layers=2, heads=1), 128)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    tokens = torch.arange(3, 15)
    routes_SMK = live_routes(model, tokens[None, :-1])
    routes_SMK[[6, 8], 1] = (routes_SMK[[6, 8], 1] + 9) % 128
    with torch.no_grad(), replayed(routers(model), routes_SMK):
        logp_V = model(tokens[None, :-1]).logits[0, 4:].float().log_softmax(-1)
    rollout = Rollout(
        "a",
        0,
        prompt=pack(tokens[:5].numpy().astype("i4")),
        tokens=pack(tokens[5:].numpy().astype("i4")),
        logprob=pack(logp_V.gather(1, tokens[5:, None])[:, 0].numpy()),
        spans=[VersionSpan(Version(0, 0), 0, 7)],
        routes=pack(routes_SMK.numpy().astype("u1")),
    )
    spans = [VersionSpan(Version(0, 0), 0, 6), VersionSpan(Version(0, 1), 6, 7)]
    records = [rollout, msgspec.structs.replace(rollout, spans=spans), rollout.released()]
    monkeypatch.setattr(routing, "read_all", lambda _: [(None, one) for one in records])
    assert routing.first_rollouts(tmp_path) == [rollout]
    found = routing.same_tokens(tmp_path, tmp_path)
    exact = {"same_kl": 0, "same_rho_max": 1, "flips": 0, "flipped": 0}
    assert found[routing.REPLAYED] == pytest.approx(exact, abs=1e-6)
    live = found[routing.LIVE]
    assert (live["flips"], live["flipped"]) == pytest.approx((2 / 14, 2 / 7))
    assert live["same_kl"] > 1e-3


def test_a_ratio_above_one_means_that_replay_is_better() -> None:
    live = dict.fromkeys(routing.ROWS, 2.0)
    medians = {routing.LIVE: live, routing.REPLAYED: dict.fromkeys(routing.ROWS, 1.0)}
    same = {16: {way: dict.fromkeys(routing.SAME, 1.0) for way in routing.WAYS}}
    printed = routing.table({"medians": medians, "same": same}).splitlines()
    lines = dict(line.strip("| ").split(" | ", 1) for line in printed if " | " in line)
    assert lines["KL(μ‖p) at version 0, nats per token"] == "2.00e+00 | 1.00e+00 | 2.00"
    assert lines["pass rate at the end"] == "200.0% | 100.0% | 0.50"
