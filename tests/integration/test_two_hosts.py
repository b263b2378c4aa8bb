"""Two machines that share nothing but HTTP and a bucket, over a thin link that is cut in the middle of a run.

    host a: controller, trainer, teacher, S3 server (moto)     20 ms, 100 Mbit/s     host b: student replica

`DISTILL_CUT_SECONDS=30` cuts the link for longer than the default of 10 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replica_server import save_model
from thin_link import ThinLink, missing

REASON = missing()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[2]
CUT_SECONDS = float(os.environ.get("DISTILL_CUT_SECONDS", "10"))
STEPS, CUT_AT = 40, 5
SETTINGS = """
[run]
name = "two-hosts"
folder = "{folder}"
steps = {steps}
start_seconds = 280
[student]
path = "{folder}/student"
host = "{b}"
port = 8100
{urls}
[student.engine_args]
max-model-len = 64
enforce-eager = true
[teachers.teacher]
path = "{folder}/teacher"
dtype = "float32"
threads = 1
[prompts]
type = "jsonl"
path = "{folder}/prompts.jsonl"
template = "plain"
[rollout]
batch = 16
max_tokens = 16
[trainer]
ranks = 1
deepspeed = "{root}/configs/deepspeed/zero3_cpu.json"
threads = 1
[weights.store]
type = "object"
url = "s3://bucket/run"
options = {{ endpoint = "http://{a}:9000", region = "us-east-1" }}
[tracking]
wandb = "disabled"
"""


class Processes:
    """What runs on the hosts; leaving the context ends it all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        secret = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "DISTILL_TOKEN": "shared"}
        self._environment = os.environ | secret | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(self, name: str, line: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(line, env=self._environment, stdout=log, stderr=log, cwd=self._folder)
            )
        return self._running[-1]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-4000:]

    def close(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], say: Callable[[], str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, say()
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)


def test_a_run_over_a_thin_link_completes_although_the_link_is_cut(
    tmp_path: Path, processes: Processes
) -> None:
    for seed, name in enumerate(("student", "teacher")):
        save_model("Qwen3", seed, tmp_path / name, end=True)
    prompts = (json.dumps({"prompt": f"w{2 + i % 60} w{2 + i * 7 % 60}"}) + "\n" for i in range(800))
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    distill = [sys.executable, "-P", "-m", "distill.cli.main"]
    steps = tmp_path / "two-hosts/metrics.jsonl"

    def reached(step: int) -> bool:
        return steps.is_file() and len(steps.read_text().splitlines()) >= step

    with ThinLink() as link:
        a, b = link.hosts
        where = {"folder": tmp_path, "steps": STEPS, "root": ROOT, "a": a.address, "b": b.address}
        for name, urls in (("generate", ""), ("train", f'urls = ["http://{b.address}:8100"]')):
            (tmp_path / f"{name}.toml").write_text(SETTINGS.format(urls=urls, **where))
        processes.start(
            "moto", a.command([sys.executable, "-m", "moto.server", "-H", a.address, "-p", "9000"])
        )
        make_bucket(a.command, a.address)
        elsewhere = ["--set", f"run.folder={tmp_path}/elsewhere"]
        processes.start("student", b.command([*distill, "student", "generate.toml", *elsewhere]))
        run = processes.start("run", a.command([*distill, "run", "train.toml", "--set", "evaluation=false"]))
        until(lambda: reached(CUT_AT), run, lambda: processes.log("run") + processes.log("student"))
        link.up = False
        time.sleep(CUT_SECONDS)
        cut_at = len(steps.read_text().splitlines())
        assert cut_at < STEPS, "the run did not need the link"
        link.up = True
        assert run.wait(400) == 0, processes.log("run") + processes.log("student")
        assert link.lost > 0

    summary = json.loads((tmp_path / "two-hosts/summary.json").read_text())
    assert (summary["completed"], summary["weights_identical"]) == (True, True)
    assert summary["steps"] == STEPS
    audit = [*distill, "audit", str(tmp_path / "two-hosts")]
    done = subprocess.run(
        audit, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make_bucket(command: Callable[[list[str]], list[str]], address: str) -> None:
    """Ask host a's S3 server for the bucket, as soon as it listens."""
    code = f"import httpx; httpx.put('http://{address}:9000/bucket', trust_env=False).raise_for_status()"
    deadline = time.monotonic() + 60
    line = command([sys.executable, "-c", code])
    while subprocess.run(line, capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < deadline, "the S3 server did not come up"
        time.sleep(0.5)
