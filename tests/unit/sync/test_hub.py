"""What is asked of the Hub before its libraries: when it says to come back, it is asked then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from ports import Handler, served

CHECK = "from sync.base.hub import check_reachable; check_reachable('owner/name', None, 'model')"
CARD = "from sync.base.hub import optional_file; print(optional_file('owner/name', None, 'README.md'))"


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    """Answers with the statuses in `answers`, each with its Retry-After, then 404; `times` is when. A status
    of 0 is no answer."""

    class Asked(Handler):
        def do_HEAD(self) -> None:
            server.times.append(time.monotonic())
            status, told = server.answers.pop(0) if server.answers else (404, None)
            if status == 0:
                self.close_connection = True
                return
            self.answer(status, headers={} if told is None else {"Retry-After": told})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    server.answers, server.times = [], []
    with served(server):
        yield server


def run(code: str, port: int, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own: the Hub's address is read at import."""
    environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(cache)}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_hub_that_says_when_to_come_back_is_asked_then(hub, tmp_path: Path) -> None:
    hub.answers += [(429, "2"), (503, "1")]
    done = run(CHECK, hub.server_port, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = hub.times
    assert second - first >= 2
    assert third - second >= 1
    assert "answers 429 for model 'owner/name': asked again in 2 s" in done.stderr


@pytest.mark.parametrize("answer", [(404, None), (401, "5"), (403, "5"), (503, None)])
def test_an_answer_that_names_no_time_is_asked_for_once(hub, tmp_path: Path, answer) -> None:
    hub.answers.append(answer)
    assert run(CHECK, hub.server_port, tmp_path).returncode == 0
    assert len(hub.times) == 1


def test_a_hub_that_asks_for_more_than_is_waited_is_refused_with_the_time(hub, tmp_path: Path) -> None:
    hub.answers.append((429, "3600"))
    done = run(CHECK, hub.server_port, tmp_path)
    assert done.returncode == 1
    assert "answers 429 and asks to come back in 3600 s, more than the 900 s that are waited" in done.stderr


def test_a_card_out_of_reach_is_asked_for_once(hub, tmp_path: Path) -> None:
    hub.answers += [(0, None)] * 9
    assert run(CARD, hub.server_port, tmp_path).stdout == "None\n"
    assert len(hub.times) == 1
