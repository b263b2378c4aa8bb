"""A tabular task on which the objectives converge: full before hybrid before sampled, fresh or stale.

Student and teacher are tables of logits, [T positions, V previous tokens, V tokens], from seeds 0 and 1 with
scale 1.5. A batch is 32 sequences of T = 4 tokens over V = 10. The reverse KL of whole sequences is exact, by
dynamic programming over (position, previous token).
"""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from student_trainer.objectives.config import Full, ObjectiveConfig, Sampled, TopK
from student_trainer.objectives.divergences import Targets, build

T, V, BATCH, STEPS, K = 4, 10, 32, 300, 3
LEARNING_RATE = 0.03


def table(seed: int) -> Tensor:
    return 1.5 * torch.randn(T, V, V, generator=torch.Generator().manual_seed(seed))


def exact_kl(logp_TVV: Tensor, logq_TVV: Tensor) -> float:
    """Σ_t Σ_s P_t(s) KL(p(·|t, s) ‖ q(·|t, s)), the first previous token being 0."""
    kl_TV = (logp_TVV.exp() * (logp_TVV - logq_TVV)).sum(2)
    state_V, total = torch.zeros(V).index_fill(0, torch.tensor(0), 1.0), 0.0
    for t in range(T):
        total += float((state_V * kl_TV[t]).sum())
        state_V = state_V @ logp_TVV[t].exp()
    return total


def sample(logp_TVV: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(previous tokens, tokens) of a batch, [T, BATCH] each."""
    previous, rows = torch.zeros(BATCH, dtype=torch.int64), []
    for t in range(T):
        token = torch.multinomial(logp_TVV[t, previous].exp(), 1, generator=generator).squeeze(1)
        rows.append((previous, token))
        previous = token
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def train(config: ObjectiveConfig, staleness: int, seed: int) -> float:
    """Exact KL after STEPS steps on samples that are `staleness` versions old."""
    objective, generator = build(config), torch.Generator().manual_seed(seed)
    theta, logq_TVV = table(0).requires_grad_(), table(1).log_softmax(2)
    optimizer = torch.optim.Adam([theta], lr=LEARNING_RATE)
    past: deque[Tensor] = deque(maxlen=staleness + 1)
    position = torch.arange(T).repeat_interleave(BATCH)
    for _ in range(STEPS):
        past.append(theta.detach().log_softmax(2))
        previous, token = (part.flatten() for part in sample(past[0], generator))
        logp_NV = theta.log_softmax(2)[position, previous]
        logq_NV = logq_TVV[position, previous]
        support = logq_NV.topk(K, dim=1)
        targets = Targets(
            token_N=token,
            behavior_logp_N=past[0][position, previous, token],
            teacher_logp_N=logq_NV.gather(1, token[:, None])[:, 0],
            fresh_N=torch.zeros_like(token, dtype=torch.bool),
            support_NK=support.indices,
            support_logp_NK=support.values,
            teacher_logp_NV=logq_NV,
        )
        optimizer.zero_grad()
        (objective(logp_NV, targets)[0].sum() / len(token)).backward()
        optimizer.step()
    return exact_kl(theta.detach().log_softmax(2), logq_TVV)


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, int], float]:
    """Mean over two seeds of the final KL, by objective and staleness."""
    configs = {"full": Full(), "hybrid": TopK(k=K), "sampled": Sampled()}
    return {
        (name, staleness): sum(train(config, staleness, seed) for seed in range(2)) / 2
        for name, config in configs.items()
        for staleness in (0, 16)
    }


def test_denser_signals_end_nearer_to_the_teacher(ends: dict[tuple[str, int], float]) -> None:
    start = exact_kl(table(0).log_softmax(2), table(1).log_softmax(2))
    assert ends["full", 0] < ends["hybrid", 0] < ends["sampled", 0] < 0.2 * start


@pytest.mark.parametrize("name", ["full", "hybrid", "sampled"])
def test_stale_samples_end_as_near(name: str, ends: dict[tuple[str, int], float]) -> None:
    assert ends[name, 16] <= 1.2 * ends[name, 0]
