"""Which process uses which GPU, and whether what must be in its memory fits. Computed, not measured.

    replica, vLLM teacher   weights / (tensor x pipeline) + one sequence's KV cache + WORKSPACE, within the
                            share gpu-memory-utilization that vLLM reserves
    transformers teacher    weights / GPUs + one forward pass of batch_tokens + logits of head_chunk
    trainer rank            (weights + gradients + master copy and moments) / ranks + gathered parameters
                            + activations of micro_batch_tokens + logits of head_chunk + teachers' heads
                            trainer.expert_parallel = n leaves the shares as they are, experts being cut among
                            the ranks / n that hold the same ones; of a layer 1 / n of the experts is gathered
    evaluator               the student in float32 + WORKSPACE

Fragmentation, NCCL buffers and CUDA graphs are what `WORKSPACE` and the rest of a GPU are for.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from distill.config import RunConfig
from distill.preflight_checks.machine import (
    GIB,
    count_parameters,
    expert_parameters,
    installed_for_cpu,
    item_bytes,
    layers_of_experts,
    runs_vllm,
    weight_bytes,
)
from distill.prompts.sources import student_limit, text_config
from student_trainer.deepspeed_json import deepspeed_config, in_bf16, offloads
from student_trainer.launch import machines
from student_trainer.objectives.config import needs
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource, Placement
from teacher_service.config import TeacherConfig

log = logging.getLogger(__name__)
HERE: Final = "here"
WORKSPACE: Final = 2 * GIB
"""Activations of a vLLM engine, its CUDA graphs and buffers."""
SMI_SECONDS: Final = 60.0
"""For nvidia-smi to answer in; seconds where the driver is not loaded yet."""
VLLM_SHARE: Final = 0.92
"""vLLM's default of gpu-memory-utilization."""
Where = Mapping[str, tuple[str, Sequence[str]]]
"""Process → its machine of a cluster and the GPUs that it has there; of a process that is missing, neither is
known."""
EACH_NODE: Final = "each trainer node"


@dataclass(frozen=True)
class Use:
    """One process on its GPUs."""

    process: str
    key: str
    """Key that sets its GPUs."""
    host: str
    gpus: tuple[str, ...]
    """GPUs as CUDA_VISIBLE_DEVICES names them."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What is in the memory of each of its GPUs → bytes."""
    share: float = 0.0
    """Share of each GPU's memory that vLLM reserves; 0: it takes what it needs."""
    unloads: bool = False
    """It leaves its GPU to others of this kind when it is idle."""

    @property
    def bytes(self) -> float:
        return sum(self.terms.values())

    @property
    def line(self) -> str:
        parts = " + ".join(f"{what} {size / GIB:.1f}" for what, size in self.terms.items())
        share = f", in the {self.share:g} that vLLM reserves" if self.share else ""
        place = _named(self.host, ",".join(self.gpus))
        return f"{self.process} on {place}: {parts} = {_gib(self.bytes)}{share}"


def check_devices(config: RunConfig, where: Where | None = None) -> list[str]:
    """A line for every process on GPUs. Raises ConfigError for a GPU with two of them or too little memory.

    `where`: of the processes that are not started on this machine; None: all are. On a machine without GPUs
    only what `devices` names is computed. The sizes are those of nvidia-smi, of other machines those of
    preflight.gpu_gib; a GPU whose size is unknown is not compared with the sum.
    """
    sizes = gpus()
    gpu_uses = list(uses(config, visible(sizes), where))
    by_gpu: dict[tuple[str, str], list[Use]] = defaultdict(list)
    for use in gpu_uses:
        for gpu in use.gpus:
            by_gpu[use.host, gpu].append(use)
    gpu_gib = config.preflight.gpu_gib
    problems: dict[object, list[str]] = {}  # the same processes on several GPUs are named once
    for (host, gpu), together in by_gpu.items():
        size = gpu_gib * GIB if gpu_gib else sizes.get(gpu) if host == HERE else None
        alike = (size, *(use.process for use in together))
        problems.setdefault(alike, [*_conflicts(config, _named(host, gpu), together, size)])
    if lines := [line for found_here in problems.values() for line in found_here]:
        raise ConfigError("\n".join(lines))
    return [f"computed: {use.line}" for use in gpu_uses]


def _conflicts(config: RunConfig, gpu: str, together: list[Use], size: float | None) -> Iterator[str]:
    allowed = config.run.share_gpus or all(use.unloads for use in together)
    if len(together) > 1 and not allowed:
        yield (
            f"{gpu} is used by {' and '.join(f'{use.process} ({use.key})' for use in together)}: give each "
            "GPUs of its own in these keys, or set run.share_gpus = true if the sum fits"
        )
    if size is None:
        return
    for use in together:
        if use.share and use.bytes > use.share * size:
            yield (
                f"{use.line}, {_gib(use.share * size)} of {_gib(size)}: raise tensor-parallel-size or "
                "gpu-memory-utilization, or lower max-model-len, in its engine_args"
            )
    unloading = sorted((_taken(use, size) for use in together if use.unloads), reverse=True)
    loaded = unloading[: config.run.max_loaded_teachers]
    taken = sum(_taken(use, size) for use in together if not use.unloads) + sum(loaded)
    if taken > size:
        parts = "; ".join(f"{use.process} {_gib(_taken(use, size))}" for use in together)
        largest = max(together, key=lambda use: use.bytes)
        yield (
            f"{gpu} has {_gib(size)}, and {_gib(taken)} are needed ({parts}; {largest.line}): name more "
            "GPUs, or take less (gpu-memory-utilization; trainer.ranks, micro_batch_tokens, or "
            "offload_optimizer in trainer.deepspeed)"
        )


def _named(host: str, gpus: str) -> str:
    return f"GPU {gpus}" if host == HERE else f"GPU {gpus} of {host}"


def _taken(use: Use, size: float) -> float:
    return use.share * size if use.share else use.bytes


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


# --- GPUs of this machine


def gpus() -> dict[str, float | None]:
    """Index → bytes of memory, of every GPU that nvidia-smi lists; empty: no nvidia-smi, or no GPU.

    None: it does not know the size, as of a GPU that shares the host's memory.
    """
    rows = (line.split(",") for line in _listed("index,memory.total") if line.count(",") == 1)
    sizes = ((index.strip(), mib.strip()) for index, mib in rows)
    return {index: float(mib) * (1 << 20) if mib.isdecimal() else None for index, mib in sizes}


def gpu_names() -> set[str]:
    """The kinds of GPU that nvidia-smi lists, such as "NVIDIA H100 80GB HBM3"."""
    return {line.strip() for line in _listed("name") if line.strip()}


def _listed(fields: str) -> list[str]:
    """A line for each GPU; empty: no nvidia-smi, or no GPU. Raises ConfigError when it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"nvidia-smi has not answered within {SMI_SECONDS:g} s: look into dmesg, and restart the machine "
            "when the driver hangs"
        ) from None
    return done.stdout.splitlines()


def visible(sizes: Iterable[str]) -> list[str]:
    """The GPUs that a process without `devices` inherits; none beside the CPU build of vLLM and torch."""
    if installed_for_cpu():
        return []
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*sizes] if inherited is None else named(inherited)


def named(devices: str) -> list[str]:
    """The GPUs of a CUDA_VISIBLE_DEVICES."""
    return [name.strip() for name in devices.split(",") if name.strip()]


# --- who uses them


def uses(config: RunConfig, inherited: Sequence[str], where: Where | None = None) -> Iterator[Use]:
    """Every process with GPUs; `inherited`: those of a process on this machine without `devices`.

    `where`: as for `check_devices`.
    """
    student = config.student
    for process, host, names in _places("student", student, student.replicas, inherited, where):
        length = student_limit(config)
        terms, share, used = engine_memory(student, student.dtype, student.flags(), length, names)
        yield Use(process, "student.devices", host, used, terms, share)
    for name, teacher in config.teachers.items():
        if (teacher.urls or where is not None) and not _readable(teacher):
            log.warning("memory of teacher %s is not computed: its path is not readable here", name)
            continue
        label = f"teacher-{name}"
        here = [] if teacher.device == "cpu" else inherited
        places = _places(label, teacher, teacher.replicas, here, where)
        for process, host, names in places:
            if runs_vllm(teacher):
                flags = {key.replace("_", "-"): value for key, value in teacher.engine_args.items()}
                length = teacher.max_length or int(text_config(teacher).max_position_embeddings)
                terms, share, used = engine_memory(teacher, teacher.dtype, flags, length, names)
                yield Use(process, f"teachers.{name}.devices", host, used, terms, share)
            elif teacher.engine_url is None:
                idle = teacher.idle_unload_seconds is not None
                terms = _forward(teacher, len(names))
                yield Use(process, f"teachers.{name}.devices", host, tuple(names), terms, unloads=idle)
    evaluation = config.evaluation
    if evaluation is not None and evaluation.device != "cpu":
        for process, host, names in _places("evaluator", evaluation.placement, 1, inherited, where):
            terms = {"student in float32": 4.0 * count_parameters(student), "work space": float(WORKSPACE)}
            yield Use(process, "evaluation.placement.devices", host, tuple(names[:1]), terms)
    if evaluation is not None and evaluation.replica is not None:
        for process, host, names in _places("evaluation-replica", evaluation.replica, 1, inherited, where):
            terms, share, used = engine_memory(
                student, student.dtype, student.flags(), student_limit(config), names
            )
            yield Use(process, "evaluation.replica.devices", host, used, terms, share)
    trainer = config.trainer
    elsewhere = config.controller.trainer == "external" or trainer.hostfile is not None or trainer.nodes > 1
    host = EACH_NODE if elsewhere else HERE
    if where is not None:
        host, names = _there("trainer", where)
    elif trainer.devices is not None:
        names = named(trainer.devices)
    elif elsewhere:
        names = [str(rank) for rank in range(trainer.ranks)] if config.preflight.gpu_gib else []
    else:
        names = [*inherited]
    if names:
        yield Use("trainer", "trainer.devices", host, tuple(names[: trainer.ranks]), _rank(config))


def _readable(source: ModelSource) -> bool:
    try:
        text_config(source)
    except ConfigError:
        return False
    return True


def _places(
    label: str, place: Placement, replicas: int, inherited: Sequence[str], where: Where | None
) -> Iterator[tuple[str, str, list[str]]]:
    """(name, host, GPUs) of each process that has any; of those elsewhere, only what `devices` names."""
    hosts = [str(urlsplit(url).hostname) for url in place.urls] or [HERE] * replicas
    for index, host in enumerate(hosts):
        process = label if len(hosts) == 1 and label != "student" else f"{label}-{index}"
        devices = place.devices[index % len(place.devices)] if place.devices else None
        names = named(devices) if devices is not None else [*inherited] if host == HERE else []
        if where is not None and host == HERE:
            host, names = _there(process, where)
        if names:
            yield process, host, names


def _there(process: str, where: Where) -> tuple[str, list[str]]:
    host, names = where.get(process, (HERE, ()))
    return host, [*names]


# --- what is in their memory


def engine_memory(
    source: ModelSource, dtype: str, flags: Mapping[str, Any], length: int, names: list[str]
) -> tuple[dict[str, float], float, tuple[str, ...]]:
    """(terms, share, GPUs) of a vLLM engine. Raises ConfigError when it has fewer GPUs than it needs."""
    tensor, pipeline = (int(flags.get(f"{kind}-parallel-size", 1)) for kind in ("tensor", "pipeline"))
    if tensor * pipeline > len(names):
        raise ConfigError(
            f"{source.path}: tensor-parallel-size {tensor} x pipeline-parallel-size {pipeline} need "
            f"{tensor * pipeline} GPUs, and devices names {','.join(names)}: name as many"
        )
    model = text_config(source)
    terms = {
        "weights": weight_bytes(source, dtype) / (tensor * pipeline),
        f"KV cache of {length:,} tokens": length * kv_bytes(model, tensor) / pipeline,
        "work space": float(WORKSPACE),
    }
    return terms, float(flags.get("gpu-memory-utilization", VLLM_SHARE)), tuple(names[: tensor * pipeline])


def kv_bytes(model: Any, tensor: int = 1) -> float:
    """Bytes of KV cache per token, in 16 bits, on each of `tensor` GPUs; `model`: its transformers config."""
    layers = int(model.num_hidden_layers)
    if rank := getattr(model, "kv_lora_rank", None):  # latent attention is not split
        return 2.0 * layers * (rank + model.qk_rope_head_dim)
    heads = int(getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return 2.0 * 2 * layers * max(1, heads // tensor) * width


def _inner(model: Any) -> int:
    """Width of the feed-forward layer that a token goes through."""
    experts = getattr(model, "num_experts_per_tok", None) or 0
    routed = experts * (getattr(model, "moe_intermediate_size", None) or model.intermediate_size)
    return int(routed or model.intermediate_size)


def _forward(teacher: TeacherConfig, gpu_count: int) -> dict[str, float]:
    model = text_config(teacher)
    item = item_bytes(model, teacher.dtype)
    return {
        "weights": weight_bytes(teacher, teacher.dtype) / gpu_count,
        f"pass of {teacher.batch_tokens:,} tokens": item
        * teacher.batch_tokens
        * (6.0 * model.hidden_size + 3 * _inner(model)),
        "logits": 8.0 * teacher.head_chunk * model.vocab_size,
    }


def _rank(config: RunConfig) -> dict[str, float]:
    """A trainer rank: ZeRO-3 over the ranks of all hosts."""
    trainer, json = config.trainer, deepspeed_config(config.trainer)
    zero, half = json["zero_optimization"], in_bf16(json)
    parameters, model = count_parameters(config.student), text_config(config.student)
    item = 2 if half else 4
    accumulated = {"fp32": 4}.get(json.get("data_types", {}).get("grad_accum_dtype"), item)
    on_gpu = {name: not offloads(json, name) for name in ("param", "optimizer")}
    trained = parameters if trainer.lora is None else 0
    ranks = trainer.ranks * machines(trainer)
    width, inner, layers = model.hidden_size, _inner(model), model.num_hidden_layers
    layer = 16.0 * width + 4 * inner  # numbers that a layer keeps of a token for its backward pass
    kept = layers * width + layer if trainer.activation_checkpointing else layers * layer
    teachers = config.teachers.values() if needs(config.objective).hidden else []
    heads = [text_config(teacher) for teacher in teachers if _readable(teacher)]
    terms = {"heads of teachers": 2.0 * sum(head.vocab_size * head.hidden_size for head in heads)}
    return {
        "weights": on_gpu["param"] * item * parameters / ranks,
        "gradients": on_gpu["optimizer"] * accumulated * trained / ranks,
        "optimizer": on_gpu["optimizer"] * (12 if half else 8) * trained / ranks,
        "gathered": item * _gathered(parameters, model, zero, trainer.expert_parallel),
        f"activations of {trainer.micro_batch_tokens:,} tokens": item * trainer.micro_batch_tokens * kept,
        "logits": 12.0 * trainer.head_chunk * model.vocab_size,
        **(terms if heads else {}),
    }


def _gathered(parameters: float, model: Any, zero: Mapping[str, Any], shared: int) -> float:
    """Most parameters that a rank has whole at a time: what DeepSpeed allows, and at least the experts of a
    layer that it runs, of which `shared` ranks have a part each."""
    experts = expert_parameters(model) / shared
    whole = parameters - (shared - 1) * layers_of_experts(model) * experts
    return min(whole, max(float(zero.get("stage3_max_live_parameters", 1e9)), experts))
