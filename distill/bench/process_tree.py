"""Which processes play the roles of a run, as seen from outside by the launcher's process id."""

from __future__ import annotations

import psutil

from distill.launch.guardian import guarded_role
from distill.launch.roles import TRAINER
from student_trainer.launch import ranks_of

DEEPSPEED, ENGINE_OF = "deepspeed launcher", "engine of "


def role_processes(launcher: int) -> dict[str, list[psutil.Process]]:
    """Role → the processes that do its work, the server or the trainer's ranks; only roles that have one."""
    found = {}
    for guardian in _children(launcher):
        name = guarded_role(guardian)
        if name is not None:
            working = ranks_of(guardian.pid) if name == TRAINER else _children(guardian.pid)
            found[name] = [process for process in working if lives(process)]
    return {name: processes for name, processes in found.items() if processes}


def helpers(launcher: int) -> dict[str, list[psutil.Process]]:
    """Name → processes that play no role and without which one is not played: the deepspeed launcher's, and
    "engine of ROLE" where vLLM's engine has a process of its own; only those that are there."""
    found: dict[str, list[psutil.Process]] = {}
    for guardian in _children(launcher):
        role, below = guarded_role(guardian), descendants(guardian.pid)
        if role == TRAINER:
            ranks = set(ranks_of(guardian.pid))
            found[DEEPSPEED] = [process for process in below - ranks if lives(process)]
        elif role is not None:
            found[ENGINE_OF + role] = [process for process in below if _is_engine(process)]
    return {name: processes for name, processes in found.items() if processes}


def descendants(launcher: int) -> set[psutil.Process]:
    """Every process below the launcher."""
    try:
        return set(psutil.Process(launcher).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def lives(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor waiting to be collected."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _children(parent: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(parent).children())
    except psutil.NoSuchProcess:
        return []


def _is_engine(process: psutil.Process) -> bool:
    try:
        return any("EngineCore" in word for word in process.cmdline())
    except psutil.Error:
        return False
