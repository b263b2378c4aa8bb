"""A store as its owner might alter it: objects mutated, with manifests made to agree with what they name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from memory_store import MemoryStore
from published import bits_of, publisher_of, saved

from sync.weights.snapshots.manifest import Manifest, manifest_key, version_key
from sync.wire import Version

RUN: Final = "run"
SHAPES: Final = {"a": (40, 8), "b.weight": (300,), "c": (1,)}
STRAYS: Final = ("", "x", "1-v2", "000-v00000001x")
WEIRD: Final[list[Any]] = [
    None, -1, 0, 2**31, 2**63 - 1, 2**64 - 1, 1e308, 0.5, "", "..", "../../x", "/etc/passwd", "a\0b",
    "L000-v00000001", "model/x.py", "model/config.json", "\N{GRINNING FACE}", [], {}, [[]], [0, 0], [-1, 5],
    [[[[]]]], {"a": 1}, True, "9" * 400,
]  # fmt: skip


def publish(store: MemoryStore, folder: Path, versions: int = 4) -> None:
    """Version 0 as an anchor and deltas on it, by two ranks in turn; weights are fp32."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}
    publisher = publisher_of(store, weights, RUN)
    publisher.anchor(Version(0, 0), None, saved(folder, weights), bits_of(weights))
    for step in range(1, versions):
        for value in weights.values():
            value += (rng.random(value.shape) < 0.1) * np.float32(1e-3)
        publisher.delta(Version(0, step), bits_of(weights))


def put_file(
    store: MemoryStore, version: Version, name: str, data: bytes, of: MemoryStore | None = None
) -> None:
    """Replace a file of a version, and make the manifest (that of `of`; None: the store's) agree with it."""
    key = manifest_key(RUN, version)
    manifest = msgspec.json.decode((of or store).read(key), type=Manifest)
    facts = {"size": len(data), "blake3": blake3(data).hexdigest()}
    files = [msgspec.structs.replace(file, **facts if file.key == name else {}) for file in manifest.files]
    total = sum(file.size for file in files)
    store.replace(version_key(RUN, version, name), data)
    store.replace(key, msgspec.json.encode(msgspec.structs.replace(manifest, files=files, bytes=total)))


def delta_file(head: bytes, blobs: bytes) -> bytes:
    """A delta file around any header."""
    packed = zstandard.ZstdCompressor(level=19).compress(head)
    return b"ODDELTA3" + len(packed).to_bytes(4, "little") + packed + blobs


def parts_of(data: bytes) -> tuple[Any, bytes]:
    """Header of a delta file as plain data, and its blobs."""
    end = 12 + int.from_bytes(data[8:12], "little")
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[12:end])), data[end:]


def safetensors(header: bytes, data: bytes) -> bytes:
    """A safetensors file around any header."""
    return len(header).to_bytes(8, "little") + header + data


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, lengthened, or with some bytes changed."""
    kind, bad = rng.randrange(5), bytearray(data)
    if kind == 0:
        return bytes(bad[: rng.randrange(len(bad) + 1)])
    if kind == 1:
        return bytes(bad) + rng.randbytes(rng.randrange(1, 9))
    if kind == 2:
        at = rng.randrange(len(bad) + 1)
        return bytes(bad[:at] + bad[at + rng.randrange(9) :])
    for _ in range(rng.randrange(1, 4)):
        if bad:
            bad[rng.randrange(len(bad))] = rng.randrange(256)
    return bytes(bad)


def mutated(value: Any, rng: random.Random) -> Any:
    """Plain data with one place of it changed, removed, doubled or nested."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.1:
            del copy[key]
        elif isinstance(copy, list) and rng.random() < 0.15:
            copy.append(copy[key])
        else:
            copy[key] = mutated(copy[key], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 8, -(2**31), 2**40])
    return rng.choice(WEIRD)


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """As deep as no reader may follow."""
    return opening * depth + closing * depth


def mutate_store(store: MemoryStore, sound: MemoryStore, rng: random.Random) -> None:
    """One thing that the owner of a store might do to it; `sound`: as it was published."""
    version = Version(0, rng.randrange(4))
    name = "model/model.safetensors" if version.step == 0 else "delta-00000.bin"
    data = sound.read(version_key(RUN, version, name))
    choices: list[Callable[[], None]] = [
        lambda: put_file(store, version, name, mutated_bytes(data, rng), sound),
        lambda: put_file(store, version, name, _restructured(data, version, rng), sound),
        lambda: put_file(store, version, name, _restructured(data, version, rng), sound),
        lambda: store.replace(version_key(RUN, version, name), mutated_bytes(data, rng)),
        lambda: _mutate_json(store, sound, manifest_key(RUN, version), rng),
        lambda: _mutate_json(store, sound, manifest_key(RUN, version), rng),
        lambda: store.replace(f"{RUN}/LATEST", mutated_bytes(b"L000-v00000003\n", rng)),
        lambda: store.replace(f"{RUN}/L{rng.choice(STRAYS)}/manifest.json", b"{}"),
        lambda: _mutate_lease(store, rng),
    ]
    rng.choice(choices)()


def _restructured(data: bytes, version: Version, rng: random.Random) -> bytes:
    if version.step == 0:
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(mutated(json.loads(data[8:end]), rng)).encode()
        return safetensors(header if rng.random() < 0.9 else nested(50_000), data[end:])
    head, blobs = parts_of(data)
    packed = msgspec.msgpack.encode(mutated(head, rng))
    return delta_file(packed if rng.random() < 0.9 else nested(50_000, b"\x91", b"\x90"), blobs)


def _mutate_json(store: MemoryStore, sound: MemoryStore, key: str, rng: random.Random) -> None:
    text = sound.read(key)
    if rng.random() < 0.2:
        store.replace(key, rng.choice([mutated_bytes(text, rng), nested(50_000), b""]))
        return
    store.replace(key, json.dumps(mutated(json.loads(text), rng)).encode())


def _mutate_lease(store: MemoryStore, rng: random.Random) -> None:
    lease = {"version": [0, rng.randrange(4)], "expires": 1.0}
    text = json.dumps(mutated(lease, rng)).encode()
    store.replace(f"{RUN}/leases/x.json", rng.choice([text, mutated_bytes(text, rng), nested(50_000)]))
