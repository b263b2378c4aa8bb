"""Models to publish, made on the spot, and a publisher of as many versions of them as are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from sync.publish import Publisher, PublishReport, Slice
from sync.snapshots import checkpoint
from sync.stores import Store
from sync.wire import Version

RUN: Final = "bench"
CHANGED: Final = 0.01
"""Share of elements that move by one unit in the last place from version to version, as in post-training at a
learning rate of about 1e-6."""
CONTEXT: Final = 256
Kind = Literal["full", "delta", "lora"]


@dataclass(frozen=True)
class Shape:
    """A Qwen3 in bf16 with random weights, and what its engine is asked for."""

    name: str
    hidden: int
    layers: int
    heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    rank: int
    """Of its adapters."""
    in_flight: int
    """Completions of 12 tokens that the engine works on at any time."""
    window_seconds: float
    """Between two looks at the engine's throughput."""
    swaps: int
    """In a window that has some."""


TOY: Final = Shape("toy", 96, 2, 3, 32, 256, 29, rank=8, in_flight=256, window_seconds=4.0, swaps=8)
"""The quickstart's student, and its load."""
LARGE: Final = Shape("large", 768, 12, 12, 64, 2304, 20480, rank=32, in_flight=16, window_seconds=12, swaps=3)
"""101 M parameters."""


def make(shape: Shape, folder: Path) -> Path:
    """A Hugging Face model folder of the shape; found there when it was made before."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from distill.tasks.teaching import make_tokenizer

    if (folder / "tokenizer.json").is_file():
        return folder
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=max(1, shape.heads // 2),
            head_dim=shape.head_dim,
            intermediate_size=shape.feed_forward,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,  # completions have the length that is asked for
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer([f"w{i}" for i in range(shape.vocabulary)], "w[0-9]+", "w1", "w0").save_pretrained(folder)
    return folder


def make_adapter(shape: Shape, model: Path, folder: Path) -> Path:
    """An adapter of all linear layers, as peft saves it; found there when it was made before."""
    import torch
    from transformers import AutoModelForCausalLM

    from student_trainer.config import LoRAConfig
    from student_trainer.engine import with_adapters

    if (folder / "adapter_config.json").is_file():
        return folder
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    wrapped = with_adapters(base, LoRAConfig(rank=shape.rank), 0)
    wrapped.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


class Versions:
    """Publishes versions of a folder, which it changes: version n is step n of lineage 0."""

    def __init__(self, folder: Path, store: Store) -> None:
        places = checkpoint.tensors(folder)
        self._folder, self._random, self._step = folder, np.random.default_rng(0), 0
        self._arrays: dict[str, Any] = checkpoint.bits(places, writable=True)
        self.parameters = sum(array.size for array in self._arrays.values())
        slices = [Slice(n, at.shape, at.kind, 0, self._arrays[n].size) for n, at in places.items()]
        self._publisher = Publisher(store, RUN, checkpoint.fingerprint(folder), slices)

    def publish(self, kind: Kind) -> PublishReport:
        """The next version; a delta needs a full one before it."""
        version = Version(0, self._step)
        if self._step:
            self._move()
        self._step += 1
        if kind == "delta":
            return self._publisher.delta(version, self._arrays)
        return self._publisher.anchor(version, None, self._folder, self._arrays, kind)

    def _move(self) -> None:
        for array in self._arrays.values():
            moved = self._random.integers(0, array.size, max(1, int(CHANGED * array.size)))
            array[moved] ^= 1
