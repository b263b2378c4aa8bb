"""The chunked head's memory, precision, and its several teachers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from student_trainer import head as head_module
from student_trainer.head import RHO_MAX, Loss, _add_product, chunked_loss, token_logp
from student_trainer.objectives.config import Full, Sampled, StudentTopK, TaskReward, TopK
from student_trainer.objectives.divergences import Targets, at, full
from student_trainer.objectives.token_statistics import STATS
from student_trainer.step import loss_of
from sync.wire.head import HeadShape, OutputHead, probabilities

C, V, H = 96, 40, 6


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned, and where those as large as the head lie."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.heads: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
                self.heads |= {value.data_ptr()} if value.numel() == V * H else set()
        return result


def work(teachers: int = 1) -> tuple[torch.Tensor, torch.Tensor, Targets, Loss]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(C, H, generator=g), torch.randn(V, H, generator=g)
    token = torch.randint(0, V, (C,), generator=g)
    heads = tuple(OutputHead(torch.randn(V, 3 + i, generator=g), None, HeadShape(V)) for i in range(teachers))
    teacher_hidden = torch.randn(C, 2 + teachers, generator=g)
    low, whose = torch.full((C,), -3.0), torch.arange(C) % teachers
    targets = Targets(token, low, low, token >= 0, teacher_N=whose, teacher_hidden_NG=teacher_hidden)
    return hidden, weight, targets, Loss(full, heads=heads)


def computed(
    hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, loss: Loss, chunk: int
) -> list[torch.Tensor]:
    """The loss, its statistics, and its gradients in copies of the hidden states and the weight."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight)]
    head = OutputHead(leaves[1], None, HeadShape(V))
    total, stats = chunked_loss(leaves[0], head, targets, loss, chunk)
    total.backward()
    return [total.detach(), stats, *(leaf.grad for leaf in leaves)]


@pytest.fixture(params=[1, 7, 2 * C])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a block, if a chunk has so many."""
    monkeypatch.setattr(head_module, "BLOCK", request.param * V + 1)


def test_no_tensor_has_all_logits_and_the_heads_gradient_is_summed_where_it_is() -> None:
    hidden, weight, targets, loss = work()
    head = OutputHead(weight.requires_grad_(), None, HeadShape(V))
    with LargestTensor() as largest:
        total, _ = chunked_loss(hidden.requires_grad_(), head, targets, loss, 8)
        total.backward()
    assert largest.elements <= max(8 * V, C * H, V * H) < C * V
    assert largest.heads == {weight.data_ptr(), weight.grad.data_ptr()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sums_products_of_bf16_in_fp32_where_the_gradient_is() -> None:
    torch.manual_seed(0)
    grad, hidden = torch.randn(64, V).bfloat16(), torch.randn(64, H).bfloat16()
    total = torch.randn(V, H)
    exact = total.double() + grad.double().t() @ hidden.double()
    summed = total.cuda()
    with LargestTensor() as largest:
        _add_product(summed, grad.cuda(), hidden.cuda())
    assert largest.heads == {summed.data_ptr()}
    torch.testing.assert_close(summed.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("block")
def test_every_token_is_compared_with_the_teacher_it_was_routed_to_and_summed_there() -> None:
    hidden, weight, targets, loss = work(teachers=3)
    loss, head = replace(loss, teachers=("a", "b", "c")), OutputHead(weight, None, HeadShape(V))
    logp, sums, counts = (hidden @ weight.t()).log_softmax(1), list[float](), list[float]()
    for index, teacher in enumerate(loss.heads):
        mine = targets.teacher_N == index
        own = targets.teacher_hidden_NG[mine][:, : teacher.weight_VH.shape[1]]
        logq = (own @ teacher.weight_VH.t()).log_softmax(1)
        sums.append(float((logp[mine].exp() * (logp[mine] - logq)).sum()))
        counts.append(float(mine.sum()))
    for chunk in (7, 2 * C):
        value, stats = chunked_loss(hidden, head, targets, loss, chunk)
        assert float(value) == pytest.approx(sum(sums), rel=1e-5)
        assert stats[RHO_MAX + 1 :].tolist() == pytest.approx([*sums, *counts], rel=1e-5)


def test_a_bf16_head_gives_what_whole_bf16_logits_give_and_sums_its_gradient_in_fp32() -> None:
    hidden, weight, targets, loss = work()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    leaf = (hidden @ weight.t()).float().requires_grad_()
    logits = targets.teacher_hidden_NG @ loss.heads[0].weight_VH.t()
    total = loss.objective(leaf.log_softmax(1), replace(targets, teacher_logp_NV=logits.log_softmax(1)))[0]
    (grad,) = torch.autograd.grad(total.sum(), leaf)
    total = total.detach()
    value, _, *grads = computed(hidden, weight, targets, loss, C)
    assert float(value) == pytest.approx(float(total.sum()), rel=1e-6)
    assert torch.equal(grads[0], grad.bfloat16() @ weight)
    assert torch.equal(grads[1], grad.bfloat16().t() @ hidden)
    exact = grad.bfloat16().double().t() @ hidden.double()
    *_, by_token = computed(hidden, weight, targets, loss, 1)
    assert float((by_token.double() - exact).abs().max()) <= 2.0**-8 * float(exact.abs().max())


@pytest.mark.parametrize(
    "objective",
    [Full(), Sampled(), TopK(k=3), StudentTopK(k=3, task=TaskReward(clip=(0.2, 0.2)))],
    ids=["full", "sampled", "topk", "student_topk with masks"],
)
@pytest.mark.usefixtures("block")
def test_loss_and_gradients_are_those_of_whole_logits(objective: Any) -> None:
    """Through every setting of a head, of which the last rows are no token's."""
    hidden, _, targets, loss = work()
    whole, weight, bias = targets, torch.randn(V + 2, H), torch.randn(V + 2)
    if isinstance(objective, Full):
        logits = targets.teacher_hidden_NG @ loss.heads[0].weight_VH.t()
        whole = replace(targets, teacher_logp_NV=logits.log_softmax(1))
    else:
        loss = loss_of(objective, ["t"], ends=(2,))
        ids = torch.stack([torch.randperm(V)[:3] for _ in range(C)])
        ids[::4, 0], ids[1::4, 2] = targets.token_N[::4], -1
        targets = replace(targets, teacher_hidden_NG=None)
        if not isinstance(objective, Sampled):
            logq = torch.linspace(-4, -2, 3 * C).reshape(C, 3)
            targets = replace(targets, support_NK=ids, support_logp_NK=logq)
        if objective.task is not None:
            masked_C1 = torch.arange(C).unsqueeze(1) % 4 == 0  # their ids hold the sampled token
            mask_NK = ids.where(masked_C1, -1)
            targets = replace(targets, advantage_N=torch.linspace(-1, 1, C), mask_NK=mask_NK)
        whole = targets
    leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
    raw = (leaves[0] @ leaves[1].t() + leaves[2])[:, :V]
    logp = (2.0 * torch.tanh(raw * 0.7 / 2.0) / 1.3).log_softmax(1)
    total = loss.objective(logp, whole)[0].sum() * 3.0
    wanted = [total.detach(), *torch.autograd.grad(total, leaves)]
    ends = logp.detach().exp()[:, [*loss.ends]].sum()
    head = OutputHead(leaves[1], leaves[2], HeadShape(V, scale=0.7, soft_cap=2.0, temperature=1.3))
    for chunk in (1, 8, 7, 2 * C):
        value, stats = chunked_loss(leaves[0], head, targets, loss, chunk)
        found = [value.detach() * 3.0, *torch.autograd.grad(value * 3.0, leaves)]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(stats[STATS.index("loss")], value.detach())
        torch.testing.assert_close(stats[STATS.index("student_end")], ends)
        assert float(stats[STATS.index("mask_tokens")]) == (0 if objective.task is None else C / 4)
        compared = sum(min(64, chunk, C - start) for start in range(0, C, chunk))
        assert stats[STATS.index("overlap_tokens")] == (0 if targets.support_NK is None else compared)
        of_tokens = token_logp(hidden, head, targets.token_N, chunk)
        torch.testing.assert_close(of_tokens, at(logp.detach(), targets.token_N))


def test_probabilities_are_exponentials_within_their_bound() -> None:
    logp_N = -torch.logspace(-6, 1.9, 400)
    expected_N = logp_N.double().exp()
    assert ((probabilities(logp_N) / expected_N - 1).abs() <= 2e-7 * logp_N.abs().clamp(min=1)).all()
    assert probabilities(torch.tensor([0.0, -torch.inf])).tolist() == [1.0, 0.0]
    assert probabilities(torch.zeros(0, 5)).shape == (0, 5)
