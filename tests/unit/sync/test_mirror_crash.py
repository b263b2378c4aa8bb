"""A mirror whose process is killed at any instant never shows a version that it does not hold."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from flat_tensors import digest, digests
from published import bits_of, follow, publisher_of, saved, v

from sync.weights.stores.store import DirectoryStore
from sync.weights.subscribe import Mirror
from sync.wire import Version

RUN = "run"
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
STEPS = 12
SIZE = 60_000


@pytest.fixture
def published(tmp_path: Path) -> tuple[DirectoryStore, dict[Version, dict[str, str]]]:
    """Twelve versions with anchors at 0 and 6, and the digests of each."""
    store, random = DirectoryStore(tmp_path / "store"), np.random.default_rng(0)
    values = {name: random.standard_normal(SIZE).astype("f2") for name in ("one", "two")}
    publisher, expected = publisher_of(store, values), {}
    for step in range(STEPS):
        version, bits = v(step), bits_of(values)
        if step % 6 == 0:
            publisher.anchor(version, None, saved(tmp_path / "saved", values), bits)
        else:
            publisher.delta(version, bits)
        expected[version] = {name: digest(array) for name, array in bits.items()}
        hit = random.random(SIZE) < 0.02
        values = {name: np.where(hit, array ^ 1, array).view("f2") for name, array in bits.items()}
    return store, expected


def follow_until_killed(folder: Path, store: DirectoryStore, seconds: float) -> None:
    """Walk up and down the versions in a child process that is killed after `seconds`."""
    child = os.fork()
    if child == 0:
        try:
            with Mirror(folder, store, RUN) as mirror:
                while True:
                    for step in [*range(STEPS), 8, 3]:
                        follow(mirror, v(step))
        finally:
            os._exit(1)
    time.sleep(seconds)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_whatever_a_killed_mirror_says_it_holds_it_holds(
    published: tuple[DirectoryStore, dict[Version, dict[str, str]]], tmp_path: Path
) -> None:
    store, expected = published
    folder, random, found = tmp_path / "mirror", np.random.default_rng(1), set()
    for kill in itertools.count():
        if kill >= 30 and len(found) > 3:
            break
        assert kill < 300, f"300 kills left only {found}: the mirror makes no progress between kills"
        patience = 1.03**kill  # a slow machine gets as much time as it takes
        follow_until_killed(folder, store, patience * float(random.uniform(0.005, 0.06)))
        with Mirror(folder, store, RUN) as mirror:
            for slot in ("a", "b"):
                version = mirror._version_in(slot)
                if version is not None:
                    assert digests(folder / slot) == expected[version]
            found.add(mirror.version)
    with Mirror(folder, store, RUN) as mirror:
        for step in (11, 10):
            follow(mirror, v(step))
        assert digests(mirror.path or folder) == expected[v(10)]
