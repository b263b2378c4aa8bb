"""One trainer on two machines: the real deepspeed launcher and pdsh, ranks in two network namespaces.

    host a: `distill run` (controller, teacher, student replica), launcher, rank 0          host b: rank 1

Only ssh is replaced, by a script that enters a namespace instead of a machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hosts import INTERFACE, SlowLink, link_missing
from run_on_words import prepare
from whole_run import DISTILL, ROOT, ended_well, over

REASON = link_missing() or (None if shutil.which("pdsh") else "the command `pdsh` is missing (package pdsh)")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
STEPS = 4
SSH = """#!/bin/sh
while :; do
    case "$1" in
        -o | -p | -l) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
case "$host" in {cases} *) exit 255 ;; esac
echo "$host $*" >> {log}
exec ip netns exec "$name" env -i PATH="$PATH" HOME="$HOME" sh -c "$*"
"""


def enter_namespaces(folder: Path, link: SlowLink) -> Path:
    """Write an `ssh` that knows both hosts; the folder to put on PATH, and beside it a log of its uses."""
    cases = " ".join(f"{host.address}) name={host.name} ;;" for host in link.hosts)
    (folder / "bin").mkdir()
    script = folder / "bin/ssh"
    script.write_text(SSH.format(cases=cases, log=folder / "ssh.log"))
    script.chmod(0o755)
    return script.parent


def test_ranks_on_two_machines_train_one_model(tmp_path: Path) -> None:
    config = prepare(tmp_path, "two-trainers", STEPS)
    (tmp_path / "token").write_text("a token of the tests\n")
    with SlowLink(delay=0.0002, rate=1e9) as link:
        (tmp_path / "hostfile").write_text("".join(f"{host.address} slots=1\n" for host in link.hosts))
        settings = over(
            f"trainer.hostfile={tmp_path}/hostfile",
            f'trainer.env={{GLOO_SOCKET_IFNAME="{INTERFACE}"}}',
            f"controller.host={link.hosts[0].address}",
            "evaluation=false",
        )
        path = f"{enter_namespaces(tmp_path, link)}:{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name != "DISTILL_TOKEN"}
        environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "DISTILL_TOKEN_FILE": str(tmp_path / "token")}
        line = link.hosts[0].command([*DISTILL, "run", str(config), *settings])
        how = {"capture_output": True, "text": True, "timeout": 1200, "check": False}
        done = subprocess.run(line, env=environment, cwd=tmp_path, **how)
        crossed = link.carried
    assert done.returncode == 0, done.stdout + done.stderr
    assert crossed > 1000, "the ranks spoke over the link"
    run_dir, ssh = tmp_path / "runs/two-trainers", (tmp_path / "ssh.log").read_text()
    log = (run_dir / "logs/trainer.log").read_text()
    assert "rank0" in log
    assert "rank1" in log
    assert {line.split()[0] for line in ssh.splitlines()} >= {host.address for host in link.hosts}
    assert "a token of the tests" not in ssh + log
    ended_well(run_dir, STEPS)
