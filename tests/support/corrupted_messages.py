"""Answers that lie: any field of any message, changed on its way out, in memory.

A `Spoiler` changes a share of what passes through it, as it would come over the wire: what no decoder lets
through raises WireError, as `sync.wire.client` does.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from in_memory import MemoryEvaluator, MemoryReplica, MemoryTeacher

from distill.rollout.replica_client import Answer
from distill.trainer_api.session import Event, TrainerSession
from sync import wire
from sync.base.errors import DistillError
from sync.wire import Array, EvalReply, Ok, ReplicaState, ScoreRefused, ScoreReply, Version, encode
from teacher_service.client import Reply

M = TypeVar("M", bound=wire.Message)
INTS = (-1, 0, 7, 1 << 31, (1 << 62) + 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 1e30)
TEXTS = ("", "other", "\x00" * 100, "stop", "broadcast")


@dataclass
class Spoiler:
    """Changes `share` of the messages; `hits` counts them by message, field and change."""

    rng: random.Random
    share: float
    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def over_the_wire(self, message: M, kind: Any) -> M:
        """`message` as it comes out on the other side."""
        if self.rng.random() >= self.share:
            return message
        return wire.decode(self.spoilt(message), kind)

    def spoilt(self, message: Any) -> bytes:
        """The message with one field changed, or in one of ten cases its bytes."""
        name = type(message).__name__
        if self.rng.random() < 0.1:
            return self._damaged(encode(message), name)
        return encode(self._changed(message, name))

    def _damaged(self, body: bytes, name: str) -> bytes:
        place, how = self.rng.randrange(len(body)), self.rng.choice(("cut", "flipped", "kind"))
        self.hits[name, "bytes", how] += 1
        if how == "cut":
            return body[:place]
        if how == "kind":
            return encode(Ok())
        return body[:place] + bytes([body[place] ^ (1 << self.rng.randrange(8))]) + body[place + 1 :]

    def _changed(self, message: Any, name: str) -> Any:
        """With one field changed; of a reply with results, mostly a field of one of them."""
        results = getattr(message, "results", None)
        if results and self.rng.random() < 0.8:
            place = self.rng.randrange(len(results))
            spoilt = self._changed(results[place], type(results[place]).__name__)
            return msgspec.structs.replace(message, results=[*results[:place], spoilt, *results[place + 1 :]])
        chosen = self.rng.choice([one for one in message.__struct_fields__ if one != "schema"])
        how, value = self._other(getattr(message, chosen))
        self.hits[name, chosen, how] += 1
        return msgspec.structs.replace(message, **{chosen: value})

    def _other(self, value: Any) -> tuple[str, Any]:
        """How a value was changed, and what it is now."""
        if isinstance(value, Array):
            return self._array(value)
        if isinstance(value, Version):
            how = self.rng.choice(("lineage", "step"))
            return how, value._replace(**{how: self.rng.choice(INTS)})
        if isinstance(value, msgspec.Struct):
            return "inside", self._changed(value, type(value).__name__)
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, dict):
            name = next(iter(value), "x")
            first = value.get(name, 0.0)
            changes = {"empty": {}, "value": value | {name: self._other(first)[1]}}
            how, changed = self.rng.choice([*changes.items(), ("more", value | {"further": first})])
            return how, changed
        if value is None:
            return "there", self.rng.choice((Array("f4", (1,), bytes(4)), Version(0, 1), 1.0, 3, "x:1"))
        kinds = ((bool, (True, False)), (int, INTS), (float, FLOATS), (str, TEXTS), (bytes, (b"", bytes(16))))
        for kind, others in kinds:
            if isinstance(value, kind):
                return "value", self.rng.choice((*others, None))
        raise AssertionError(f"{value!r} is nothing that a message holds")

    def _list(self, value: list[Any]) -> tuple[str, list[Any]]:
        how = self.rng.choice(("empty", "shorter", "longer", "turned", "inside"))
        if how == "inside" and value:
            place = self.rng.randrange(len(value))
            return how, [*value[:place], self._other(value[place])[1], *value[place + 1 :]]
        changes = {"shorter": value[:-1], "longer": value + value[:1], "turned": value[::-1]}
        return how, changes.get(how, [])

    def _array(self, array: Array) -> tuple[str, Array | None]:
        how = self.rng.choice(("dtype", "shape", "bytes", "element", "element", "element", "none"))
        if how == "dtype":
            return how, msgspec.structs.replace(array, dtype=self.rng.choice(list(wire.DTYPES)))
        if how == "shape":
            count = array.shape[0] if array.shape else 0
            shapes = [(), (count + 1,), (-1,), (1 << 40,), (0, 1 << 62), (*array.shape, 1), array.shape[:1]]
            return how, msgspec.structs.replace(array, shape=self.rng.choice(shapes))
        if how == "bytes":
            data = array.data
            others = (data[:-1], data + b"\0", b"", data[: len(data) // 2])
            return how, msgspec.structs.replace(array, data=self.rng.choice(others))
        return (how, None) if how == "none" else ("element", self._element(array))

    def _element(self, array: Array) -> Array:
        values = wire.unpack(array).copy()
        if values.size:
            others = FLOATS if values.dtype.kind == "f" else (-1, -2, 50, (1 << 31) - 1, int(values.flat[0]))
            with np.errstate(all="ignore"):
                other = np.array(self.rng.choice(others)).astype(values.dtype)
            values.flat[self.rng.randrange(values.size)] = 0x7FC0 if array.dtype == "bf16" else other
        return msgspec.structs.replace(array, data=values.tobytes())


class SpoiledReplica(MemoryReplica):
    """Completions, states and updates."""

    spoiler: Spoiler

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[Answer, None]:
        async for answer in super().generate(request):
            yield self.spoiler.over_the_wire(answer, wire.Generated | wire.GenerateFailed)

    async def state(self, digests: bool = False) -> ReplicaState:
        return self.spoiler.over_the_wire(await super().state(digests), ReplicaState)

    async def update(self, request: wire.UpdateRequest, timeout: float) -> wire.UpdateReply:
        return self.spoiler.over_the_wire(await super().update(request, timeout), wire.UpdateReply)


class SpoiledTeacher(MemoryTeacher):
    """Scores and completions."""

    spoiler: Spoiler

    async def score(self, *of: Any, **options: Any) -> Reply[wire.Scored | ScoreRefused]:
        results, server = await super().score(*of, **options)
        return Reply(self.spoiler.over_the_wire(ScoreReply(results=results), ScoreReply).results, server)

    async def generate(self, *of: Any, **options: Any) -> Reply[wire.TeacherCompletion | ScoreRefused]:
        results, server = await super().generate(*of, **options)
        reply = wire.TeacherGenerateReply(results=results)
        return Reply(self.spoiler.over_the_wire(reply, wire.TeacherGenerateReply).results, server)

    def once(self, path: str, body: bytes | None, timeout: float, model: str | None = None) -> bytes:
        """Kept bodies are damaged on their way to a rank; what is scored again is not."""
        answer, spoiler = super().once(path, body, timeout, model), self.spoiler
        lies = body is None and spoiler.rng.random() < spoiler.share
        return spoiler._damaged(answer, "Kept") if lies else answer


class SpoiledEvaluator(MemoryEvaluator):
    """Its answers."""

    spoiler: Spoiler

    async def evaluate(self, request: wire.EvalRequest) -> EvalReply:
        return self.spoiler.over_the_wire(await super().evaluate(request), EvalReply)


class SpoiledSession:
    """What a trainer says: before each message a changed one, which is refused or taken for what it is."""

    def __init__(self, session: TrainerSession, spoiler: Spoiler) -> None:
        self._session, self._spoiler, self.run = session, spoiler, session.run

    async def _first(self, message: M, send: Callable[[M], Any]) -> None:
        with suppress(DistillError, TimeoutError):
            changed = self._spoiler.over_the_wire(message, type(message))
            if changed is not message:
                async with asyncio.timeout(0.01):  # it may have to wait for a batch
                    await send(changed)

    async def hello(self, hello: wire.TrainerHello) -> wire.TrainerWelcome:
        async def send(changed: wire.TrainerHello) -> None:
            if changed.fingerprint == hello.fingerprint:  # the first one that is heard is the run's
                await self._session.hello(changed)

        await self._first(hello, send)
        return await self._session.hello(hello)

    async def batch(self, request: wire.BatchRequest) -> bytes:
        await self._first(request, self._session.batch)
        return await self._session.batch(request)

    async def event(self, event: Event) -> Ok | wire.Audience:
        await self._first(event, self._session.event)
        return await self._session.event(event)
