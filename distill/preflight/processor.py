"""What vLLM's CPU build needs of this machine's processor."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Final

from distill.config import RunConfig
from distill.launch.student import runs_on_cpu
from sync.errors import ConfigError
from teacher_service.config import TeacherConfig

NEEDED: Final = ("avx2", "fma", "f16c")
"""What the oldest of its three builds (AVX2, AVX-512, AVX-512 with bf16) is compiled for."""


def check_processors(config: RunConfig) -> None:
    """`check_processor` for every role that is to run vLLM on this machine."""
    if not config.student.urls:
        check_processor("student")
    for name, teacher in config.teachers.items():
        if not teacher.urls:
            check_teacher(teacher, name)


def check_teacher(teacher: TeacherConfig, name: str) -> None:
    """`check_processor` for a teacher that has vLLM in its process."""
    if teacher.engine == "vllm" and teacher.engine_url is None:
        check_processor(f"teachers.{name}")


def check_processor(role: str) -> None:
    """Raise ConfigError when this machine's processor lacks what the vLLM that is installed here needs."""
    if platform.machine() != "x86_64" or not runs_on_cpu():
        return
    if missing := lacking(cpuinfo()):
        raise ConfigError(
            f"this processor lacks {', '.join(missing)}, and the CPU build of vLLM, which {role} runs, needs "
            f"{', '.join(NEEDED)}: run it on another machine and give its address in {role}.urls"
        )


def cpuinfo() -> str:
    """What the kernel says about the processor."""
    return Path("/proc/cpuinfo").read_text()


def lacking(text: str) -> list[str]:
    """Those of NEEDED that the flags of a /proc/cpuinfo do not have."""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return [name for name in NEEDED if name not in (flags[1].split() if flags else ())]
