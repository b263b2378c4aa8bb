"""What ranks tell each other, between real processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from student_trainer.launch import RENDEZVOUS
from sync.wire.server import ON_LOOPBACK, hold_port

MEETING = """
import json, sys
from torch import device, distributed
from student_trainer.ranks import Ranks, meeting_point
distributed.init_process_group("gloo", **meeting_point())
rank = distributed.get_rank()
ranks = Ranks(rank, 2, device("cpu"))
bodies = [ranks.collect(bytes([7 + rank]) * length) for length in (rank, 0, 3 - rank)]
print(json.dumps([[body.hex() for body in part] for part in bodies]), flush=True)
sys.stdin.read()
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("place", ["file", "port"])
def test_ranks_meet_and_listen_on_loopback_alone_and_bytes_of_any_length_reach_all(
    place: str, tmp_path: Path
) -> None:
    reserved = hold_port("127.0.0.1", 0)  # as a launcher does
    port = reserved.getsockname()[1]
    where = {RENDEZVOUS: f"file://{tmp_path}/store"} if place == "file" else {}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING],
            env=os.environ | ON_LOOPBACK | where | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        bodies = [json.loads(rank.stdout.readline()) for rank in ranks]
        assert bodies == [[["", "08"], ["", ""], ["070707", "0808"]]] * 2
        open_now = [one for rank in ranks for one in psutil.Process(rank.pid).net_connections("tcp")]
        listening = [one.laddr for one in open_now if one.status == "LISTEN"]
        assert {address.ip for address in listening} <= {"127.0.0.1"}
        assert (port in {address.port for address in listening}) == (place == "port")
    finally:
        for rank in ranks:
            rank.communicate("", timeout=60)
        reserved.close()
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    where = {"MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", MEETING], env=os.environ | where, capture_output=True, text=True, check=False
    )
    assert "cannot listen on 203.0.113.1:1 (Cannot assign requested address)" in ended.stderr
    assert '["--master_addr", ADDRESS, "--master_port", PORT]' in ended.stderr
