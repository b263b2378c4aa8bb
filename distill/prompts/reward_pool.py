"""A pool of reward workers: rewards without user code in this process, each within a time limit.

    reward() ─▶ queue ─▶ a thread for each worker: up to BATCH completions a frame, an outcome for each
                         time limit, or its process died ─▶ killed; the rest goes to another one

A worker that died by itself, by whatever hand, is replaced and its completion tried once more; one that
exceeded the limit costs its completion. A guardian stands above each: what the user's code started ends with
the worker, in whatever session it is, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import BinaryIO, Final, cast

import msgspec
import numpy as np

from distill import guardian
from distill.prompts.reward_worker import Outcome, Task, receive, send
from distill.prompts.rewards import Reward, RewardSource
from distill.prompts.stream import Prompt
from sync.base.decoding import msgpack_decoder
from sync.base.errors import ConfigError, DataError, how_it_ended

logger = logging.getLogger(__name__)
START_SECONDS: Final = 120.0
"""Time for a worker to load its function."""
BATCH: Final = 32
"""Completions of one frame."""
WATCH_SECONDS: Final = 0.25
"""Between two looks for a worker that is late."""
EXIT_SECONDS: Final = 5.0
"""Time for a worker that has closed its pipe to end."""
MOST_WORKERS: Final = min(4, os.cpu_count() or 1)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Outcome)


class _Died(Exception):
    """The worker's process has ended; the text says how."""


class _Worker:
    """One process below a guardian of its own; used by one thread at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        guarded, self._guard = os.pipe()
        """Closed, or with a byte in it, it has the guardian kill everything."""
        command = [sys.executable, "-m", guardian.MODULE, "rewards", str(guarded), guardian.KILL]
        command += [sys.executable, "-m", "distill.prompts.reward_worker"]
        pipe = subprocess.PIPE
        try:  # in this session: a supervisor here takes a child in another one for an orphan, and kills it
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, env=environment, process_group=0, pass_fds=(guarded,)
            )
        except OSError:
            os.close(self._guard)
            raise
        finally:
            os.close(guarded)
        self._tasks = cast(BinaryIO, self._process.stdin)
        self._outcomes = cast(BinaryIO, self._process.stdout)
        self._deadline, self._expired, self._closed = math.inf, False, False
        self._lock = threading.Lock()
        """Guards the deadline and the pipe, which one thread sets and others use."""

    def send(self, body: bytes) -> None:
        """Write one frame; what comes of it is in the outcomes."""
        with contextlib.suppress(OSError):
            send(self._tasks, body)

    def outcome(self, seconds: float) -> Outcome:
        """The next outcome. Raises TimeoutError or _Died; the worker is closed then."""
        self._deadline = time.monotonic() + seconds
        received = receive(self._outcomes)
        with self._lock:
            self._deadline = math.inf
        if received is not None and not self._expired:
            return _decoder.decode(received)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self.close()
        if self._expired:
            raise TimeoutError
        raise _Died(how_it_ended(self._process.returncode))

    def end_if_late(self) -> None:
        """Kill the process if an outcome is overdue; from any thread."""
        with self._lock:
            late = self._expired = self._expired or time.monotonic() > self._deadline
        if late:
            self.kill()

    def kill(self) -> None:
        """End the process and all that it started, from any thread, whatever they do."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if not self._closed:
                os.write(self._guard, b"!")

    def close(self) -> None:
        """End the process and all that it started; by the thread that uses it, once or again."""
        if self._closed:
            return
        self.kill()
        with self._lock:
            self._closed = True
            os.close(self._guard)
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # something below the guardian cannot be killed
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):  # what could not be written is of no use
            self._tasks.close()
        self._outcomes.close()


@dataclass
class _Job:
    prompt: Prompt
    ids: list[int]
    reward: Future[Reward] = field(default_factory=Future)
    task: msgspec.Raw = field(default_factory=msgspec.Raw)
    """Encoded, from the time at which a thread has it."""
    died: str = ""
    """How the worker ended that had it."""

    def __str__(self) -> str:
        return f"prompt {self.prompt.id}, completion of {len(self.ids)} tokens"

    def fail(self, error: Exception) -> None:
        """Fail it: `error` kept it from the function."""
        why = f"could not be asked about {self}: {type(error).__name__}: {error}"
        self.reward.set_exception(DataError(f"the reward function {why}"))


class RewardPool:
    """Rewards by the workers of one `source`; `reward` at any time from one event loop, `close` once.

    At most `MOST_WORKERS` processes; the first starts with the first completion. Completions are decoded
    here, in threads, so that no worker needs a tokenizer.
    """

    def __init__(self, source: RewardSource) -> None:
        self._source, self._seconds = source, source.seconds
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._closed = threading.Event()

    async def reward(self, prompt: Prompt, token_ids: Sequence[int] | np.ndarray) -> Reward:
        """Reward of a completion. Raises DataError when its function fails or takes too long."""
        return await asyncio.wrap_future(self._put(prompt, np.asarray(token_ids).tolist()))

    def check(self, prompt: Prompt) -> None:
        """Try the function on an empty completion. Raises ConfigError when it fails."""
        try:
            self._put(prompt, []).result()
        except DataError as error:
            raise ConfigError(f"{error} (tried with a completion of no tokens)") from error
        finally:
            self.close()

    def close(self) -> None:
        """Kill the workers; what is not rewarded yet is cancelled."""
        self._closed.set()
        for worker in list(self._workers):
            worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _put(self, prompt: Prompt, ids: list[int]) -> Future[Reward]:
        if not self._threads:
            self._start_thread(self._watch)
        job = _Job(prompt, ids)
        self._jobs.put(job)
        if len(self._threads) == 1 or (self._jobs.qsize() > BATCH and len(self._threads) <= MOST_WORKERS):
            self._start_thread(self._serve)
        return job.reward

    def _start_thread(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name="rewards", daemon=True))
        self._threads[-1].start()

    # --- in threads

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            for worker in list(self._workers):
                worker.end_if_late()

    def _serve(self) -> None:
        """Reward with one worker at a time, until the pool is closed."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            batch = deque([job])
            while len(batch) < BATCH and (more := self._next()) is not None:
                batch.append(more)
            batch = deque(
                waiting
                for waiting in batch
                if waiting.reward.set_running_or_notify_cancel() and self._encode(waiting)
            )
            while batch and not self._closed.is_set():
                worker = self._some(worker, batch)
            for job in batch:
                job.reward.set_exception(DataError(f"the reward function was stopped before {job}"))
        if worker is not None:
            worker.close()

    def _next(self) -> _Job | None:
        """A job that waits; None: there is none, or the pool is closed."""
        with contextlib.suppress(queue.Empty):
            if (job := self._jobs.get_nowait()) is not None:
                return job
            self._jobs.put(None)
        return None

    def _encode(self, job: _Job) -> bool:
        """Read a completion and encode its task; False: that fails, and so has the job."""
        try:
            task = Task(job.prompt, self._source.read(job.prompt, job.ids))
            job.task = msgspec.Raw(_encoder.encode(task))
        except Exception as error:  # of a tokenizer, or a text that UTF-8 does not hold
            logger.exception("the reward function could not be asked about %s", job)
            job.fail(error)
            return False
        return True

    def _some(self, worker: _Worker | None, batch: deque[_Job]) -> _Worker | None:
        """Take from `batch` what is rewarded or failed; the worker, None: it is gone."""
        try:
            worker = worker or self._started()
            worker.send(_encoder.encode([job.task for job in batch]))
            while batch:
                outcome = worker.outcome(self._seconds)
                future = batch.popleft().reward
                if outcome.error is None:
                    future.set_result(Reward(outcome.value, outcome.answer))
                else:
                    future.set_exception(DataError(outcome.error))
            return worker
        except TimeoutError:
            job = batch.popleft()
            late = f"took more than {self._seconds:g} s for {job} and was killed: raise"
            remedy = "reward_timeout_seconds, or make a function of yours faster"
            job.reward.set_exception(DataError(f"the reward function {late} {remedy}"))
        except _Died as error:
            if batch[0].died:
                job = batch.popleft()
                how = f"the process of the reward function {error}, twice, for {job}"
                job.reward.set_exception(DataError(how))
            else:
                batch[0].died = str(error)
        except ConfigError as error:
            while batch:
                batch.popleft().reward.set_exception(error)
        except Exception as error:  # edge of a thread: whoever waits would never be told
            job = batch.popleft()
            logger.exception("the reward function could not be asked about %s", job)
            job.fail(error)
            if worker is not None:
                worker.close()
        if worker is not None:
            self._workers.discard(worker)
        return None

    def _started(self) -> _Worker:
        """A new worker. Raises ConfigError when its function cannot be loaded."""
        worker = _Worker()
        self._workers.add(worker)
        try:
            worker.send(self._source.prompts.model_dump_json().encode())
            loaded = worker.outcome(START_SECONDS)
        except (TimeoutError, _Died) as error:
            how = str(error) or f"was not ready after {START_SECONDS:g} s"
            raise ConfigError(f"the process of the reward function {how} while it was starting") from None
        if loaded.error is not None:
            worker.close()
            raise ConfigError(loaded.error)
        return worker
