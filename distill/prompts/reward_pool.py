"""A pool of reward workers: rewards without user code in this process, each within a time limit.

    idle ──task──▶ busy ──outcome──▶ idle
                    └──time limit, or its process died──▶ killed; the next task starts another

A worker that died by itself, by whatever hand, is replaced and its completion tried once more; one that
exceeded the limit costs its completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Final, cast

import msgspec
import numpy as np

from distill.config import PromptsConfig
from distill.prompts.reward_worker import Outcome, Task, receive, send
from distill.prompts.rewards import Reward, RewardSource
from distill.prompts.stream import Prompt
from sync.errors import ConfigError, DataError, how_it_ended

START_SECONDS: Final = 120.0
"""Until a worker has loaded its function."""
EXIT_SECONDS: Final = 5.0
"""Until a worker that has closed its pipe has ended."""
MOST_WORKERS: Final = min(4, os.cpu_count() or 1)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outcome)


class _Died(Exception):
    """The worker's process has ended; the text says how."""


class _Worker:
    """One process; used by one thread at a time."""

    def __init__(self, prompts: PromptsConfig) -> None:
        """Raises ConfigError when the function cannot be loaded, _Died or TimeoutError when it never is."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "distill.prompts.reward_worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._tasks, self._outcomes = (
            cast(BinaryIO, self._process.stdin),
            cast(BinaryIO, self._process.stdout),
        )
        self._expired = False
        loaded = self.ask(prompts.model_dump_json().encode(), START_SECONDS)
        if loaded.error is not None:
            self.close()
            raise ConfigError(loaded.error)

    def ask(self, body: bytes, seconds: float) -> Outcome:
        """One frame and its outcome. Raises TimeoutError or _Died; the worker is of no use then."""
        timer = threading.Timer(seconds, self._expire)
        timer.start()
        try:
            send(self._tasks, body)
            found = receive(self._outcomes)
        except OSError:
            found = None
        finally:
            timer.cancel()
        if found is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
            self.close()
            if self._expired:
                raise TimeoutError
            raise _Died(how_it_ended(self._process.returncode))
        return _decoder.decode(found)

    def _expire(self) -> None:
        self._expired = True
        self.kill()

    def kill(self) -> None:
        """End the process from any thread, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """End the process; by the thread that uses it."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what could not be written is of no use
            self._tasks.close()
        self._outcomes.close()


class RewardPool:
    """Rewards by the workers of one `source`; `reward` at any time from one event loop, `close` once.

    Completions are decoded here, in threads, so that no worker needs a tokenizer.

    At most `MOST_WORKERS` processes; the first starts with the first completion.
    """

    def __init__(self, source: RewardSource) -> None:
        self._source, self._seconds = source, source.prompts.reward_timeout_seconds
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(MOST_WORKERS, "rewards")
        self._workers: set[_Worker] = set()
        self._closed = False

    async def reward(self, prompt: Prompt, token_ids: Sequence[int] | np.ndarray) -> Reward:
        """Reward of a completion. Raises DataError when its function fails or takes too long."""
        ids = np.asarray(token_ids).tolist()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, prompt, ids)

    def check(self, prompt: Prompt) -> None:
        """Try the function on an empty completion. Raises ConfigError when it fails."""
        try:
            self._compute(prompt, [])
        except DataError as error:
            raise ConfigError(f"{error} (tried with a completion of no tokens)") from error
        finally:
            self.close()

    def close(self) -> None:
        """Kill the workers; what they work on fails."""
        self._closed = True
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _compute(self, prompt: Prompt, ids: list[int]) -> Reward:
        decode = self._source.decode
        task = _encoder.encode(Task(prompt, ids if decode is None else decode(ids)))
        about = f"prompt {prompt.id}, completion of {len(ids)} tokens"
        died = ""
        while not self._closed:
            worker = self._take()
            try:
                outcome = worker.ask(task, self._seconds)
            except TimeoutError:
                self._workers.discard(worker)
                raise DataError(
                    f"the reward function took more than {self._seconds:g} s for {about} and was killed: "
                    "make it faster, or raise reward_timeout_seconds"
                ) from None
            except _Died as error:
                self._workers.discard(worker)
                if died:
                    break
                died = str(error)
                continue
            self._idle.put(worker)
            if outcome.error is not None:
                raise DataError(outcome.error)
            return Reward(outcome.value, outcome.answer)
        raise DataError(f"the process of the reward function {died or 'was stopped'}, twice, for {about}")

    def _take(self) -> _Worker:
        """An idle worker, or a new one. Raises ConfigError when none can be started."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        try:
            worker = _Worker(self._source.prompts)
        except (TimeoutError, _Died) as error:
            how = str(error) or f"was not ready after {START_SECONDS:g} s"
            raise ConfigError(f"the process of the reward function {how} while it was starting") from None
        self._workers.add(worker)
        return worker
