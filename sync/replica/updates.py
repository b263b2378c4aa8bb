"""`POST /distill/v1/update`: stage while generating, then pause, swap, stamp, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sync.claims import Claim
from sync.errors import SnapshotError
from sync.replica import vllm_compat
from sync.settings import ReplicaConfig
from sync.stores import open_store
from sync.subscribe import Mirror, Staged
from sync.wire import BroadcastTicket, UpdateReply, UpdateRequest, Version

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.01


class _Ready(NamedTuple):
    """What can be swapped in now."""

    path: Path | None
    """A folder of the mirror; None: a broadcast in the worker's memory."""
    bytes_read: int
    staged: Staged | None = None
    """To promote once it is served; None: nothing to promote."""


class Updater:
    """Brings one replica from version to version. Updates wait for each other; asking for the version that
    is served already answers at once."""

    def __init__(self, engine: Any, config: ReplicaConfig, claim: Claim) -> None:
        """`claim`: the run that updates are made for."""
        self._engine = engine
        self._config, self._claim = config, claim
        self._mirror = Mirror(
            config.mirror, open_store(config.store, config.store_path), config.run, config.fingerprint
        )
        self._turn = asyncio.Lock()
        self.version: Version | None = None
        """What the engine serves; None: the folder it was started with."""
        self._bare = False
        """The empty adapter is in place; only for a replica that follows adapters."""

    async def adapter(self) -> Any | None:
        """What every completion must name to run through the adapter that is followed, those before the first
        version too: they are in flight when it comes. None: whole checkpoints are followed."""
        if self._config.lora_rank is None:
            return None
        if self.version is None and not self._bare:
            async with self._turn:
                if self.version is None and not self._bare:
                    await vllm_compat.call_workers(self._engine, "distill_revert")
                    self._bare = True
        return vllm_compat.ADAPTER

    async def digests(self) -> dict[str, str] | None:
        """Digests of the bytes last given to the loader, equal in all workers; None: nothing was loaded yet.

        Raises SnapshotError when workers differ.
        """
        async with self._turn:
            answers = await vllm_compat.call_workers(self._engine, "distill_digests")
        if any(answer != answers[0] for answer in answers):
            raise SnapshotError("the workers of this replica hold different weights: restart it")
        return answers[0]

    async def update(self, request: UpdateRequest) -> UpdateReply:
        """Serve `request.version`. Raises SnapshotError when it must not be applied; the old one goes on."""
        async with self._turn:
            if request.version == self.version:
                return UpdateReply(
                    version=request.version, bytes_read=0, stage_seconds=0, pause_seconds=0, apply_seconds=0
                )
            self._check_cache(request)
            started = time.perf_counter()
            self._mirror.follow(self._claim.run_id)
            ready = await self._stage(request)
            staged = time.perf_counter()
            apply_seconds = await self._swap(request, ready)
            pause_seconds = time.perf_counter() - staged
            if ready.staged is not None:
                await asyncio.to_thread(self._mirror.promote, ready.staged)
        return UpdateReply(
            version=request.version,
            bytes_read=ready.bytes_read,
            stage_seconds=staged - started,
            pause_seconds=pause_seconds,
            apply_seconds=apply_seconds,
        )

    def _check_cache(self, request: UpdateRequest) -> None:
        """With `keep`, KV of old weights stays, and a prefix cache would hand it to requests of new ones."""
        if request.kv_on_swap == "keep" and vllm_compat.prefix_caching(self._engine):
            raise SnapshotError(
                'kv_on_swap = "keep" would share prefixes between versions while prefix caching is on: start '
                'the replica without enable-prefix-caching, or use kv_on_swap = "recompute"'
            )

    async def _stage(self, request: UpdateRequest) -> _Ready:
        if request.broadcast is not None:
            return _Ready(None, await self._receive(request.broadcast))
        if self._mirror.version == request.version:  # this process started again and its mirror was ahead
            return _Ready(self._mirror.path, 0)
        staged = await asyncio.to_thread(self._mirror.stage, request.version)
        return _Ready(staged.path, staged.bytes_read, staged)

    async def _receive(self, ticket: BroadcastTicket) -> int:
        """Bytes of the broadcast, now in the worker's memory. Raises SnapshotError when it failed."""
        timeout = self._config.timeout_seconds
        await vllm_compat.call_workers(self._engine, "distill_receive", msgspec.to_builtins(ticket), timeout)
        while True:
            (answer,) = await vllm_compat.call_workers(self._engine, "distill_received")
            if answer["error"] is not None:
                raise SnapshotError(f"broadcast {ticket.group} failed: {answer['error']}")
            if answer["done"]:
                return int(answer["bytes"])
            await asyncio.sleep(_POLL_SECONDS)

    async def _swap(self, request: UpdateRequest, ready: _Ready) -> float:
        """Seconds of loading. The engine resumes on the new version, or on the old one and SnapshotError is
        raised; any other error leaves it paused, for its process is ending."""
        await vllm_compat.pause(self._engine, clear_cache=request.kv_on_swap == "recompute")
        started = time.perf_counter()
        await vllm_compat.apply(self._engine, {} if ready.path is None else {"path": str(ready.path)})
        failures = [f for f in await vllm_compat.call_workers(self._engine, "distill_outcome") if f]
        if failures:
            await vllm_compat.call_workers(self._engine, "distill_revert")
            await vllm_compat.resume(self._engine)
            raise SnapshotError(
                f"{request.version} could not be loaded, the old weights are back: {failures[0]}"
            )
        seconds = time.perf_counter() - started
        await vllm_compat.stamp(self._engine, str(request.version))
        self.version = request.version
        await vllm_compat.resume(self._engine)
        return seconds
