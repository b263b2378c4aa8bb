"""A student of two dozen ids, and its steps without DeepSpeed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from tiny_models import language_model

from student_trainer.engine import Student, head_shape
from student_trainer.ranks import Ranks
from student_trainer.varlen import replace_attention
from sync.wire import Array, Rows, pack

T = TypeVar("T")
VOCAB, PADDED = 21, 24
ALONE = Ranks(0, 1, torch.device("cpu"))


def student(seed: int, chunk: int = 64, varlen: bool = False) -> Student:
    size = {"vocab_size": PADDED, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    size |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
    model = language_model("Llama", seed, **size)
    if varlen:
        replace_attention(model, "sdpa")
    return Student(model, head_shape(model.config, VOCAB, 1.0), chunk, varlen)


def difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Largest difference of any element, such as of gradients."""
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


class PlainEngine:
    """What DeepSpeed's engine does, in one process: adds gradients up to the boundary, then one SGD step."""

    def __init__(self, student: Student, learning_rate: float) -> None:
        self.module = student
        self.gradients: list[torch.Tensor] = []
        self._optimizer = torch.optim.SGD(student.parameters(), lr=learning_rate)
        self.boundaries: list[bool] = []

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self.boundaries.append(last)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.gradients = [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        self._optimizer.step()

    def was_step_applied(self) -> bool:
        return True

    def get_lr(self) -> list[float]:
        return [0.1]

    def get_global_grad_norm(self) -> float:
        return float(torch.cat([g.flatten() for g in self.gradients]).norm())


def zero_shards(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """What ZeRO-3 gives to each of `ranks`; the padding is not zero, for nobody may look at it."""
    length = -(-whole.numel() // ranks)
    padding = (0, length * ranks - whole.numel())
    return list(torch.nn.functional.pad(whole.detach().flatten(), padding, value=-1.0).split(length))


def flat_rows(
    ids: Sequence[str], prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], **arrays: Any
) -> Rows:
    """Rows of these tokens; log-probabilities are −2, steps and teachers 0, where `arrays` have none."""

    def i4(values: Any) -> Array:
        return pack(np.array(values, "i4"))

    count, flat = sum(map(len, completions)), [*chain(*zip(prompts, completions, strict=True))]
    least = pack(np.full(count, -2.0, "f4"))
    given = {"behavior_logprob": least, "teacher_logprob": least, "token_step": i4([0] * count)}
    given |= {"teacher": i4([0] * len(ids)), "prompt_lens": i4([*map(len, prompts)])}
    given |= {"completion_lens": i4([*map(len, completions)]), "tokens": i4([*chain(*flat)])}
    return Rows(ids=[*ids], **(given | arrays))


@dataclass(frozen=True)
class Together(Ranks):
    """One of the ranks that are threads of this process."""

    brought: list[Any]
    """What each of them has brought to the exchange."""
    all_here: threading.Barrier

    def _exchange(self, what: Any) -> list[Any]:
        self.brought[self.rank] = what
        self.all_here.wait()
        found = list(self.brought)
        self.all_here.wait()
        return found

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(values.double()))

    def collect(self, body: bytes) -> list[bytes]:
        return self._exchange(body)

    def barrier(self) -> None:
        self._exchange(None)


def by_two_ranks(work: Callable[[Ranks], T]) -> list[T]:
    """What each of two ranks makes of it."""
    where = torch.device("cpu"), [None] * 2, threading.Barrier(2, timeout=600)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, [Together(rank, 2, *where) for rank in (0, 1)]))
