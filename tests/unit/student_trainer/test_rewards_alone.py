"""Steps on rewards alone: no teacher's arrays in, no figure of a teacher out, and the reward rises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_step import ALONE, VOCAB, PlainEngine, student
from torch import Tensor

from distill.batching.packing import Shape, pack_batch
from distill.buffer import Batch
from distill.record.rollout import Rollout
from student_trainer.engine import Student
from student_trainer.objectives.config import Rewards, TaskReward
from student_trainer.step import loss_of, train_step
from sync.wire import Version, VersionSpan, pack

PROMPTS, GROUP, LENGTH, RIGHT = 4, 8, 2, 5


def sampled(model: Student, step: int) -> list[Rollout]:
    """GROUP completions of every prompt [P]; the reward is the share of their tokens that is RIGHT."""
    rollouts, generator = list[Rollout](), torch.Generator().manual_seed(step)
    for prompt in range(PROMPTS):
        tokens_GL = torch.full((GROUP, 1), prompt)
        logp_GT = list[Tensor]()
        for _ in range(LENGTH):
            with torch.no_grad():
                hidden_GH = model.model.model(input_ids=tokens_GL).last_hidden_state[:, -1]
                logp_GV = (hidden_GH @ model.head.weight.t())[:, :VOCAB].log_softmax(1)
            token_G1 = torch.multinomial(logp_GV.exp(), 1, generator=generator)
            logp_GT.append(logp_GV.gather(1, token_G1)[:, 0])
            tokens_GL = torch.cat([tokens_GL, token_G1], 1)
        for member in range(GROUP):
            said = tokens_GL[member, 1:].numpy()
            rollouts.append(
                Rollout(
                    f"0:{step * PROMPTS + prompt}:{member}",
                    0,
                    prompt=pack(np.array([prompt], "i4")),
                    tokens=pack(said.astype("i4")),
                    logprob=pack(np.array([float(logp[member]) for logp in logp_GT], "f4")),
                    spans=(VersionSpan(Version(0, step), 0, LENGTH),),
                    reward=float((said == RIGHT).mean()),
                )
            )
    return rollouts


@pytest.mark.parametrize(
    "task",
    [
        TaskReward(),
        TaskReward(baseline="group", scale="std", average="rollouts", clip=(0.2, 0.28)),
        TaskReward(baseline="group", clip=(0.2, 0.2), rho_cap=3.0),
    ],
    ids=["reinforce", "grpo", "dr_grpo"],
)
def test_a_student_learns_from_rewards_alone(task: TaskReward) -> None:
    """Of 21 ids one is right; every second step is made on completions of the weights before."""
    engine, loss = PlainEngine(student(3), 0.5), loss_of(Rewards(task=task), [])
    shape = Shape(200, [], None, GROUP if task.baseline == "group" else 1)
    rewards, stale = [], list[Rollout]()
    for step in range(40):
        rollouts = stale if step % 2 else sampled(engine.module, step)
        stale = rollouts
        batch = Batch(Version(0, step), rollouts, [step % 2] * len(rollouts), [])
        (share,) = pack_batch(batch, 1, shape, lambda version: version.step)
        assert [rows.teacher_logprob for rows in share.micro_batches] == [None] * len(share.micro_batches)
        metrics = train_step(engine, share, loss, ALONE)
        rewards.append(metrics["reward_mean"])
        assert not [name for name in metrics if name.startswith(("reverse_kl", "teacher_", "score_gap"))]
        if step % 2 == 0:
            assert metrics["rho_mean"] == pytest.approx(1.0, abs=1e-4)
    assert np.mean(rewards[:4]) < 0.3
    assert np.mean(rewards[-4:]) > 0.8
