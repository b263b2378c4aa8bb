"""Typed decoders are built by one thread at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, msgspec
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from sync.base.decoding import convert, json_decoder, msgpack_decoder

class Inner(msgspec.Struct):
    number: int = 0
    names: "list[str]" = []
    sizes: "dict[str, int] | None" = None

class Middle(msgspec.Struct, tag="middle"):
    all: "tuple[Inner, ...]" = ()
    one: "Inner | None" = None
    named: "dict[str, Inner]" = {}

class Outer(msgspec.Struct, tag="outer"):
    all: "tuple[Middle, ...]" = ()
    one: "Middle | None" = None
    rest: "list[Inner]" = []

inner = {"number": 1, "names": ["a"], "sizes": {"a": 1}}
middle = {"type": "middle", "all": [inner], "one": inner, "named": {"a": inner}}
outer = {"type": "outer", "all": [middle], "one": middle, "rest": [inner]}
VALUES = {Outer: outer, Middle: middle, Outer | Middle: outer, Inner: inner}

def decode(start):
    start.wait()
    for kind, value in VALUES.items():
        msgpack_decoder(kind).decode(msgspec.msgpack.encode(value))
        json_decoder(kind).decode(msgspec.json.encode(value))
        convert(value, kind)

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as threads:
    list(threads.map(decode, [Barrier(8)] * 8))
"""


def test_threads_that_meet_a_message_at_once_decode_it() -> None:
    """Without the lock, about one in five of these processes dies by SIGSEGV."""
    root = Path(__file__).parents[3]
    programs = [subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=root) for _ in range(24)]
    assert [program.wait(600) for program in programs] == [0] * 24
