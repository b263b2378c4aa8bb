"""What is asked of the Hub before its libraries: when it says to come back, it is asked then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from ports import Handler, served

from sync.base.errors import ConfigError
from sync.base.hub import check_reachable, optional_file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """The Hub of this process, whose cache is empty: answers with the statuses in `answers`, each with its
    Retry-After, then 404; a status of 0 is no answer. Nobody waits: `pauses` has for how long."""

    class Asked(Handler):
        def do_HEAD(self) -> None:
            server.asked += 1
            status, told = server.answers.pop(0) if server.answers else (404, None)
            if status == 0:
                self.close_connection = True
                return
            self.answer(status, headers={} if told is None else {"Retry-After": told})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    server.answers, server.asked, server.pauses = [], 0, []
    at = f"http://127.0.0.1:{server.server_port}"
    constants = {"ENDPOINT": at, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": False}
    constants["HUGGINGFACE_CO_URL_TEMPLATE"] = at + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    clock = SimpleNamespace(sleep=server.pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("tenacity.nap.time", clock)
    with served(server):
        yield server


def test_a_hub_that_says_when_to_come_back_is_asked_then(hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.answers += [(429, "2"), (503, "1")]
    check_reachable("owner/name", None, "model")
    assert (hub.asked, hub.pauses) == (3, [2.0, 1.0])
    assert "answers 429 and asks to come back in 2 s" in caplog.text


@pytest.mark.parametrize("answer", [(404, None), (401, "5"), (403, "5"), (503, None)])
def test_an_answer_that_names_no_time_is_asked_for_once(hub, answer: tuple[int, str | None]) -> None:
    hub.answers.append(answer)
    check_reachable("owner/name", None, "model")
    assert (hub.asked, hub.pauses) == (1, [])


def test_a_hub_that_asks_for_more_than_is_waited_is_refused_with_the_time(hub) -> None:
    hub.answers.append((429, "3600"))
    why = "answers 429 and asks to come back in 3600 s, more than the 900 s that are waited"
    with pytest.raises(ConfigError, match=why):
        check_reachable("owner/name", None, "model")


def test_a_card_out_of_reach_is_asked_for_once(hub) -> None:
    hub.answers += [(0, None)] * 9
    assert optional_file("owner/name", None, "README.md") is None
    assert hub.asked == 1
