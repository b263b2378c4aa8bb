"""A process that computes rewards, one completion at a time; `reward_pool` starts and kills it.

    python -m distill.prompts.reward_worker

Frames on stdin and stdout: 4 bytes of length, little-endian, then the body. In: a PromptsConfig as JSON, then
lists of Tasks. Out: an Outcome for the loading of the function, then one for each Task. What user code prints
goes to stderr. What user code forks has no part in the frames. A guardian ends the process with its pool.
"""

from __future__ import annotations

import os
import signal
from typing import BinaryIO

import msgspec
from pydantic import TypeAdapter

from distill.config.prompts import PromptsConfig
from distill.prompts.rewards import Completion, load_rewards
from distill.prompts.stream import Prompt
from sync.base.decoding import msgpack_decoder
from sync.base.errors import DistillError
from sync.base.secrets import redact_process


class Task(msgspec.Struct, frozen=True):
    """One completion. Pool → worker."""

    prompt: Prompt
    completion: Completion


class Outcome(msgspec.Struct, frozen=True):
    """Worker → pool."""

    value: float = 0.0
    answer: str | None = None
    error: str | None = None
    """Why there is no reward; None: there is one."""


def framed(body: bytes) -> bytes:
    """One frame."""
    return len(body).to_bytes(4, "little") + body


def send(file: BinaryIO, body: bytes) -> None:
    """Write one frame. Raises OSError when the other side is gone."""
    file.write(framed(body))
    file.flush()


def receive(file: BinaryIO) -> bytes | None:
    """Read one frame; None: the other side is gone."""
    length = file.read(4)
    body = file.read(int.from_bytes(length, "little")) if len(length) == 4 else b""
    return body if len(length) == 4 and len(body) == int.from_bytes(length, "little") else None


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redact_process()
    tasks, outcomes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for file in (tasks, outcomes):  # or a fork would hold the pipes open after this process
        os.register_at_fork(after_in_child=file.raw.close)
    encoder, decoder = msgspec.msgpack.Encoder(), msgpack_decoder(list[Task])
    source = receive(tasks)
    if source is None:
        return
    try:
        reward_fn = load_rewards(TypeAdapter(PromptsConfig).validate_json(source))
    except DistillError as error:
        send(outcomes, encoder.encode(Outcome(error=str(error))))
        return
    send(outcomes, encoder.encode(Outcome()))
    while (body := receive(tasks)) is not None:
        for task in decoder.decode(body):
            try:
                reward = reward_fn(task.prompt, task.completion)
            except DistillError as error:
                outcome = Outcome(error=str(error))
            else:
                outcome = Outcome(reward.value, reward.answer)
            send(outcomes, encoder.encode(outcome))


if __name__ == "__main__":
    main()
