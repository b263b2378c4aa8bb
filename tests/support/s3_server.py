"""moto's S3 on loopback with one bucket.

moto looks for an object that a conditional put excludes, and puts it later: of two at once both win. S3
decides such a put at one moment, so here one put is handled after the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

_put, _putting = S3Response.put_object, threading.Lock()


def _put_in_turn(self: S3Response, *of: Any, **more: Any) -> Any:
    with _putting:
        return _put(self, *of, **more)


S3Response.put_object = _put_in_turn  # type: ignore[method-assign]


@contextmanager
def serve() -> Iterator[str]:
    """Address of a server that has a bucket named "bucket"."""
    logging.getLogger("werkzeug").disabled = True
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        httpx.put(f"{address}/bucket", trust_env=False, timeout=60).raise_for_status()
        yield address
    finally:
        server.stop()
