"""A Hub bucket and its Xet store on loopback, in memory: what huggingface_hub and hf_xet ask for, no more.

Formats, as hf_xet sends them: a xorb is a row of chunks, each with a header of 8 bytes (version, compressed
length in 3 bytes, scheme, length in 3 bytes), and perhaps a footer that begins with "XETBLOB"; a shard is 48
bytes of header and then records of 48 bytes: a file, its segments (xorb, bytes, first chunk, last chunk + 1),
…, and a record of 0xFF that ends the files.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ports import Handler, served

RECORD = 48
END = b"\xff" * 32


class Segment(NamedTuple):
    """Chunks [first, last) of a xorb, which are `size` bytes of a file."""

    xorb: str
    size: int
    first: int
    last: int


class Xorb(NamedTuple):
    """Chunks as they were sent; offsets have one entry more than there are chunks."""

    body: bytes
    packed: list[int]
    unpacked: list[int]


class Entry(NamedTuple):
    """A file of a bucket."""

    hash: str
    size: int
    mtime: int


class Reply(NamedTuple):
    status: int
    body: bytes = b""
    headers: dict[str, str] = {}


@dataclass
class Hub:
    """State of the server, and what a test may do to it."""

    base: str = ""
    """Address of the server; a test may put a proxy's here."""
    xorbs: dict[str, Xorb] = field(default_factory=dict)
    files: dict[str, list[Segment]] = field(default_factory=dict)
    buckets: dict[str, dict[str, Entry]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def flip(self, least: int) -> None:
        """Change one stored byte in the middle of every xorb of at least `least` bytes.

        Where that byte is content that could not be compressed, nobody on the way notices.
        """
        large = {name: xorb for name, xorb in self.xorbs.items() if len(xorb.body) >= least}
        for name, xorb in large.items():
            body = bytearray(xorb.body)
            body[xorb.packed[-1] // 2] ^= 1
            self.xorbs[name] = xorb._replace(body=bytes(body))


# --- formats ----------------------------------------------------------------------------------------------


def hex_hash(raw: bytes) -> str:
    """Xet writes a hash as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def read_xorb(body: bytes) -> Xorb:
    packed, unpacked = [0], [0]
    while packed[-1] + 8 <= len(body) and not body.startswith(b"XETBLOB", packed[-1]):
        header = body[packed[-1] : packed[-1] + 8]
        packed.append(packed[-1] + 8 + int.from_bytes(header[1:4], "little"))
        unpacked.append(unpacked[-1] + int.from_bytes(header[5:8], "little"))
    return Xorb(body, packed, unpacked)


def read_shard(body: bytes) -> dict[str, list[Segment]]:
    """Files of a shard, by hash."""
    files, at = {}, RECORD
    while (name := body[at : at + 32]) != END:
        flags, count = struct.unpack_from("<II", body, at + 32)
        at += RECORD
        segments = []
        for _ in range(count):
            xorb, _, size, first, last = struct.unpack_from("<32sIIII", body, at)
            segments.append(Segment(hex_hash(xorb), size, first, last))
            at += RECORD
        at += RECORD * count if flags & 1 << 31 else 0  # verification of each segment
        at += RECORD if flags & 1 << 30 else 0  # metadata
        files[hex_hash(name)] = segments
    return files


def reconstruct(hub: Hub, file: str, start: int, end: int) -> dict[str, object]:
    """Answer to "which chunks make up bytes [start, end) of this file, and where are they"."""
    terms, ranges, at, skip = [], {}, 0, None
    for xorb_hash, size, first, last in hub.files[file]:
        begin, finish = at, at + size
        at = finish
        if finish <= start or begin >= end:
            continue
        sizes = hub.xorbs[xorb_hash].unpacked
        while begin + sizes[first + 1] - sizes[first] <= start:
            begin += sizes[first + 1] - sizes[first]
            first += 1
        while finish - (sizes[last] - sizes[last - 1]) >= end:
            finish -= sizes[last] - sizes[last - 1]
            last -= 1
        skip = start - begin if skip is None else skip
        chunks = {"start": first, "end": last}
        terms.append({"hash": xorb_hash, "unpacked_length": finish - begin, "range": chunks})
        low, high = ranges.get(xorb_hash, (first, last))
        ranges[xorb_hash] = (min(low, first), max(high, last))
    fetch = {}
    for name, (first, last) in ranges.items():
        packed = hub.xorbs[name].packed
        where = {"start": packed[first], "end": packed[last] - 1}
        fetch[name] = [
            {"range": {"start": first, "end": last}, "url": f"{hub.base}/xorb/{name}", "url_range": where}
        ]
    return {"offset_into_first_range": skip or 0, "terms": terms, "fetch_info": fetch}


# --- routes -----------------------------------------------------------------------------------------------


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"content-type": "application/json", **(headers or {})})


def not_found(code: str) -> Reply:
    return as_json({"error": "not found"}, 404, {"X-Error-Code": code})


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def describe(path: str, entry: Entry) -> dict[str, object]:
    when = stamp(entry.mtime / 1000)
    kind = {"type": "file", "path": path, "xetHash": entry.hash, "size": entry.size}
    return {**kind, "mtime": when, "uploadedAt": when}


def put_xorb(hub: Hub, request: Request, name: str) -> Reply:
    with hub.lock:
        fresh = name not in hub.xorbs
        hub.xorbs.setdefault(name, read_xorb(request.body))
    return as_json({"was_inserted": fresh})


def put_shard(hub: Hub, request: Request) -> Reply:
    with hub.lock:
        hub.files.update(read_shard(request.body))
    return as_json({"result": 1})


def get_reconstruction(hub: Hub, request: Request, file: str) -> Reply:
    with hub.lock:
        if file not in hub.files:
            return not_found("EntryNotFound")
        size = sum(segment.size for segment in hub.files[file])
        start, end = request.byte_range(size)
        return Reply(416) if start >= size else as_json(reconstruct(hub, file, start, end))


def get_xorb(hub: Hub, request: Request, name: str) -> Reply:
    body = hub.xorbs[name].body
    start, end = request.byte_range(len(body))
    span = f"bytes {start}-{end - 1}/{len(body)}"
    return Reply(206, body[start:end], {"content-range": span})


def get_token(hub: Hub, request: Request, bucket: str) -> Reply:
    expires = str(int(time.time()) + 3600)
    headers = {"X-Xet-Cas-Url": hub.base, "X-Xet-Access-Token": "token", "X-Xet-Token-Expiration": expires}
    return as_json({"casUrl": hub.base, "accessToken": "token", "exp": int(expires)}, headers=headers)


def batch(hub: Hub, request: Request, bucket: str) -> Reply:
    failed, operations = [], [json.loads(line) for line in request.body.splitlines()]
    with hub.lock:
        files = hub.buckets[bucket]
        for operation in operations:
            path, content = operation["path"], operation.get("xetHash")
            if operation["type"] == "deleteFile":
                files.pop(path, None)
            elif content not in hub.files:
                failed.append({"path": path, "error": f"unknown xet hash {content}"})
            else:
                size = sum(segment.size for segment in hub.files[content])
                files[path] = Entry(content, size, operation["mtime"])
    return as_json({"success": not failed, "failed": failed}, 422 if failed else 200)


def paths_info(hub: Hub, request: Request, bucket: str) -> Reply:
    files = hub.buckets[bucket]
    return as_json(
        [describe(path, files[path]) for path in json.loads(request.body)["paths"] if path in files]
    )


def tree(hub: Hub, request: Request, bucket: str, prefix: str | None) -> Reply:
    start, found, folders = f"{prefix}/" if prefix else "", [], set()
    with hub.lock:
        for path, entry in sorted(hub.buckets[bucket].items()):
            folder, _, rest = path.removeprefix(start).partition("/")
            if not path.startswith(start):
                continue
            if rest and "recursive=true" not in request.query.lower():
                folders.add(start + folder)
            else:
                found.append(describe(path, entry))
    listed = [{"type": "directory", "path": path, "uploadedAt": stamp(0)} for path in sorted(folders)]
    return as_json(listed + found)


def bucket(hub: Hub, request: Request, name: str) -> Reply:
    with hub.lock:
        if request.method == "POST":
            exists = name in hub.buckets
            hub.buckets.setdefault(name, {})
            return as_json({"url": f"{hub.base}/buckets/{name}"}, 409 if exists else 200)
        if name not in hub.buckets:
            return not_found("RepoNotFound")
        size = sum(entry.size for entry in hub.buckets[name].values())
        info = {"id": name, "private": True, "createdAt": stamp(0), "size": size}
        return as_json({**info, "totalFiles": len(hub.buckets[name])})


def resolve(hub: Hub, request: Request, name: str, path: str) -> Reply:
    entry = hub.buckets[name].get(path)
    if entry is None:
        return not_found("EntryNotFound")
    route = f"{hub.base}/api/buckets/{name}/xet-read-token"
    headers = {"X-Xet-Hash": entry.hash, "X-Xet-Refresh-Route": route, "X-Linked-Size": str(entry.size)}
    return Reply(200, b"", {**headers, "ETag": f'"{entry.hash}"'})


NAME = r"([^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[..., Reply]]] = [
    (r"/v1/xorbs/default/([0-9a-f]{64})", put_xorb),
    (r"/v1/shards", put_shard),
    (r"/v1/reconstructions/([0-9a-f]{64})", get_reconstruction),
    (r"/xorb/([0-9a-f]{64})", get_xorb),
    (rf"/api/buckets/{NAME}/xet-(?:read|write)-token", get_token),
    (rf"/api/buckets/{NAME}/batch", batch),
    (rf"/api/buckets/{NAME}/paths-info", paths_info),
    (rf"/api/buckets/{NAME}/tree(?:/(.*))?", tree),
    (rf"/api/buckets/{NAME}", bucket),
    (rf"/buckets/{NAME}/resolve/(.+)", resolve),
]


class Request(NamedTuple):
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    def byte_range(self, size: int) -> tuple[int, int]:
        """[start, end) of the Range header; everything without one."""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if not found:
            return 0, size
        return int(found[1]), min(int(found[2] or size - 1) + 1, size)


def dispatch(hub: Hub, request: Request) -> Reply:
    for pattern, route in ROUTES:
        if found := re.fullmatch(pattern, request.path):
            return route(hub, request, *found.groups())
    return not_found("RouteNotFound")


# --- server -----------------------------------------------------------------------------------------------


class BucketHandler(Handler):
    hub: Hub

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(url.path), url.query, headers, self.body())
        reply = dispatch(self.hub, request)
        self.answer(reply.status, reply.body, reply.headers)

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = handle_any


@contextmanager
def serve() -> Iterator[Hub]:
    """A running server's state; `base` is its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (BucketHandler,), {"hub": hub}))
    hub.base = f"http://127.0.0.1:{server.server_address[1]}"
    with served(server):
        yield hub


if __name__ == "__main__":  # print the address, end with standard input
    with serve() as running:
        sys.stdout.write(f"{running.base}\n")
        sys.stdout.flush()
        sys.stdin.read()
