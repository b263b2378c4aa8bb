"""Facts of a model, from its files: parameters, bytes, shape, experts.

`source`: where its files are; `model`: transformers' config of its text part, as `text_config` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from distill.prompts.sources import model_config, text_config
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.weights.snapshots import checkpoint
from sync.wire import Routing

CAST: Final = frozenset(("bf16", "f2", "f4", "f8"))
"""Kinds of stored tensors, in `checkpoint.BITS`' names, that an engine casts to its dtype."""
COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of transformers' configurations that count the experts of a layer."""
FAMILIES: Final = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""transformers' `model_type` of those that can be replayed."""
NOT_UPDATED: Final = ("gpt_oss",)
"""Of those, students whose experts a replica would keep as they were; `sync.vllm.vllm_weights.load_weights`
refuses all that are like them."""


def precision(model: Any, dtype: str) -> str:
    """Name of the weights' precision, where "auto" stands for that of transformers' config."""
    stored = str(getattr(model, "dtype", None) or "float32").removeprefix("torch.")
    return stored if dtype == "auto" else dtype


def count_parameters(source: ModelSource) -> int:
    """Parameters of a folder's tensors; of a Hub id or a quantized model, those of a model made from its
    config."""
    if (tensors := _tensors(source)) and not quantization(source):
        return sum(map(_elements, tensors.values()))
    return sum(parameter.numel() for parameter in on_meta(source).parameters())


def item_bytes(model: Any, dtype: str) -> int:
    """Bytes of a number in `dtype`, where "auto" stands for that of `model`, a transformers config."""
    return int(re.findall(r"\d+", precision(model, dtype))[0]) // 8


def weight_bytes(source: ModelSource, dtype: str) -> float:
    """Bytes of a model's weights in an engine that casts to `dtype` what is not quantized.

    Of a folder, tensors of other kinds than CAST are as large as they are stored. Of a Hub id, all weights
    but embedding and head have the bits that its config tells.
    """
    model = text_config(source)
    item = item_bytes(model, dtype)
    if tensors := _tensors(source):
        sizes = tensors.values()
        return sum(item * _elements(tensor) if tensor.kind in CAST else tensor.nbytes for tensor in sizes)
    parameters, bits = count_parameters(source), _quantized_bits(source)
    if bits is None:
        return item * parameters
    looked_up = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return item * looked_up + bits / 8 * (parameters - looked_up)


def _tensors(source: ModelSource) -> dict[str, checkpoint.TensorAt]:
    """Tensors of a folder by name; none of a Hub id."""
    folder = Path(source.path)
    return checkpoint.tensors(folder) if any(folder.glob("*.safetensors")) else {}


def _elements(place: checkpoint.TensorAt) -> int:
    return place.nbytes // checkpoint.BITS[place.kind].itemsize


def quantization(source: ModelSource) -> Mapping[str, Any]:
    """How weights are quantized; empty: they are not. It stands outside of a multimodal model's text part."""
    return getattr(model_config(source), "quantization_config", None) or {}


def _quantized_bits(source: ModelSource) -> int | None:
    """Bits of a quantized weight; None: there are none, or the model's config does not tell."""
    section = quantization(source)
    groups = [group.get("weights") or {} for group in (section.get("config_groups") or {}).values()]
    told = [section.get("bits"), *(group.get("num_bits") for group in groups)]
    told += [bits for bits in (4, 8) if section.get(f"load_in_{bits}bit")]
    told += map(int, re.findall(r"\d+", section.get("quant_method") or ""))  # such as "fp8"
    return max(filter(None, told), default=None)


def misfit(source: ModelSource, loads: bool) -> str | None:
    """Why the weights in a folder are not those of the model that its config.json describes; None: they are,
    or it is only known once they are loaded. `loads`: transformers loads them, whose word counts then; vLLM
    knows models that it does not. Raises SnapshotError for files that were cut."""
    tensors = _tensors(source)
    if not loads or not tensors or quantization(source) or source.trust_remote_code:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what differs is said below
    logging.disable_progress_bar()
    try:
        model, differs = AutoModelForCausalLM.from_pretrained(
            source.path, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # noqa: BLE001 - of its files, in the words of several libraries
        why = f"transformers cannot load it ({type(error).__name__}: {error!s:.160})"
        return f"{why}: name a causal language model that save_pretrained wrote"
    finally:
        logging.set_verbosity(verbosity)
    wrong = [*differs["missing_keys"], *(name for name, *_ in differs["mismatched_keys"])]
    if wrong:
        kind = model.config.model_type
        return (
            f"its config.json describes a {kind} with {len(wrong)} tensors that its weights lack or have in "
            f"other shapes, such as {min(wrong)}, which would be random numbers: put config.json and weights "
            "of one model together"
        )
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    names = [name for name, value in model.named_parameters() if any(value is end for end in ends)]
    if model.config.get_text_config().tie_word_embeddings and len(names) == 2 and {*names} <= {*tensors}:
        bits = checkpoint.bits({name: tensors[name] for name in names})
        if not np.array_equal(bits[names[0]], bits[names[1]]):
            return (
                f"config.json has tie_word_embeddings, and {' and '.join(names)} differ: vLLM would take the "
                "first for both, the trainer each: set it to false, or remove the second"
            )
    return None


def on_meta(source: ModelSource) -> Any:
    """The model of a config, without its weights. Raises ConfigError for an unreadable one."""
    import torch
    from transformers import AutoModelForCausalLM

    config = text_config(source)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # noqa: BLE001 - of its own code, or of transformers' checks
        raise ConfigError(
            f"{source.path!r} is no causal language model that transformers builds: {error}; name another"
        ) from None


def has_experts(model: Any) -> bool:
    """Whether transformers' config is of a mixture of experts."""
    return experts_of(model) > 1


def experts_of(model: Any) -> int:
    """Experts of a layer; 0: it has none."""
    return next((count for name in COUNTS if (count := getattr(model, name, None))), 0)


def routing(model: Any) -> Routing | None:
    """How transformers' config routes; None: it is of no family in FAMILIES."""
    if model.model_type not in FAMILIES:
        return None
    return Routing(layers_of_experts(model), model.num_experts_per_tok, experts_of(model))


def layers_of_experts(model: Any) -> int:
    """Layers of transformers' config that have experts; 0: it has none."""
    dense = getattr(model, "first_k_dense_replace", None) or 0
    every = getattr(model, "decoder_sparse_step", None) or 1
    without = getattr(model, "mlp_only_layers", None) or ()
    layers = [
        layer
        for layer in range(model.num_hidden_layers)
        if layer >= dense and layer not in without and (layer + 1) % every == 0
    ]
    return len(layers) if has_experts(model) else 0


def expert_parameters(model: Any) -> int:
    """Parameters of all experts of one layer, without shared ones; 0: it has none."""
    if not has_experts(model):
        return 0
    inner = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
    return 3 * experts_of(model) * int(inner) * int(model.hidden_size)


# --- what the arithmetic of planning needs


def kv_bytes(model: Any, tensor: int = 1) -> float:
    """Bytes of KV cache per token, in 16 bits, on each of `tensor` GPUs; `model`: its transformers config."""
    layers = int(model.num_hidden_layers)
    if rank := getattr(model, "kv_lora_rank", None):  # latent attention is not split
        return 2.0 * layers * (rank + model.qk_rope_head_dim)
    heads = int(getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return 2.0 * 2 * layers * max(1, heads // tensor) * width


def inner_width(model: Any) -> int:
    """Width of the feed-forward layer that a token goes through."""
    experts = getattr(model, "num_experts_per_tok", None) or 0
    routed = experts * (getattr(model, "moe_intermediate_size", None) or model.intermediate_size)
    return int(routed or model.intermediate_size)


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a model."""

    parameters: float
    looked_up: float
    """Parameters of an embedding that is not the head too: a token reads one row and multiplies none."""
    routed: float
    """Parameters of all experts."""
    share: float
    """Of a layer's experts, that a token goes through; 1: there are none."""
    layers: int
    attention: float
    """Heads x head width."""
    kv: float
    """Bytes of KV cache a token, in 16 bits, on all GPUs of an engine together."""

    @property
    def active(self) -> float:
        """N."""
        return self.read(1)

    def forward(self, tokens: float) -> float:
        """FLOPs of a causal pass over one sequence."""
        return 2 * self.active * tokens + 2 * self.layers * self.attention * tokens**2

    def read(self, sequences: float) -> float:
        """Parameters that a decode step of so many sequences reads: an expert only if one of them goes there,
        which all miss with probability (1 − share)^sequences."""
        return self.parameters - self.looked_up - self.routed * (1 - self.share) ** sequences


def shape_of(source: ModelSource, tensor: int = 1) -> Shape:
    """The model's, in an engine of `tensor` parallel GPUs. Raises ConfigError for an unreadable config, and
    for one of other layers than attention."""
    model, parameters = text_config(source), count_parameters(source)
    if not getattr(model, "num_attention_heads", None):
        raise ConfigError(
            f"{source.path}: what {model.model_type} computes is not known, for it has no heads"
        )
    chosen = getattr(model, "num_experts_per_tok", None) or 1
    layers, heads = int(model.num_hidden_layers), int(model.num_attention_heads)
    tied = bool(getattr(model, "tie_word_embeddings", False))
    return Shape(
        parameters,
        0 if tied else model.vocab_size * model.hidden_size,
        float(layers_of_experts(model) * expert_parameters(model)),
        chosen / experts_of(model) if has_experts(model) else 1.0,
        layers,
        heads * float(getattr(model, "head_dim", None) or model.hidden_size // heads),
        tensor * kv_bytes(model, tensor),
    )
