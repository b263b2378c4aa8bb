"""What a device can do at most, and the share of it that a plan assumes to be reached."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from distill.preflight_checks.devices import gpu_names
from sync.base.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One GPU, or one core of a CPU."""

    name: str
    flops: float
    """Peak of dense bf16 matrix products (CPU: float32), FLOP/s."""
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

    @property
    def flops_per_second(self) -> float:
        return self.flops * self.compute_share

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth * self.bandwidth_share


CPU: Final = "cpu"
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
        # one core at 3 GHz: two AVX2 FMA of 8 float32 per cycle; 10 GB/s, a common share of a server's memory
        Device(CPU, 96e9, 10e9, 0.0, 128, 0.3, 0.5),
    )
}


def device_named(name: str) -> Device:
    """The row of `name`. Raises ConfigError for a device without one."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is not known: choose one of {', '.join(DEVICES)}")
    return DEVICES[name]


def device_here() -> Device | None:
    """The row of this machine's GPUs; None: it has none. Raises ConfigError for GPUs without a row."""
    names = gpu_names()
    return of_names(names) if names else None


def of_names(names: Collection[str]) -> Device:
    """The row of the one kind that nvidia-smi names. PCIe cards, which are slower, have none."""
    squeezed = " ".join(names).lower().replace("rtx ", "rtx")
    keys = [key for key in DEVICES if re.search(rf"\b{key}\b", squeezed) and "pcie" not in squeezed]
    if len(names) == 1 and keys:
        return DEVICES[keys[0]]
    raise ConfigError(
        f"this machine's GPUs are {', '.join(sorted(names))}, and a plan needs one kind with known speeds: "
        f"name the nearest with --device ({', '.join(DEVICES)})"
    )
