"""Buckets put together on rank 0 from what two processes hold: each byte once, in its place, at will."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flat_tensors import buckets_of, plan_of

from student_trainer.ranks import Ranks
from student_trainer.transports import Gathering, metas_of
from sync.base.errors import ConfigError
from sync.weights.publish import Slice

WEIGHTS = {
    "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(40.0).to(torch.bfloat16),
    "first's": torch.ones(3),
    "second's": torch.full((2, 2), 2.0, dtype=torch.bfloat16),
}
HELD = [
    {"a": (0, 13), "b": (0, 40), "first's": (0, 3), "second's": (0, 0)},
    {"a": (13, 22), "b": (40, 0), "first's": (3, 0), "second's": (0, 4)},
]
"""First element and count of each, by rank."""
BUCKET_BYTES = 64
PLAN = plan_of(WEIGHTS, BUCKET_BYTES)
KINDS = {torch.float32: ("f4", np.uint32, torch.int32), torch.bfloat16: ("bf16", np.uint16, torch.int16)}


def slices(rank: int) -> list[Slice]:
    shapes = {name: (tuple(one.shape), KINDS[one.dtype][0]) for name, one in WEIGHTS.items()}
    return [Slice(name, *shapes[name], *held) for name, held in HELD[rank].items()]


def shards(rank: int) -> dict[str, np.ndarray]:
    found = {}
    for name, (start, count) in HELD[rank].items():
        _, bits, signed = KINDS[WEIGHTS[name].dtype]
        found[name] = WEIGHTS[name].flatten()[start : start + count].view(signed).numpy().view(bits)
    return found


def joined(rank: int, meeting: str) -> Gathering:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    return Gathering(Ranks(rank, 2, torch.device("cpu")), slices(rank), BUCKET_BYTES)


def second_rank(meeting: str) -> None:
    """Answers for three versions."""
    gathering = joined(1, meeting)
    for _ in range(3):
        gathering.answer(shards(1))
    dist.destroy_process_group()


def test_every_byte_comes_from_the_rank_that_holds_it(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=second_rank, args=(meeting,))
    other.start()
    try:
        gathering = joined(0, meeting)
        assert gathering.plan.metas == PLAN.metas
        assert len(PLAN.buckets) == 4
        wanted = [*buckets_of(PLAN, WEIGHTS)]

        assert all(map(torch.equal, gathering.buckets(shards(0)), wanted))
        gathering.done()

        given_up = gathering.buckets(shards(0))
        next(given_up)
        again = gathering.buckets(shards(0))
        next(again)
        with pytest.raises(RuntimeError, match="given up"):
            next(given_up)
        assert all(map(torch.equal, again, wanted[1:]))
        gathering.done()

        late = gathering.buckets(shards(0))
        next(late)
        gathering.done()
        with pytest.raises(RuntimeError, match="given up"):
            next(late)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
        dist.destroy_process_group()


def test_one_rank_gathers_from_itself() -> None:
    alone = [Slice(one.name, one.shape, one.dtype, 0, int(np.prod(one.shape))) for one in slices(0)]
    gathering = Gathering(Ranks(0, 1, torch.device("cpu")), alone, BUCKET_BYTES)
    whole = {
        name: one.flatten().view(KINDS[one.dtype][2]).numpy().view(KINDS[one.dtype][1])
        for name, one in WEIGHTS.items()
    }
    assert all(map(torch.equal, gathering.buckets(whole), buckets_of(PLAN, WEIGHTS)))
    gathering.done()


def test_elements_that_no_rank_or_two_ranks_hold_are_refused() -> None:
    for every in ([slices(0)], [slices(0), slices(1), slices(1)]):
        with pytest.raises(ConfigError, match=r"'a': \d+.*exactly one rank.*weights\.transport"):
            metas_of(every)
