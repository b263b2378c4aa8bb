"""FLOPs, bytes and seconds of the three stages of a step: arithmetic on shapes, no configuration, no device.

n: tokens of a sequence, p of its prompt, c of its completion. N: parameters that multiply a token. L: layers.
A: heads x head width. F: FLOP/s and M: bytes/s of one device, with the assumed or measured share in them.

    forward(n)      2 N n + 2 L A n²                    FLOPs of a causal pass: products, then attention
    score           batch x forward(p + c) / (devices x F)
    train           f x batch x forward(p + c) / (devices x F), f: `train_factor`
    generate        prefill, decode, and prefill again of what runs at a swap; `Generation`

Left out: completions that teachers generate (objective.on_policy < 1), ZeRO-3's gathers, pipeline bubbles,
the optimizer's update, the teacher's head in the objective, tails of batches whose completions differ in
length, restarts, checkpoints and evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from distill.preflight_checks.devices import kv_bytes
from distill.preflight_checks.machine import (
    count_parameters,
    expert_parameters,
    experts_of,
    has_experts,
    layers_of_experts,
)
from distill.prompts.sources import text_config
from sync.base.settings import ModelSource

SIXTEEN_BITS: Final = 2


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a model."""

    parameters: float
    looked_up: float
    """Parameters of an embedding that is not the head too: a token reads one row and multiplies none."""
    routed: float
    """Parameters of all experts."""
    experts: int
    """Experts of a layer; 1: there are none."""
    chosen: int
    """Experts that a token goes through."""
    layers: int
    attention: float
    """Heads x head width."""
    kv: float
    """Bytes of KV cache a token, in 16 bits, on all GPUs of an engine together."""

    @property
    def active(self) -> float:
        """N."""
        return self.parameters - self.looked_up - self.routed * (1 - self.chosen / self.experts)

    def forward(self, tokens: float) -> float:
        """FLOPs of a causal pass over one sequence."""
        return 2 * self.active * tokens + 2 * self.layers * self.attention * tokens**2

    def read(self, sequences: float) -> float:
        """Parameters that a decode step of so many sequences reads: an expert only if one of them goes there,
        which all miss with probability (1 − chosen / experts)^sequences."""
        missed = (1 - self.chosen / self.experts) ** sequences
        return self.parameters - self.looked_up - self.routed * missed


def shape_of(source: ModelSource, tensor: int = 1) -> Shape:
    """The model's, in an engine of `tensor` parallel GPUs. Raises ConfigError for an unreadable config."""
    model, parameters = text_config(source), count_parameters(source)
    experts, chosen = 1, 1
    if has_experts(model):
        experts, chosen = experts_of(model), getattr(model, "num_experts_per_tok", None) or 1
    layers, heads = int(model.num_hidden_layers), int(model.num_attention_heads)
    tied = bool(getattr(model, "tie_word_embeddings", False))
    return Shape(
        parameters,
        0 if tied else model.vocab_size * model.hidden_size,
        float(layers_of_experts(model) * expert_parameters(model)),
        int(experts),
        int(chosen),
        layers,
        heads * float(getattr(model, "head_dim", None) or model.hidden_size // heads),
        tensor * kv_bytes(model, tensor),
    )


def train_factor(checkpointing: bool, adapters: bool) -> int:
    """Forward passes that a training step costs: 1, and 1 each for gradients of activations, of weights (not
    with adapters), and for activations that are computed again."""
    return 2 + (not adapters) + checkpointing


@dataclass(frozen=True)
class Generation:
    """Replicas with continuous batching; each has `in_flight` sequences of a mean context of p + c / 2."""

    shape: Shape
    item: int
    """Bytes of a weight."""
    prompt: float
    completion: float
    replicas: int
    devices: float
    """Of one replica; weights and KV cache are split over them."""
    in_flight: float
    flops_per_second: float
    bytes_per_second: float

    @property
    def context(self) -> float:
        return self.prompt + self.completion / 2

    def decode_step(self) -> float:
        """Seconds: memory-bound, (item x weights read + in_flight x context x KV bytes) / (devices x M), or
        compute-bound, in_flight x 2 N / (devices x F), whichever is longer."""
        moved = self.item * self.shape.read(self.in_flight) + self.in_flight * self.context * self.shape.kv
        computed = self.in_flight * 2 * self.shape.active
        return max(moved / self.bytes_per_second, computed / self.flops_per_second) / self.devices

    def seconds(self, batch: float, swaps: float) -> float:
        """Of all replicas together for a batch: decode, prefill, and at each swap that drops the KV cache the
        prefill of all in flight; `swaps`: of those, per step."""
        decode = batch * self.completion / (self.replicas * self.in_flight) * self.decode_step()
        again = swaps * self.replicas * self.in_flight * self.shape.forward(self.context)
        prefill = batch * self.shape.forward(self.prompt) + again
        return decode + prefill / (self.replicas * self.devices * self.flops_per_second)

    def flops(self, batch: float, swaps: float) -> float:
        """As `seconds`, in FLOPs."""
        again = swaps * self.replicas * self.in_flight * self.shape.forward(self.context)
        return batch * self.shape.forward(self.prompt + self.completion) + again


def most_in_flight(memory: float, reserved: float, per_sequence: float) -> float:
    """Sequences whose KV cache of `per_sequence` bytes fits into `memory` bytes beside what is `reserved`."""
    return max(1.0, (memory - reserved) / per_sequence)


# --- bytes of a version

DELTA_RATES: Final = (1e-6, 3e-6, 1e-5, 5e-5)
FAST: Final = (0.0105, 0.0247, 0.0562, 0.155)
DELTA_BYTES: Final = {"auto": FAST, "fast": FAST, "small": (0.00659, 0.0165, 0.0382, 0.109)}
"""Bytes per parameter of a delta one step apart at these learning rates, at 101 M parameters
(docs/benchmarks.md)."""
DELTA_GROWTH: Final = 0.7
"""Exponent of the steps between two versions: eight times the steps gave 2.7 to 4.7 times the bytes there."""


def delta_share(rate: float, codec: str, steps: int) -> float:
    """Bytes of a delta over those of a full snapshot in 16 bits.

    Log-linear between the table's rates, and its first or last value outside of them.
    """
    import numpy as np

    at_one = np.exp(np.interp(np.log(rate), np.log(DELTA_RATES), np.log(DELTA_BYTES[codec])))
    return float(min(1.0, at_one / SIXTEEN_BITS * steps**DELTA_GROWTH))
