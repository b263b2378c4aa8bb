"""Dynamic batching: sequences of all callers share forward passes, up to a token budget each.

    submit ──▶ queue ─┬─▶ items   (≤ batch_tokens, one ScoreOptions)     ──▶ one call    ─┐ engine
                      └─▶ prompts (≤ batch_tokens, one GenerationParams) ──▶ many slices ─┘ threads

The queue is bounded in tokens. Calls run in worker threads, so the event loop stays free. With an engine of
concurrency 1 one call runs at a time: a batch of scores waits for one slice of generation at most, and the
other way round; a batch of prompts is padded, so each counts as many tokens as the longest. Otherwise so many
batches of each kind overlap, and one of prompts takes all that wait. A batch starts with the oldest item.
Work whose caller is gone is not computed. A batch that the engine fails on is
taken apart into its requests; whose request it is that fails alone has to halve it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from prometheus_client import Counter, Gauge, Histogram

from sync.base.errors import DataError, Overloaded, TooLarge, Unreachable
from sync.base.memory import give_back
from sync.wire.server import process_registry
from teacher_service.engines import base
from teacher_service.engines.base import EngineCompletion, EnginePrompt, EngineScores, Item
from teacher_service.kept import NAMESPACE

log = logging.getLogger(__name__)
RETRY_AFTER_SECONDS: Final = 0.5
"""What a refused caller is told to wait."""
STALLED_SECONDS: Final = 1800.0
"""Longest time of one call of the engine, loading included; after it /health fails."""
STOP_SECONDS: Final = 2.0
"""How long the calls under way are waited for at the end."""
SLICE_SECONDS: Final = 0.1
"""Time slice of generation before queued scores may run; at least one step."""

Outcome = EngineScores | EngineCompletion | str | Unreachable | TooLarge
"""What one item or prompt gets; str: why it has none, Unreachable: the server that computes is gone,
TooLarge: the engine failed on it together with others of its request."""
A = TypeVar("A")


class Metrics:
    """Prometheus metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = process_registry()
        labels: Any = {"registry": self.registry, "namespace": NAMESPACE}
        counter = partial(Counter, registry=self.registry, namespace=NAMESPACE)
        self.requests = counter("requests", "Answers by HTTP status", ("status",))
        self.sequences = counter("sequences", "Sequences scored")
        self.refused = counter("refused_sequences", "Sequences and prompts refused one by one")
        self.tokens = counter("tokens", "Tokens of scored sequences, prompt and completion")
        self.generated = counter("generated_tokens", "Completion tokens generated")
        self.busy = counter("busy_seconds", "Duration of the engine's calls, those at once added up")
        self.held_tokens = Gauge("held_tokens", "Tokens not yet answered", **labels)
        self.latency = Histogram("request_seconds", "From arrival to answer", **labels)


class Work(NamedTuple):
    """One item to score or prompt to complete."""

    item: Item | EnginePrompt
    options: base.ScoreOptions | base.GenerationParams
    """Only work with the same options shares a batch."""

    @property
    def tokens(self) -> int:
        """What it counts towards `batch_tokens` and `queue_tokens`; for a prompt, including max_tokens."""
        if isinstance(self.item, Item):
            return len(self.item.token_ids_L)
        assert isinstance(self.options, base.GenerationParams), "prompts come with them"
        return len(self.item.token_ids_P) + self.options.max_tokens


@dataclass(eq=False)
class _Queued:
    """`outcome` is cancelled once its caller is gone."""

    work: Work
    request: int
    """Number of the `submit` that it came with."""
    outcome: asyncio.Future[Outcome] = field(default_factory=asyncio.Future)


class Batcher:
    """The queue before one engine. Order of use: `start`, then `submit`, then `stop`."""

    def __init__(self, engine: base.Engine, batch_tokens: int, queue_tokens: int, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._queue_tokens = queue_tokens
        self._waiting: dict[_Queued, None] = {}
        """The oldest first."""
        self._added, self._numbers = asyncio.Event(), itertools.count()
        self._waiting_tokens = 0
        """Tokens of requests that are queued or not yet answered."""
        metrics.held_tokens.set_function(lambda: self._waiting_tokens)
        self._concurrency = engine.engine_info.concurrency
        overlaps = self._concurrency > 1
        threads = 2 * self._concurrency if overlaps else 1  # both kinds beside each other, or in turns
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="engine")
        self._token_limits = {Item: batch_tokens, EnginePrompt: queue_tokens if overlaps else batch_tokens}
        self._calls: dict[Future[Any], float] = {}
        """Calls of the engine under way → time.monotonic() at which each began."""
        self._ended: base.EngineEnded | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to compute; needs a running event loop."""
        kinds = [Item, EnginePrompt] * self._concurrency
        self._tasks = [asyncio.create_task(self._serve(kind)) for kind in kinds]

    @property
    def healthy(self) -> bool:
        """Whether batches are computed, each call within STALLED_SECONDS."""
        began = min(list(self._calls.values()), default=math.inf)
        stalled = time.monotonic() - began > STALLED_SECONDS
        working = bool(self._tasks) and not any(task.done() for task in self._tasks)
        return working and not stalled and self._ended is None

    async def stop(self) -> bool:
        """Compute no more, and wait STOP_SECONDS for the calls under way; whether they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not (await asyncio.to_thread(wait, [*self._calls], STOP_SECONDS)).not_done

    async def in_engine_thread(self, function: Callable[[], A]) -> A:
        """Run `function` as a call of the engine."""

        def call() -> A:
            began = time.monotonic()
            try:
                return function()
            except StopIteration as error:  # no future takes it
                raise DataError(
                    "the engine raised StopIteration: return or yield what is asked for"
                ) from error
            finally:
                self._metrics.busy.inc(time.monotonic() - began)

        future = self._threads.submit(call)
        self._calls[future] = time.monotonic()
        future.add_done_callback(self._calls.pop)
        return await asyncio.wrap_future(future)

    @contextmanager
    def submit(self, work: Sequence[Work]) -> Iterator[list[asyncio.Future[Outcome]]]:
        """Queue `work` for as long as the context lasts; yields a future for each.

        Its tokens count against `queue_tokens` until the end of the context, so that neither queued sequences
        nor answers that are not yet sent can grow beyond the bound. Raises Overloaded when there is no room,
        TooLarge when several have none by themselves, EngineEnded when nothing will be computed any more.
        """
        if self._ended is not None:
            raise self._ended
        tokens = sum(item.tokens for item in work)
        if tokens > self._queue_tokens and len(work) > 1:
            raise TooLarge(f"{tokens} tokens pass queue_tokens = {self._queue_tokens}: send fewer at once")
        if self._waiting_tokens and self._waiting_tokens + tokens > self._queue_tokens:
            raise Overloaded(
                f"{self._waiting_tokens} tokens wait and {tokens} more would pass queue_tokens = "
                f"{self._queue_tokens}: come back later, send less, or add a replica",
                RETRY_AFTER_SECONDS,
            )
        number = next(self._numbers)
        queued = [_Queued(item, number) for item in work]
        try:
            self._waiting_tokens += tokens
            self._waiting |= dict.fromkeys(queued)
            self._added.set()
            yield [entry.outcome for entry in queued]
        finally:
            self._waiting_tokens -= tokens
            for waiting in queued:
                waiting.outcome.cancel()
                self._waiting.pop(waiting, None)

    async def _take(self, kind: type[Item | EnginePrompt]) -> list[_Queued]:
        """The oldest work of a kind and what follows it with the same options, up to `_token_limits`.

        At least one, whatever its tokens; waits for it. Prompts count as padded where batches do not overlap.
        """
        while (first := next((q for q in self._waiting if isinstance(q.work.item, kind)), None)) is None:
            self._added.clear()
            await self._added.wait()
        padded = kind is EnginePrompt and self._concurrency == 1
        batch, total, longest = list[_Queued](), 0, 0
        for queued in self._waiting:
            if queued.work.options == first.work.options:
                total, longest = total + queued.work.tokens, max(longest, queued.work.tokens)
                tokens = longest * (len(batch) + 1) if padded else total
                if batch and tokens > self._token_limits[kind]:
                    break
                batch.append(queued)
        for queued in batch:
            del self._waiting[queued]
        return batch

    async def _serve(self, kind: type[Item | EnginePrompt]) -> None:
        """Compute batch after batch."""
        while True:
            batch = await self._take(kind)
            for queued, outcome in zip(batch, await self._outcomes(batch), strict=True):
                if not queued.outcome.done():
                    queued.outcome.set_result(outcome)

    async def _outcomes(self, batch: Sequence[_Queued]) -> Sequence[Outcome]:
        """One per item. Requests of a batch that fails are computed one by one: none costs another."""
        scored = isinstance(batch[0].work.item, Item)
        try:
            return await (self._score(batch) if scored else self._generate(batch))
        except Unreachable as error:
            self._ended = error if isinstance(error, base.EngineEnded) else self._ended
            return [error] * len(batch)
        except Exception as error:
            requests = [[*part] for _, part in itertools.groupby(batch, lambda queued: queued.request)]
            if len(requests) > 1:
                return [outcome for part in requests for outcome in await self._outcomes(part)]
            what, count = "sequence" if scored else "prompt", len(batch)
            tokens = sum(queued.work.tokens for queued in batch)
            log.error("%d of %d tokens (%s) failed", count, tokens, what, exc_info=error)
            cause = f"{type(error).__name__}: {error}"
            if count == 1:
                return [f"the engine failed on this {what}: {cause}"]
            return [TooLarge(f"the engine failed on {count} {what}s: send fewer at once: {cause}")] * count

    async def _score(self, batch: Sequence[_Queued]) -> list[EngineScores]:
        items: list[Any] = [queued.work.item for queued in batch]
        options: Any = batch[0].work.options
        counts = [item.positions for item in items]

        def scored() -> list[EngineScores]:
            parts = split(self._engine.score(items, options), counts)
            give_back()
            return parts

        scores = await self.in_engine_thread(scored)
        self._metrics.sequences.inc(len(batch))
        self._metrics.tokens.inc(sum(entry.work.tokens for entry in batch))
        return scores

    async def _generate(self, batch: Sequence[_Queued]) -> Sequence[EngineCompletion | str]:
        """Generate in slices of SLICE_SECONDS; stop when all callers of the batch are gone."""
        prompts: list[Any] = [queued.work.item for queued in batch]
        options: Any = batch[0].work.options
        steps = self._engine.generate(prompts, options)

        def generated() -> list[EngineCompletion] | None:
            """The completions if generation finished in this slice, else None."""
            end = time.monotonic() + SLICE_SECONDS
            for completions in steps:
                if completions is not None or time.monotonic() >= end:
                    return completions
            raise DataError("the engine's generator ended without completions: yield them last")

        while not all(entry.outcome.done() for entry in batch):
            if (completions := await self.in_engine_thread(generated)) is None:
                continue
            if len(completions) != len(batch):
                raise DataError(f"the engine gave {len(completions)} completions for {len(batch)} prompts")
            self._metrics.generated.inc(sum(len(completion.token_ids_T) for completion in completions))
            return completions
        return ["cancelled: no caller is waiting"] * len(batch)


def split(scores: EngineScores, counts: Sequence[int]) -> list[EngineScores]:
    """Scores of a batch cut into those of its items. Raises DataError for columns of another length."""
    ends = np.cumsum(counts)
    columns = {name: value for name in EngineScores.__slots__ if (value := getattr(scores, name)) is not None}
    for name, value in columns.items():
        if len(value) != ends[-1]:
            raise DataError(f"the engine gave {name} of {len(value)} rows for {ends[-1]} positions")
    parts = {name: np.split(value, ends[:-1]) for name, value in columns.items()}
    return [EngineScores(**{name: part[i] for name, part in parts.items()}) for i in range(len(counts))]
