"""SIGTERM to a command that has started processes: they end with it, as after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import kill_target
import psutil
import pytest

CANCELLED = """
import asyncio, sys
from distill.cli.options import guarded
async def stopped_twice():
    asyncio.current_task().cancel()
    await asyncio.sleep(60)
sys.exit(guarded(lambda: asyncio.run(stopped_twice())))
"""
SLEEP = '[sys.executable, "-c", "import time; time.sleep(600)"]'
SCRIPT = f"""
import subprocess, sys, time
from pathlib import Path
from distill.cli.options import guarded
class Popen(subprocess.Popen):  # subprocess itself is not interrupted: it would not know the child yet
    def communicate(self, *args, **options):
        print("waiting", flush=True)
        return super().communicate(*args, **options)
subprocess.Popen = Popen
def killing():
    from kill_target import KillTarget  # of tests/support, on PYTHONPATH
    with KillTarget({SLEEP}, Path(sys.argv[1])) as target:
        target.start()
        print("waiting", flush=True)
        time.sleep(600)
def waiting():
    subprocess.run({SLEEP})
sys.exit(guarded(globals()[sys.argv[2]]))
"""


@pytest.mark.parametrize("command", ["waiting", "killing"])
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, command: str) -> None:
    children: list[psutil.Process] = []
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), command]
    environment = os.environ | {"PYTHONPATH": kill_target.__file__.rpartition("/")[0]}
    ours = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    assert ours.stdout is not None
    try:
        assert ours.stdout.readline() == b"waiting\n"
        children = psutil.Process(ours.pid).children()
        assert children
        ours.send_signal(signal.SIGTERM)
        assert ours.wait(60) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, 60)
        assert not alive
    finally:
        ours.kill()
        ours.stdout.close()
        for child in children:
            if child.is_running():
                child.kill()


def test_a_run_that_is_killed_by_a_second_signal_says_so_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", CANCELLED], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 130
    assert ended.stderr == "distill: stopped\n"
