"""Two machines that share nothing but HTTP and a bucket, over a slow link that is cut in the middle of a run.

    host a: controller, trainer, teacher, S3 server (moto)     20 ms, 100 Mbit/s     host b: student replica

`DISTILL_CUT_SECONDS=30` cuts the link for longer than the default of 10 s.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import SlowLink, link_missing
from run_on_words import prepare
from waiting import until
from whole_run import DISTILL, ROOT, ended_well, over, steps_of

REASON = link_missing()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
CUT_SECONDS = float(os.environ.get("DISTILL_CUT_SECONDS", "10"))
STEPS, CUT_AT = 40, 5


@contextlib.contextmanager
def running(log: Path, line: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process on a host; leaving the context ends it."""
    secret = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "DISTILL_TOKEN": "shared"}
    environment = os.environ | secret | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        process = subprocess.Popen(line, env=environment, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_run_over_a_thin_link_completes_although_the_link_is_cut(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs/two-hosts"
    with SlowLink() as link, contextlib.ExitStack() as processes:

        def start(name: str, line: list[str]) -> subprocess.Popen[bytes]:
            return processes.enter_context(running(tmp_path / f"{name}.log", line))

        def said() -> str:
            return "".join((tmp_path / f"{name}.log").read_text()[-4000:] for name in ("run", "student"))

        a, b = link.hosts
        options = {"endpoint": f"http://{a.address}:9000", "region": "us-east-1"}
        store = {"type": "object", "url": "s3://bucket/run", "options": options}
        config = str(prepare(tmp_path, "two-hosts", STEPS, weights={"store": store}))
        there = over(f"student.host={b.address}", "student.port=8100", f"run.folder={tmp_path}/elsewhere")
        here = over(f'student.urls=["http://{b.address}:8100"]', "evaluation=false")
        start("moto", a.command([sys.executable, "-m", "moto.server", "-H", a.address, "-p", "9000"]))
        make_bucket(a.command, a.address)
        start("student", b.command([*DISTILL, "student", config, *there]))
        run = start("run", a.command([*DISTILL, "run", config, *here]))
        until(lambda: steps_of(run_dir) >= CUT_AT, 1200.0, said, run)
        link.up = False
        time.sleep(CUT_SECONDS)
        assert steps_of(run_dir) < STEPS, "the run did not need the link"
        link.up = True
        assert run.wait(1200) == 0, said()
        assert link.lost > 0
    ended_well(run_dir, STEPS)


def make_bucket(command: Callable[[list[str]], list[str]], address: str) -> None:
    """Ask host a's S3 server for the bucket, as soon as it listens."""
    code = f"import httpx; httpx.put('http://{address}:9000/bucket', trust_env=False).raise_for_status()"
    line = command([sys.executable, "-c", code])
    until(lambda: subprocess.run(line, capture_output=True, check=False).returncode == 0, 600.0)
