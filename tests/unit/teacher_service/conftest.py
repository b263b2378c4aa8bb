"""A teacher service on a real socket, over any engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from served_teacher import serving

Serve = Callable[..., AbstractAsyncContextManager[str]]


@pytest.fixture
def serve() -> Serve:
    """serve(engine, queue_tokens=, token=, port=, model=, claim=, body_bytes=): a context with the URL."""
    return serving
