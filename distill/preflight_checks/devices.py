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

from distill.config import RunConfig, flags_of
from distill.model_facts import (
    count_parameters,
    expert_parameters,
    inner_width,
    item_bytes,
    kv_bytes,
    layers_of_experts,
    weight_bytes,
)
from distill.preflight_checks.machine import GIB, installed_for_cpu
from distill.prompts.sources import positions, student_limit, text_config
from distill.topology import EACH_NODE, HERE, TRAINER, Process, named, parallel, processes
from student_trainer.deepspeed_json import deepspeed_config, in_bf16, offloads
from student_trainer.launch import machines
from student_trainer.objectives.config import needs
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.wire.peers import Role
from teacher_service.config import TeacherConfig

log = logging.getLogger(__name__)
WORKSPACE: Final = 2 * GIB
"""Activations of a vLLM engine, its CUDA graphs and buffers."""
LOGIT_BYTES: Final = {"jsd": 60.0, "skew": 48.0}
"""Of one logit of a chunk, with gradients; of other objectives over whole distributions 28, else 20. Peaks of
the tensors of `student_trainer.head` by torch's profiler, on a CPU with blocks as large as chunks."""
SMI_SECONDS: Final = 60.0
"""For nvidia-smi to answer in; seconds where the driver is not loaded yet."""
VLLM_SHARE: Final = 0.92
"""vLLM's default of gpu-memory-utilization."""


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
    """What is in the memory of each of its GPUs → bytes; empty: not known, as of an environment."""
    share: float = 0.0
    """Share of each GPU's memory that vLLM reserves; 0: it takes what it needs."""
    unloads: bool = False
    """It leaves its GPU to others of this kind when it is idle."""

    @property
    def bytes(self) -> float:
        return sum(self.terms.values())

    @property
    def parts(self) -> tuple[str, str]:
        """The sum in GiB, in words, and what vLLM reserves."""
        share = f", in the {self.share:g} that vLLM reserves" if self.share else ""
        return " + ".join(f"{what} {size / GIB:.1f}" for what, size in self.terms.items()), share

    @property
    def line(self) -> str:
        parts, share = self.parts
        place = _named(self.host, ",".join(self.gpus))
        return f"{self.process} on {place}: {parts} = {_gib(self.bytes)}{share}"


def check_devices(config: RunConfig, placed: Iterable[Process] | None = None) -> list[str]:
    """A line for every process on GPUs. Raises ConfigError for a GPU with two of them or too little memory.

    `placed`: the processes where `placement.placed` puts them; None: all that have no URL are here. On a
    machine without GPUs only what `devices` names is computed. The sizes are those of nvidia-smi, of other
    machines those of preflight.gpu_gib; a GPU whose size is unknown is not compared with the sum.
    """
    sizes = gpus()
    gpu_uses = list(uses(config, visible(sizes), placed))
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
    return [f"computed: {use.line}" for use in gpu_uses if use.terms]


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
        parts = "; ".join(f"{use.process} {_gib(_taken(use, size))}" for use in together if use.terms)
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
    return [*sizes] if inherited is None else [*named(inherited)]


# --- who uses them


def uses(
    config: RunConfig, inherited: Sequence[str], placed: Iterable[Process] | None = None
) -> Iterator[Use]:
    """Every process that computes on GPUs; `inherited`: those of a process on this machine without `devices`.
    `placed`: as for `check_devices`."""
    for process in processes(config) if placed is None else placed:
        names: Sequence[str] = process.devices or ()
        if process.devices is None and process.host == HERE and process.gpus:
            names = inherited
        elif process.devices is None and process.host == EACH_NODE and config.preflight.gpu_gib:
            names = [str(rank) for rank in range(process.gpus)]
        if not names:
            continue
        teacher, idle = process.place, False
        if isinstance(teacher, TeacherConfig):
            idle = teacher.kind.computes == "layers" and teacher.idle_unload_seconds is not None
            if process.host != HERE and not _readable(teacher):
                if process.index == 0:
                    subject = process.subject
                    log.warning(
                        "memory of teacher %s is not computed: its path is not readable here", subject
                    )
                continue
        if (memory := _memory(config, process, tuple(names))) is not None:
            terms, share, used = memory
            yield Use(process.name, f"{process.section}.devices", process.host, used, terms, share, idle)


def _memory(
    config: RunConfig, process: Process, names: tuple[str, ...]
) -> tuple[dict[str, float], float, tuple[str, ...]] | None:
    """(terms, share, GPUs) of a process that has `names`; None: it computes nothing there."""
    student = config.student
    teacher, role = process.place, process.role
    if process.section == TRAINER:
        return _rank(config), 0.0, names[: config.trainer.ranks]
    if role == Role.STUDENT:
        return engine_memory(student, student.dtype, student.engine_args, student_limit(config), names)
    if role == Role.EVALUATOR:
        terms = {"student in float32": 4.0 * count_parameters(student), "work space": float(WORKSPACE)}
        on_cpu = config.evaluation is None or config.evaluation.device == "cpu"
        return None if on_cpu else (terms, 0.0, names[:1])
    if not isinstance(teacher, TeacherConfig):
        return {}, 0.0, names
    if teacher.engine_url is not None:
        return None
    match teacher.kind.computes:  # each way of an engine has its memory: mypy misses one that has none
        case "vllm":
            length = teacher.max_length or positions(teacher, f"{process.section}.max_length")
            return engine_memory(teacher, teacher.dtype, teacher.engine_args, length, names)
        case "layers" | "own":
            return _forward(teacher, len(names)), 0.0, names


def _readable(source: ModelSource) -> bool:
    try:
        text_config(source)
    except ConfigError:
        return False
    return True


# --- what is in their memory


def engine_memory(
    source: ModelSource, dtype: str, arguments: Mapping[str, Any], length: int, names: Sequence[str]
) -> tuple[dict[str, float], float, tuple[str, ...]]:
    """(terms, share, GPUs) of a vLLM engine. Raises ConfigError when it has fewer GPUs than it needs."""
    tensor, pipeline = parallel(arguments)
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
    share = float(flags_of(arguments).get("gpu-memory-utilization", VLLM_SHARE))
    return terms, share, tuple(names[: tensor * pipeline])


def _forward(teacher: TeacherConfig, gpu_count: int) -> dict[str, float]:
    model = text_config(teacher)
    item = item_bytes(model, teacher.dtype)
    return {
        "weights": weight_bytes(teacher, teacher.dtype) / gpu_count,
        f"pass of {teacher.batch_tokens:,} tokens": item
        * teacher.batch_tokens
        * (6.0 * model.hidden_size + 3 * inner_width(model)),
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
    width, inner, layers = model.hidden_size, inner_width(model), model.num_hidden_layers
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
        "logits": LOGIT_BYTES.get(config.objective.type, 28.0 if heads else 20.0)
        * trainer.head_chunk
        * model.vocab_size,
        **(terms if heads else {}),
    }


def _gathered(parameters: float, model: Any, zero: Mapping[str, Any], shared: int) -> float:
    """Most parameters that a rank has whole at a time: what DeepSpeed allows, and at least the experts of a
    layer that it runs, of which `shared` ranks have a part each."""
    experts = expert_parameters(model) / shared
    whole = parameters - (shared - 1) * layers_of_experts(model) * experts
    return min(whole, max(float(zero.get("stage3_max_live_parameters", 1e9)), experts))
