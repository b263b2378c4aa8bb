"""What a device can do at most, and the share of it that is assumed to be reached."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any, Final

from sync.base.errors import ConfigError
from sync.base.memory import CGROUP


@dataclass(frozen=True)
class Device:
    """One GPU, or one core of a CPU."""

    name: str
    flops: float
    """Peak of dense bf16 matrix products, FLOP/s."""
    bandwidth: float
    """Peak of its memory, bytes/s."""
    gib: float
    """Memory that nvidia-smi reports, GiB; 0: not compared."""
    sequences: int
    """vLLM 0.32's default of max-num-seqs on it (`vllm.engine.arg_utils`)."""
    compute_share: float = 0.4
    """Of `flops`, reached by prefill, scoring and training. Assumed. Llama 3 was trained at 0.38 to 0.43 on
    H100 (arXiv 2407.21783, table 4); short sequences and small models reach less."""
    bandwidth_share: float = 0.6
    """Of `bandwidth`, reached by decoding. Assumed."""
    single: float | None = None
    """FLOP/s that float32 weights reach; None: as many as 16 bits (a GPU's tensor cores round them)."""

    @property
    def gain(self) -> float:
        """How many times as fast weights of 16 bits are computed as float32 ones; 1: it hardly matters."""
        ratio = self.flops_per_second(2) / self.flops_per_second(4)
        return ratio if max(ratio, 1 / ratio) >= NOTABLE else 1.0

    def flops_per_second(self, item: int) -> float:
        """FLOP/s reached with weights of `item` bytes."""
        return self.single if self.single and item == 4 else self.flops * self.compute_share


CPU: Final = "cpu"
NOTABLE: Final = 1.2
"""Times the other precision's speed from which the faster one is named."""
PRODUCTS, BETWEEN = 0.8, 54.0
"""Of a core: the share of a bare product's speed that a model's products reach, and FLOPs of a model per byte
that memory moves for what lies between its products. Fitted to 7.0 s of processor time for a step of 113 M
parameters in bf16 and 2.8 s for its scores (docs/benchmarks.md) on AVX-512, where bare products reach 487
GFLOP/s and memory 36 GB/s; other kinds of processors were not measured."""
DEVICES: Final = {
    device.name: device
    for device in (
        # NVIDIA H200 data sheet, SXM: 1,979 TFLOP/s with sparsity, half of it without; 4.8 TB/s, 141 GB
        Device("h200", 989e12, 4.8e12, 140.4, 1024),
        # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s with sparsity; 3.35 TB/s, 80 GB
        Device("h100", 989e12, 3.35e12, 79.6, 1024),
        # NVIDIA A100 data sheet, SXM 80 GB: 312 TFLOP/s; 2,039 GB/s
        Device("a100", 312e12, 2.039e12, 80.0, 256),
        # NVIDIA L4 data sheet: 242 TFLOP/s with sparsity; 300 GB/s, 24 GB
        Device("l4", 121e12, 0.3e12, 22.5, 256),
        # NVIDIA Ada architecture white paper, RTX 4090: 165.2 TFLOP/s with float32 sums; 1,008 GB/s, 24 GB
        Device("rtx4090", 165e12, 1.008e12, 24.0, 256),
    )
}


def cores() -> int:
    """Cores that the processes of this machine, or of the container this one is in, may use."""
    here = len(os.sched_getaffinity(0))
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):  # the root of all groups, or version 1
        return here
    return here if quota == "max" else max(1, min(here, int(quota) // int(period)))


@cache
def core() -> Device:
    """One core of this machine, from its products and reads, which are timed. Imports torch.

    A model's products take FLOPs / (PRODUCTS x a bare product's speed), and what lies between them takes
    FLOPs / (BETWEEN x bytes/s), by which AMX helps a model less than its products.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        large, column = torch.zeros(4096, 8192), torch.zeros(8192)  # beyond the caches
        bandwidth = large.nbytes / _seconds(torch.mv, large, column)
        speed = {}
        for dtype in (torch.bfloat16, torch.float32):
            factor = torch.ones(512, 512, dtype=dtype)
            layer, data_grad, weight_grad = (factor, factor.t()), (factor, factor), (factor.t(), factor)
            pairs = (layer, data_grad, weight_grad)  # without AVX-512 bf16 is 15 times slower in one of them
            speed[dtype] = 2 * 512**3 / mean(_seconds(torch.mm, *pair) for pair in pairs)
    finally:
        torch.set_num_threads(threads)
    reached = {
        dtype: 1 / (1 / (PRODUCTS * bare) + 1 / (BETWEEN * bandwidth)) for dtype, bare in speed.items()
    }
    flops = speed[torch.bfloat16]
    share = reached[torch.bfloat16] / flops
    return Device(CPU, flops, bandwidth, 0.0, 128, share, 0.5, single=reached[torch.float32])


def _seconds(product: Callable[..., Any], *factors: Any) -> float:
    """Of this thread's time, the least of ten tries after one to warm up: of one, if that took a second."""
    tries = list[float]()
    while len(tries) < 11 and (len(tries) < 2 or sum(tries) < 1.0):
        before = time.thread_time()
        product(*factors)
        tries.append(time.thread_time() - before)
    return min(tries[1:])


def device_named(name: str) -> Device:
    """The row of `name`, of a CPU this machine's. Raises ConfigError for a device without one."""
    if name == CPU:
        return core()
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known: choose one of {', '.join((*DEVICES, CPU))}")
    return DEVICES[name]


def of_names(names: Collection[str]) -> Device:
    """The row of the one kind that nvidia-smi names. PCIe cards, which are slower, have none."""
    squeezed = " ".join(names).lower().replace("rtx ", "rtx")
    keys = [key for key in DEVICES if re.search(rf"\b{key}\b", squeezed) and "pcie" not in squeezed]
    if len(names) == 1 and keys:
        return DEVICES[keys[0]]
    raise ConfigError(
        f"this machine's GPUs are {', '.join(sorted(names))}, and a plan needs one kind with known speeds: "
        f"name the nearest with --device ({', '.join((*DEVICES, CPU))})"
    )
