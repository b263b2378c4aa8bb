"""moto's S3 on loopback with one bucket. A program of it prints the address and ends with its input."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from moto.server import ThreadedMotoServer


@contextmanager
def serve(bucket: str = "bucket") -> Iterator[str]:
    """Address of a server that has `bucket`."""
    logging.getLogger("werkzeug").disabled = True
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        httpx.put(f"{address}/{bucket}", trust_env=False).raise_for_status()
        yield address
    finally:
        server.stop()


if __name__ == "__main__":
    with serve(*sys.argv[1:]) as served:
        sys.stdout.write(f"{served}\n")
        sys.stdout.flush()
        sys.stdin.read()
