"""Every store of a run, opened for a bench; a server that one needs runs on loopback, in its own process.

The bucket server is part of the tests, and moto of the development tools: without them the store is skipped,
and says why.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from sync.errors import ConfigError
from sync.stores import Store
from sync.stores.directory import DirectoryStore
from sync.stores.xet import XetStore

_SUPPORT: Final = Path(__file__).parents[3] / "tests" / "support"
_BUCKET_SERVER: Final = f"""
import sys
sys.path.insert(0, {str(_SUPPORT)!r})
import bucket_server
with bucket_server.serve() as hub:
    print(hub.base, flush=True)
    sys.stdin.read()
"""
_S3_SERVER: Final = """
import logging, sys, urllib.request
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
address = "http://{}:{}".format(*server.get_host_and_port())
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(urllib.request.Request(address + "/bucket", method="PUT"))
print(address, flush=True)
sys.stdin.read()
server.stop()
"""


class Skipped(Exception):
    """This store cannot be opened here, for the reason given."""


@contextmanager
def _directory(work: Path) -> Iterator[Store]:
    yield DirectoryStore(work / "store")


@contextmanager
def _xet(work: Path) -> Iterator[Store]:
    yield XetStore(work / "store")


@contextmanager
def _bucket(work: Path) -> Iterator[Store]:
    if not (_SUPPORT / "bucket_server.py").is_file():
        raise Skipped("the local bucket server is in tests/support: run from a source checkout")
    from sync.stores.bucket import BucketStore

    with _server(_BUCKET_SERVER, work / "bucket.log") as address:
        yield BucketStore("bench/weights", work.name, endpoint=address, token="none")


@contextmanager
def _s3(work: Path) -> Iterator[Store]:
    if importlib.util.find_spec("moto") is None:
        raise Skipped("moto is missing: pip install 'onpolicy-distill[dev]'")
    try:
        from sync.stores.object_store import ObjectStore
    except ConfigError as error:
        raise Skipped(str(error)) from None
    with _server(_S3_SERVER, work / "s3.log") as address:
        keys = {"access_key_id": "key", "secret_access_key": "secret"}
        yield ObjectStore(f"s3://bucket/{work.name}", {"endpoint": address, "region": "us-east-1"} | keys)


STORES: Final[dict[str, Callable[[Path], AbstractContextManager[Store]]]] = {
    "directory": _directory,
    "xet": _xet,
    "bucket": _bucket,
    "s3": _s3,
}
"""Name → an empty store whose files, if any, are in the given folder. Entering raises Skipped."""


@contextmanager
def _server(script: str, log: Path) -> Iterator[str]:
    """Address that the script prints; the script ends with its standard input."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise Skipped(f"its server did not start:\n{log.read_text()[-500:]}")
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
