"""What is staged for a model of vLLM's kind, and what its pause then changes."""

import gc
import weakref

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class Model(nn.Module):
    """Two layers of which `second` has a bias, which vLLM loads in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3, bias=False), nn.Linear(3, 2)
        self.requires_grad_(False)

    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        own = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
        return {name for name, _ in weights}


@pytest.fixture
def model():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    return model


def staged(model, weights):
    from sync.vllm.vllm_weights import Staging

    staging = Staging(model)
    staging.shadow.load_weights(list(weights.items()))
    staging.finish()
    staging.close()
    return staging


def test_the_live_model_changes_in_place_and_only_when_told_to(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storages = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    weights = {name: torch.randn_like(tensor) for name, tensor in before.items()}
    staging = staged(model, weights)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    staging.place()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == storages


def test_what_was_staged_is_freed_with_its_last_user_not_when_python_collects_circles(model):
    weights = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    gc.disable()
    try:
        staging = staged(model, weights)
        staging.place()
        known = weakref.ref(staging)
        del staging
        assert known() is None
    finally:
        gc.enable()


def test_tensors_whose_bits_are_the_same_are_not_copied(model):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.first.weight[0, 0] = 0.0
    weights["first.weight"][0, 0] = -0.0
    staging = staged(model, weights)
    assert [live.data_ptr() for live, _ in staging._copies] == [model.first.weight.data_ptr()]
    staging.place()
    assert torch.signbit(model.first.weight[0, 0])


def test_a_tensor_of_another_shape_is_refused_before_anything_changes(model):
    before = model.second.weight.clone()
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        staged(model, {"second.weight": torch.zeros(4, 4), "second.bias": torch.zeros(2)})
    assert torch.equal(model.second.weight, before)


def test_what_needs_more_memory_than_allowed_is_not_staged(model):
    from sync.vllm.vllm_weights import bytes_needed, why_not_staged

    needed = bytes_needed(model)
    assert needed == 4 * (2 * 3 + 3 * 2), "of both weights; the bias is loaded in place"
    assert why_not_staged(model, False, needed) is None
    problem = f"takes {needed} bytes here and student.staging_bytes allows"
    assert problem in why_not_staged(model, False, needed - 1)
    assert "quantises" in why_not_staged(model, True, None)
