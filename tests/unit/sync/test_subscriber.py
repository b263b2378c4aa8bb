"""A process that follows a run takes the versions of the run that has claimed it, and of no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sync.claims import Claim
from sync.delta.file import Slice
from sync.errors import SnapshotError
from sync.publish import Publisher
from sync.settings import ReplicaConfig
from sync.snapshots import checkpoint
from sync.stores import open_store
from sync.subscribe import Subscriber
from sync.wire import RunIdentity, Version


def test_nothing_is_followed_before_a_run_claims_the_process_and_then_that_run_alone(tmp_path: Path) -> None:
    config = ReplicaConfig(run="toy", store_path=tmp_path / "store", mirror=tmp_path / "mirror")
    folder = tmp_path / "saved"
    weights = np.arange(8, dtype=np.float32)
    folder.mkdir()
    save_file({"w": weights}, folder / "model.safetensors")
    store, slices = open_store(config.store, config.store_path), [Slice("w", (8,), "f4", 0, 8)]
    publisher = Publisher(store, RunIdentity("toy", "aa", checkpoint.fingerprint(folder)), slices)
    publisher.anchor(Version(0, 0), None, folder, {"w": weights.view("<u4")})
    claim = Claim(RunIdentity("toy"))
    followed = Subscriber(config, claim)
    assert followed.newest() is None
    claim.admit(RunIdentity("toy", "aa"), claims=True)
    assert followed.newest() == Version(0, 0)
    assert (followed.folder(Version(0, 0)) / "model.safetensors").is_file()
    claim.run = RunIdentity("toy", "bb")
    with pytest.raises(SnapshotError, match="of another run 'toy'"):
        followed.folder(Version(0, 0))
    followed._mirror.close()
