"""What holds for every unit test: its event loop, its time limit, the examples of property tests.

The loop is asyncio's own, or one of virtual time where a test is marked so. A property test has no deadline:
a busy machine breaks no rule. Its examples are the same every time, and others with
`pytest tests/unit --hypothesis-profile=search`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from virtual_time import VirtualTimeLoop, now

hypothesis.settings.register_profile("search", deadline=None, derandomize=False)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same")
HANGS_SECONDS = 600
"""What takes so long hangs: the slowest takes 42 s beside the rest of `make test` on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(HANGS_SECONDS))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """`@pytest.mark.virtual_time` chooses the loop."""
    virtual = item.get_closest_marker("virtual_time") is not None
    return {"loop": VirtualTimeLoop if virtual else asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _clocks_follow_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("virtual_time") is not None:
        VirtualTimeLoop.newest = None
        epoch, monotonic = time.time(), time.monotonic
        virtual = lambda: monotonic() if VirtualTimeLoop.newest is None else now()  # noqa: E731
        monkeypatch.setattr(time, "monotonic", virtual)
        monkeypatch.setattr(time, "time", lambda: epoch + virtual())
