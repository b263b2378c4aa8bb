"""Ids without a token have no probability in a replica, and the others keep their share of the rest."""

from __future__ import annotations

from typing import Any

import torch

from sync.base.tokenizers import never_sample_from


class Model(torch.nn.Module):
    """A head of 7 rows; says which logits it made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 7)
        self.samples = True

    def compute_logits(self, hidden_NH: torch.Tensor) -> Any:
        return self.head(hidden_NH) if self.samples else None


@torch.inference_mode()
def test_known_ids_keep_their_distribution_and_the_others_have_none() -> None:
    model, hidden = Model(), torch.randn(5, 3)
    before = model.compute_logits(hidden)
    expected = before[:, :4].log_softmax(-1)
    never_sample_from(model, 4)
    after = model.compute_logits(hidden)
    assert after.shape == (5, 7)
    torch.testing.assert_close(after.log_softmax(-1)[:, :4], expected)
    assert (after.softmax(-1)[:, 4:] == 0).all()
    assert (after.argmax(-1) < 4).all()


def test_a_worker_that_does_not_sample_has_no_logits_to_change() -> None:
    model = Model()
    model.samples = False
    never_sample_from(model, 4)
    assert model.compute_logits(torch.randn(1, 3)) is None
