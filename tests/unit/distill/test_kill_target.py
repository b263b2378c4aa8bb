"""Whose processes a killed role has: what it leaves to its guardian is not its successor."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import psutil
import pytest
from stopped_run import KillTarget

from distill.guardian import MODULE
from sync.base.errors import DistillError

LAUNCHER = f"""
import os, subprocess, sys
pipe, held = os.pipe()
server = ["sh", "-c", "sleep 600 & exec sleep 601"]
guardians = [[sys.executable, "-m", "{MODULE}", role, str(pipe), *server] for role in sys.argv[1:]]
for started in [subprocess.Popen(guardian, pass_fds=[pipe]) for guardian in guardians]:
    started.wait()
"""


def test_a_process_that_a_killed_server_leaves_behind_does_not_replace_it(tmp_path: Path) -> None:
    with KillTarget([sys.executable, "-c", LAUNCHER, "student-0"], tmp_path, timeout=60.0) as target:
        target.start()
        target.wait(lambda: any("600" in one.cmdline() for one in target.below()), "the server's engine")
        server = next(iter(target.processes()))
        guardian = psutil.Process(server.ppid())
        guardian.send_signal(signal.SIGSTOP)
        target.kill("student-0", random.Random(0))
        target.wait(lambda: bool(target.processes() - {server}), "the guardian's adopting it")
        target.timeout = 1.0
        with pytest.raises(DistillError, match="another student-0 is not there in time"):
            target.wait_replaced("student-0")


def test_workers_of_rewards_are_not_among_the_roles_whose_work_is_waited_for(tmp_path: Path) -> None:
    launcher = [sys.executable, "-c", LAUNCHER, "student-0", "rewards"]
    with KillTarget(launcher, tmp_path, timeout=60.0) as target:
        target.start()
        target.wait(lambda: len(target.processes()) == 2, "both servers")
        assert target.roles() == ["student-0"]
