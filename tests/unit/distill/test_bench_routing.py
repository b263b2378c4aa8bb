"""The benchmark of routing replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from routed_models import live_routes

from distill.bench import routing
from distill.bench.pipeline import CpuProfile
from student_trainer.routing import replayed, routers
from sync.wire import Generated, Version, VersionSpan, pack


@pytest.mark.parametrize("name", routing.STARTS)
def test_the_students_layers_all_have_experts_drawn_as_named(name: str) -> None:
    torch.manual_seed(0)
    start, model = routing.STARTS[name], routing.mixture(routing.STARTS[name])
    assert [(one.experts, one.chosen) for one in routers(model)] == [(start.experts, start.chosen)] * 4
    assert model.model.layers[3].mlp.experts.down_proj.detach().std() == pytest.approx(start.std, rel=0.05)


def test_figures_are_of_the_first_step_of_all_steps_and_of_the_end(tmp_path: Path) -> None:
    steps = [(1e-3, 1.5, 0.9), (None, 4.0, 0.7), (None, 2.0, 0.8)]
    lines = [
        {"time": 10.0 + i, "train/loss": 0.0, "train/rho_max": rho, "train/effective_sample_size": size}
        | ({} if kl is None else {"train/mismatch_kl": kl})
        for i, (kl, rho, size) in enumerate(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"after": {"reverse_kl": 0.25, "pass_rate": 0.5}}))
    found = routing.figures(tmp_path, CpuProfile())
    assert found.pop("effective_sample_size") == pytest.approx(0.8)
    assert found == {
        "mismatch_kl": 1e-3,
        "rho_max": 1.5,
        "dearest": 4.0,
        "reverse_kl": 0.25,
        "pass_rate": 0.5,
        "step_ms": 1000.0,
    }


def test_ways_are_compared_on_the_same_tokens() -> None:
    """μ is the model through what was recorded: its own routes, but others in a layer of two tokens."""
    torch.manual_seed(0)
    recipe = replace(routing.UNTAUGHT, width=32, layers=2, heads=1)
    model = routing.mixture(routing.Start(recipe, 128, 8, 0.3)).to(torch.bfloat16).eval()
    tokens = torch.arange(3, 15)
    routes_SMK = live_routes(model, tokens[None, :-1])
    routes_SMK[[6, 8], 1] = (routes_SMK[[6, 8], 1] + 9) % 128
    with torch.no_grad(), replayed(routers(model), routes_SMK):
        hidden_TH = model.model(tokens[None, :-1]).last_hidden_state[0, 4:]
    logp_TV = (hidden_TH.float() @ model.lm_head.weight.detach().float().t()).log_softmax(-1)
    answer = Generated(
        "0",
        token_ids=pack(tokens[5:].numpy().astype("i4")),
        logprob=pack(logp_TV.gather(1, tokens[5:, None])[:, 0].numpy()),
        spans=[VersionSpan(Version(0, 0), 0, 7)],
        finish_reason="length",
        routes=pack(routes_SMK.numpy().astype("u1")),
    )
    found = routing.compared(model, [(tokens[:5].tolist(), answer)])
    assert (found["kl"], found["rho_max"]) == pytest.approx((0, 1), abs=1e-6)
    assert (found["flips"], found["flipped"]) == pytest.approx((2 / 14, 2 / 7))
    assert found["live_kl"] > 1e-3
    assert 0.1 < found["added"] < 2


def test_the_table_has_every_student_and_every_seed() -> None:
    same = [dict.fromkeys(routing.SAME, 0.25) | {"live_kl": live, "kl": 1e-4} for live in (5e-4, 2e-3)]
    learned = {
        way: [dict.fromkeys(routing.ROWS, share) for share in of]
        for way, of in {routing.LIVE: (0.5, 0.25), routing.REPLAYED: (1.0, 0.75)}.items()
    }
    printed = routing.table({"same": {"16": same, "128": same}, "learned": learned}).splitlines()
    lines = dict(line.strip("| ").split(" | ", 1) for line in printed if " | " in line)
    assert lines["falls by"] == "5.0, 20.0 | 5.0, 20.0"
    assert lines["pass rate at the end"] == "50.0% → 100.0% | 25.0% → 75.0%"
