"""The event loop of unit tests: asyncio's own, or one of virtual time where a test is marked so. No property
test has a deadline: a busy machine breaks no rule."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import hypothesis
import pytest
from virtual_time import VirtualTimeLoop, now

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


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
