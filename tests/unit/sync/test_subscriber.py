"""A process that follows a run takes the versions of the run that has claimed it, and of no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from published import bits_of, publisher_of, saved

from sync.base.errors import ConfigError, SnapshotError
from sync.base.settings import ReplicaConfig
from sync.weights.stores import open_store
from sync.weights.subscribe import Subscriber, check_local
from sync.wire import RunIdentity, Version
from sync.wire.claims import Claim


def test_nothing_is_followed_before_a_run_claims_the_process_and_then_that_run_alone(tmp_path: Path) -> None:
    config = ReplicaConfig(run="toy", store_path=tmp_path / "store", mirror=tmp_path / "mirror")
    weights = {"w": np.arange(8, dtype=np.float32)}
    publisher = publisher_of(open_store(config.store, config.store_path), weights, "toy", "aa")
    publisher.anchor(Version(0, 0), None, saved(tmp_path / "saved", weights), bits_of(weights))
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


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/local\\040disk xfs rw 0 0
lustre@tcp:/x /scratch lustre rw 0 0
files /cloud fuse.gcsfuse rw 0 0
overlay /image fuse.fuse-overlayfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/runs/mirrors", "nfs4 at /home"),
        ("/scratch/not-there/m", "lustre at /scratch"),
        ("/cloud/a", "fuse.gcsfuse at /cloud"),
        ("/home/local disk/mirrors", None),
        ("/image/tmp", None),
        ("/homes", None),
    ],
)
def test_a_mirror_on_a_network_file_system_is_refused_by_name(
    folder: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr("sync.base.mounts.MOUNTS", mounts)
    if kind is None:
        check_local(Path(folder))
        return
    config = ReplicaConfig(run="r", store_path=tmp_path, mirror=Path(folder))
    with pytest.raises(ConfigError, match=rf"network file system \({kind}\): set student\.mirror_folder"):
        Subscriber(config, Claim(RunIdentity("r")))
    assert not Path(folder).exists()
