"""A pool of reward workers: rewards without user code in this process, each within a time limit.

    reward() ─▶ queue ─▶ a task for each worker: up to BATCH completions a frame, an outcome for each
                         time limit, or its process died ─▶ killed; the rest goes to another one

A worker that died by itself, by whatever hand, is replaced and its completion tried once more; one that
exceeded the limit costs its completion. A guardian stands above each: what the user's code started ends with
the worker, in whatever session it is, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from distill import guardian
from distill.aio import cancel
from distill.prompts.reward_worker import Outcome, Task, framed
from distill.prompts.rewards import Completion, Reward, RewardSource
from distill.prompts.stream import Prompt
from sync.base.decoding import msgpack_decoder
from sync.base.errors import ConfigError, DataError, how_it_ended

logger = logging.getLogger(__name__)
START_SECONDS: Final = 120.0
"""Time for a worker to load its function."""
BATCH: Final = 32
"""Completions of one frame."""
EXIT_SECONDS: Final = 5.0
"""Time for a worker that was killed to end."""
MOST_WORKERS: Final = min(4, os.cpu_count() or 1)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Outcome)


class _Died(Exception):
    """The worker's process has ended; the text says how."""


class _Worker:
    """One process below a guardian of its own; `close` it once."""

    def __init__(self, process: asyncio.subprocess.Process, guard: int) -> None:
        """`guard`: closed, or with a byte in it, it has the guardian kill everything."""
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "both ways"
        self._process, self._guard = process, guard
        self._tasks, self._outcomes = process.stdin, process.stdout

    @classmethod
    async def start(cls) -> _Worker:
        """Raises OSError."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        guarded, guard = os.pipe()
        command = [sys.executable, "-m", guardian.MODULE, "rewards", str(guarded), guardian.KILL]
        command += [sys.executable, "-m", "distill.prompts.reward_worker"]
        pipe = asyncio.subprocess.PIPE
        try:  # in this session: a supervisor here takes a child in another one for an orphan, and kills it
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=environment, process_group=0, pass_fds=(guarded,)
            )
        except BaseException:
            os.close(guard)
            raise
        finally:
            os.close(guarded)
        return cls(process, guard)

    def send(self, body: bytes) -> None:
        """Write one frame; what comes of it is in the outcomes."""
        self._tasks.write(framed(body))

    async def outcome(self, seconds: float) -> Outcome:
        """The next outcome. Raises TimeoutError or _Died."""
        try:
            async with asyncio.timeout(seconds):
                length = int.from_bytes(await self._outcomes.readexactly(4), "little")
                return _decoder.decode(await self._outcomes.readexactly(length))
        except asyncio.IncompleteReadError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._process.wait()
            status = self._process.returncode
            raise _Died("closed its output" if status is None else how_it_ended(status)) from None

    async def close(self) -> None:
        """End the process and all that it started, whatever they do."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._guard, b"!")
        os.close(self._guard)
        self._tasks.close()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await self._process.wait()
        except TimeoutError:  # something below the guardian cannot be killed, and holds the pipes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@dataclass
class _Job:
    prompt: Prompt
    completion: Completion
    reward: asyncio.Future[Reward]
    task: msgspec.Raw = field(default_factory=msgspec.Raw)
    """Encoded, from the time at which a worker's task has it."""
    died: str = ""
    """How the worker ended that had it."""

    def __str__(self) -> str:
        unit = "characters" if isinstance(self.completion, str) else "tokens"
        return f"prompt {self.prompt.id}, completion of {len(self.completion)} {unit}"

    def end(self, outcome: Reward | Exception) -> None:
        """Give it its reward, or what it fails with, unless nobody waits for it any more."""
        if self.reward.done():
            return
        if isinstance(outcome, Exception):
            self.reward.set_exception(outcome)
        else:
            self.reward.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Fail it: `error` kept it from the function."""
        logger.error("the reward function could not be asked about %s", self, exc_info=error)
        why = f"could not be asked about {self}: {type(error).__name__}: {error}"
        self.end(DataError(f"the reward function {why}"))


class RewardPool:
    """Rewards by the workers of one `source`; `reward` at any time in one event loop, `close` once in it.

    At most `MOST_WORKERS` processes; the first starts with the first completion. Completions are decoded
    here, in threads, so that no worker needs a tokenizer.
    """

    def __init__(self, source: RewardSource) -> None:
        self._source, self._seconds = source, source.seconds
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._serving: list[asyncio.Task[None]] = []

    async def reward(self, prompt: Prompt, completion: Sequence[int] | np.ndarray | str) -> Reward:
        """Reward of a completion, in tokens or as the function gets it. Raises DataError when its function
        fails or takes too long."""
        reward = asyncio.get_running_loop().create_future()
        said: Completion = completion if isinstance(completion, str) else np.asarray(completion).tolist()
        self._jobs.put_nowait(_Job(prompt, said, reward))
        if not self._serving or (self._jobs.qsize() > BATCH and len(self._serving) < MOST_WORKERS):
            self._serving.append(asyncio.create_task(self._serve(), name="rewards"))
        return await reward

    def check(self, prompt: Prompt) -> str:
        """Try the function on an empty completion and on the reference answer, in an event loop of its own;
        what it gave, in words. Raises ConfigError when it fails; a signal ends it at once. The pool is of no
        further use."""
        texts, loop = ["", prompt.answer or "1"], asyncio.new_event_loop()

        async def tried() -> list[Reward]:
            return [await self.reward(prompt, text) for text in texts]

        thread = threading.Thread(target=loop.run_forever, name="rewards", daemon=True)
        thread.start()
        try:
            trial = asyncio.run_coroutine_threadsafe(tried(), loop)
            try:
                nothing, answer = trial.result()
            finally:
                trial.cancel()
                asyncio.run_coroutine_threadsafe(self.close(), loop).result()
        except DataError as error:
            raise ConfigError(f"{error} (tried before the run)") from error
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        return f"the reward of no text is {nothing.value:g}, of the text {texts[1]!r:.60} {answer.value:g}"

    async def close(self) -> None:
        """Kill the workers; what is not rewarded yet is cancelled."""
        serving, self._serving = self._serving, []
        await cancel(serving)
        while not self._jobs.empty():
            self._jobs.get_nowait().reward.cancel()

    # --- a worker's task

    async def _serve(self) -> None:
        """Reward with one worker after the other, until the pool is closed."""
        batch = deque[_Job]()
        try:
            while True:
                await self._fill(batch)
                try:
                    await self._with_a_worker(batch)
                except Exception as error:  # noqa: BLE001 - whoever waits would never be told
                    self._note(error, batch)
        finally:
            for job in batch:
                job.reward.cancel()

    async def _with_a_worker(self, batch: deque[_Job]) -> None:
        """Take from `batch` what is rewarded, and fill it again; raises what ends the worker."""
        worker = await _Worker.start()
        try:
            await self._load(worker)
            while True:
                worker.send(_encoder.encode([job.task for job in batch]))
                while batch:
                    outcome = await worker.outcome(self._seconds)
                    error = None if outcome.error is None else DataError(outcome.error)
                    batch.popleft().end(error or Reward(outcome.value, outcome.answer))
                await self._fill(batch)
        finally:
            await worker.close()

    async def _load(self, worker: _Worker) -> None:
        """Raises ConfigError when the function cannot be loaded."""
        worker.send(self._source.prompts.model_dump_json().encode())
        try:
            loaded = await worker.outcome(START_SECONDS)
        except (TimeoutError, _Died) as error:
            how = str(error) or f"was not ready after {START_SECONDS:g} s"
            raise ConfigError(f"the process of the reward function {how} while it was starting") from None
        if loaded.error is not None:
            raise ConfigError(loaded.error)

    def _note(self, error: Exception, batch: deque[_Job]) -> None:
        """Fail what a worker's end costs; all, where no other could do better."""
        if not batch:
            logger.error("a reward worker ended while it had nothing to do", exc_info=error)
        elif isinstance(error, ConfigError):
            while batch:
                batch.popleft().end(error)
        elif isinstance(error, _Died) and not batch[0].died:
            batch[0].died = str(error)
        elif isinstance(error, _Died):
            job = batch.popleft()
            job.end(
                DataError(f"the process of the reward function {error}, twice, for {job}: have it return")
            )
        elif isinstance(error, TimeoutError):
            job = batch.popleft()
            late = f"took more than {self._seconds:g} s for {job} and was killed: raise"
            remedy = "reward_timeout_seconds, or make a function of yours faster"
            job.end(DataError(f"the reward function {late} {remedy}"))
        else:
            batch.popleft().fail(error)

    async def _fill(self, batch: deque[_Job]) -> None:
        """Wait until there is something in it, at most BATCH, each with its task."""
        while not batch:
            jobs = [await self._jobs.get()]
            while len(jobs) < BATCH and not self._jobs.empty():
                jobs.append(self._jobs.get_nowait())
            batch += jobs
            encoded = await asyncio.to_thread(self._encoded, jobs)
            batch.clear()
            batch += encoded

    def _encoded(self, jobs: list[_Job]) -> list[_Job]:
        """Those that are waited for and whose completion can be read, with their task; the others fail."""
        encoded = list[_Job]()
        for job in jobs:
            if job.reward.done():  # cancelled
                continue
            try:
                read = job.completion
                if not isinstance(read, str):
                    read = self._source.read(job.prompt, read)
                task = Task(job.prompt, read)
                job.task = msgspec.Raw(_encoder.encode(task))
                encoded.append(job)
            except Exception as error:  # noqa: BLE001 - of a tokenizer, or a text that UTF-8 does not hold
                job.reward.get_loop().call_soon_threadsafe(job.fail, error)
        return encoded
