"""Ranks and a full disk: all wait for the one that has no room, and no collective is left half-way."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum
from typing import Any

import torch
from safetensors import SafetensorError

from student_trainer.ranks import Ranks
from sync.durable import RETRY_SECONDS, is_full

log = logging.getLogger(__name__)


class Vote(IntEnum):
    """What a rank brings; the highest counts for all."""

    DONE = 0
    FULL = 1
    GIVE_UP = 2


def all_done(
    ranks: Ranks,
    what: str,
    work: Callable[[], None],
    give_up: Callable[[], bool] = lambda: False,
    pause: float = RETRY_SECONDS,
) -> bool:
    """Do `work` on every rank again and again until no rank meets a full disk; the message comes once.

    `work` may be collective only if a full disk makes it raise behind its last collective. False: `give_up`
    said so, on any rank, while the disk was full. Other errors are raised. Collective.
    """
    waiting = False
    while True:
        problem = _attempt(work)
        own = Vote.DONE if problem is None else Vote.GIVE_UP if give_up() else Vote.FULL
        vote = Vote(int(ranks.highest(own)))
        if vote is Vote.DONE:
            if waiting:
                log.warning("there is room again for %s, training goes on", what)
            return True
        if vote is Vote.GIVE_UP:
            log.error("disk full: %s is left out, for the run was asked to stop", what)
            return False
        if not waiting:
            log.error("disk full: %s waits for room, training pauses (%s)", what, problem or "another rank")
        waiting = True
        time.sleep(pause)


def _attempt(work: Callable[[], None]) -> Exception | None:
    """The full disk that `work` met; None: it is done."""
    try:
        work()
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if not is_full(error):
            raise
        return error
    return None


Noted = Callable[[], AbstractContextManager[None]]


@contextmanager
def full_disk_later(engine: Any) -> Iterator[Noted]:
    """Let DeepSpeed go through all its collectives though its files find no room; OSError at the end.

    Inside what it yields, a full disk is noted and nothing raised.
    """
    met: list[BaseException] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            # on a full disk a folder may be missing that could not be made
            if not is_full(error) and not isinstance(error, FileNotFoundError):
                raise
            met.append(error)

    def save(state_dict: Any, path: str) -> None:
        with noted(), open(path, "wb") as file:  # given a path, torch does not tell a full disk
            torch.save(state_dict, file)

    writer = engine.checkpoint_engine
    with ExitStack() as stack:
        stack.enter_context(_replaced(writer, "save", save))
        for owner, name in ((writer, "makedirs"), (engine, "_copy_recovery_script")):
            stack.enter_context(_replaced(owner, name, _guarded(getattr(owner, name), noted)))
        yield noted
    if met:
        raise OSError(errno.ENOSPC, str(met[0])) from met[0]


def _guarded(call: Callable[..., Any], noted: Noted) -> Callable[..., None]:
    def guarded(*arguments: Any, **named: Any) -> None:
        with noted():
            call(*arguments, **named)

    return guarded


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while, hiding the method of its class."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
