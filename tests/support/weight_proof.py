"""Proof with real engines that weights arrive bit-identical.

    publisher   N random versions of the student, as deltas, into a store of its own
    follower    a vLLM replica that applies every one of them
    late        a vLLM replica that joins after the last one

(a) what each worker passed to its loader has the publisher's digests, tensor by tensor;
(b) both replicas return bit-equal log-probabilities of the same prompts, sent one by one.
Then one projection of the last version is scaled and sent to the late replica alone: both proofs must fail.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from flat_tensors import digest

from distill.config import StudentConfig
from distill.launch import replica_command
from distill.launch.preflight import serving
from distill.launch.roles import Ports, url_of
from distill.launch.supervise import ChildSpec
from sync.base.address import token_from_environment
from sync.base.settings import ReplicaConfig
from sync.weights.publish import Publisher, Slice
from sync.weights.snapshots import checkpoint
from sync.weights.stores import Store
from sync.weights.stores.store import DirectoryStore
from sync.wire import Published, ReplicaState, RunIdentity, UpdateReply, UpdateRequest, Version
from sync.wire.client import Peer

RUN: Final = "verify"
LOCAL: Final = "127.0.0.1"
_START_SECONDS: Final = 300.0


@dataclass(frozen=True)
class Proof:
    """Result of `prove`; `holds` is the verdict."""

    versions: int
    digests_equal: bool
    """(a) for follower, late joiner and publisher."""
    scores_equal: bool
    """(b) for follower and late joiner."""
    planted_digests_differ: bool
    planted_scores_differ: bool
    sequences: int
    updates_per_second: float
    """Versions that the follower applied, one after the other."""
    pause_seconds: float
    """Median of the follower's updates."""

    @property
    def holds(self) -> bool:
        """Both proofs hold, and both can fail."""
        equal = self.digests_equal and self.scores_equal
        return equal and self.planted_digests_differ and self.planted_scores_differ


class Versions:
    """Publishes a copy of a folder as it is changed: version n is step n of lineage 0."""

    def __init__(self, folder: Path, work: Path, store: Store) -> None:
        self._folder, self._step = work / "folder", 0
        shutil.copytree(folder, self._folder)
        self.places = checkpoint.tensors(self._folder)
        self.arrays: dict[str, Any] = checkpoint.bits(self.places, writable=True)
        """Tensor → its bits; a change of them is in the copy."""
        slices = [Slice(n, at.shape, at.kind, 0, self.arrays[n].size) for n, at in self.places.items()]
        identity = RunIdentity(RUN, model=checkpoint.fingerprint(self.places))
        self._publisher = Publisher(store, identity, slices)

    def publish(self, kind: str) -> Published:
        """The next version; a delta needs a full one before it."""
        version = Version(0, self._step)
        self._step += 1
        if kind == "delta":
            return self._publisher.delta(version, self.arrays)
        return self._publisher.anchor(version, None, self._folder, self.arrays, kind)  # type: ignore[arg-type]


def on_loopback(config: StudentConfig, settings: ReplicaConfig, index: int, ports: Ports) -> ChildSpec:
    """Replica `index` of no run."""
    port = ports.take(LOCAL, 0, "student.port")
    line, environment = replica_command.command(config, settings, index, LOCAL, port)
    return ChildSpec(f"student-{index}", line, environment, url=url_of(LOCAL, port))


def randomly_moved(published: Versions, random: np.random.Generator) -> Version:
    """Publish a version in which a random share of each tensor's elements moved by a few units in the last
    place."""
    for array in published.arrays.values():
        share = random.choice([0.0, 0.001, 0.01, 0.1, 0.5])
        moved = random.random(array.size) < share
        array ^= np.where(moved, random.integers(1, 4, array.size), 0).astype(array.dtype)
    return published.publish("delta").version


def planted(published: Versions) -> Version:
    """Publish a version with one projection doubled: one more in the exponents of its bf16 elements."""
    name = next(n for n, at in published.places.items() if at.kind == "bf16" and "proj" in n)
    array = published.arrays[name]
    array += np.where(array & 0x7F80, 0x80, 0).astype(array.dtype)
    return published.publish("delta").version


async def prove(config: StudentConfig, work: Path, versions: int = 50, sequences: int = 64) -> Proof:
    """Run the proof on the student's model folder, in the new folder `work`. Raises DistillError.

    `sequences`: how many prompts proof (b) compares.
    """
    model = Path(config.path)
    store = work / "store"
    published = await asyncio.to_thread(Versions, model, work, DirectoryStore(store))
    await asyncio.to_thread(published.publish, "full")
    with Ports() as ports:
        settings = [ReplicaConfig(run=RUN, store_path=store, mirror=work / f"mirror-{i}") for i in range(2)]
        children = [on_loopback(config, server, index, ports) for index, server in enumerate(settings)]
        urls = [str(child.url) for child in children]
        async with serving(children, work / "logs", _START_SECONDS):
            return await _prove(published, urls, versions, _prompts(model, sequences))


def _prompts(model: Path, count: int) -> list[list[int]]:
    """Random sequences of 32 ids below the model's vocabulary size."""
    settings = json.loads((model / "config.json").read_text())
    vocabulary = int(settings.get("text_config", settings)["vocab_size"])
    return np.random.default_rng(1).integers(0, vocabulary, (count, 32)).tolist()


async def _prove(published: Versions, urls: list[str], versions: int, prompts: list[list[int]]) -> Proof:
    token, random = token_from_environment(), np.random.default_rng(0)
    async with Peer(urls[0], token) as follower, Peer(urls[1], token) as late:
        pauses: list[float] = []
        followed = 0.0
        for _ in range(versions):
            version = await asyncio.to_thread(randomly_moved, published, random)
            began = time.monotonic()
            pauses.append((await _update(follower, version)).pause_seconds)
            followed += time.monotonic() - began
        await _update(late, version)
        digests = [await _digests(peer) for peer in (follower, late)]
        expected = {name: digest(array) for name, array in published.arrays.items()}
        scores = [await prompt_scores(url, token, prompts) for url in urls]
        await _update(late, await asyncio.to_thread(planted, published))
        differing = await _digests(late), await prompt_scores(urls[1], token, prompts)
    return Proof(
        versions=versions,
        digests_equal=digests == [expected, expected],
        scores_equal=scores[0] == scores[1],
        planted_digests_differ=differing[0] != expected,
        planted_scores_differ=differing[1] != scores[0],
        sequences=len(prompts),
        updates_per_second=versions / followed,
        pause_seconds=float(np.median(pauses)),
    )


async def _update(peer: Peer, version: Version) -> UpdateReply:
    return await peer.call("/distill/v1/update", UpdateRequest(version=version), UpdateReply, 300.0)


async def _digests(peer: Peer) -> dict[str, str] | None:
    return (await peer.call("/distill/v1/state?digests=1", None, ReplicaState, 120.0)).digests


async def prompt_scores(url: str, token: str | None, prompts: list[list[int]]) -> list[Any]:
    """vLLM's own prompt log-probabilities, one sequence at a time. Raises as `Peer` does."""
    scores = []
    async with Peer(url, token, timeout=120.0, content_type="application/json") as peer:
        listing = await peer.once("/v1/models", None, peer.timeout)
        name = json.loads(bytes(listing))["data"][0]["id"]
        for ids in prompts:
            body = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 3, "seed": 0}
            answer = await peer.once("/v1/completions", json.dumps(body).encode(), peer.timeout)
            scores.append(json.loads(bytes(answer))["choices"][0]["prompt_logprobs"])
    return scores
