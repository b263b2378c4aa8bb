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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ports import answering
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

RECORD = 48
END = b"\xff" * 32


class Segment(NamedTuple):
    """Chunks [first, last) of a xorb, which are `size` bytes of a file."""

    xorb: str
    size: int
    first: int
    last: int


# --- formats ----------------------------------------------------------------------------------------------


def hex_hash(raw: bytes) -> str:
    """Xet writes a hash as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def chunk_offsets(body: bytes) -> list[int]:
    """Where each chunk of a xorb begins; the last is their end."""
    offsets, at = [0], 0
    while at + 8 <= len(body) and not body.startswith(b"XETBLOB", at):
        at += 8 + int.from_bytes(body[at + 1 : at + 4], "little")
        offsets.append(at)
    return offsets


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


def byte_range(request: Request, size: int) -> tuple[int, int]:
    """[start, end) of the Range header; everything without one."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    return (int(found[1]), min(int(found[2] or size - 1) + 1, size)) if found else (0, size)


def bucket_of(request: Request) -> str:
    return "{owner}/{name}".format(**request.path_params)


# --- server -----------------------------------------------------------------------------------------------


class Hub:
    """State of the server, which its one thread changes, and what a test may do to it."""

    def __init__(self) -> None:
        self.base = ""
        """Address of the server; a test may put a proxy's here."""
        self.xorbs: dict[str, bytes] = {}
        self.files: dict[str, list[Segment]] = {}
        self.buckets: dict[str, dict[str, str]] = {}
        """Name → path → hash of the file."""

    def app(self) -> Starlette:
        bucket = "/api/buckets/{owner}/{name}"
        routes = [
            ("POST", "/v1/xorbs/default/{xorb}", self.put_xorb),
            ("POST", "/v1/shards", self.put_shard),
            ("GET", "/v1/reconstructions/{file}", self.reconstruction),
            ("GET", "/xorb/{xorb}", self.xorb),
            ("GET", f"{bucket}/xet-{{kind}}-token", self.token),
            ("POST", f"{bucket}/batch", self.batch),
            ("POST", f"{bucket}/paths-info", self.paths_info),
            ("GET", f"{bucket}/tree", self.tree),
            ("GET", f"{bucket}/tree/{{prefix:path}}", self.tree),
            ("POST", bucket, self.create),
            ("GET", bucket, self.info),
            ("GET", "/buckets/{owner}/{name}/resolve/{path:path}", self.resolve),
        ]
        return Starlette(routes=[Route(path, does, methods=[method]) for method, path, does in routes])

    # --- the Xet store

    async def put_xorb(self, request: Request) -> Response:
        name, xorb = request.path_params["xorb"], await request.body()
        return JSONResponse({"was_inserted": self.xorbs.setdefault(name, xorb) is xorb})

    async def put_shard(self, request: Request) -> Response:
        self.files |= read_shard(await request.body())
        return JSONResponse({"result": 1})

    async def reconstruction(self, request: Request) -> Response:
        """Whole segments with bytes [start, end) of a file, and where their chunks are."""
        file = request.path_params["file"]
        start, end = byte_range(request, self.size(file))
        terms, ranges, at, skip = [], dict[str, tuple[int, int]](), 0, 0
        for name, size, first, last in self.files[file]:
            if at < end and at + size > start:
                skip = skip if terms else start - at
                terms.append({"hash": name, "unpacked_length": size, "range": {"start": first, "end": last}})
                low, high = ranges.get(name, (first, last))
                ranges[name] = (min(low, first), max(high, last))
            at += size
        fetch = {}
        for name, (first, last) in ranges.items():
            offsets = chunk_offsets(self.xorbs[name])
            place = {"url": f"{self.base}/xorb/{name}", "range": {"start": first, "end": last}}
            fetch[name] = [place | {"url_range": {"start": offsets[first], "end": offsets[last] - 1}}]
        return JSONResponse({"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch})

    def size(self, file: str) -> int:
        return sum(segment.size for segment in self.files[file])

    async def xorb(self, request: Request) -> Response:
        body = self.xorbs[request.path_params["xorb"]]
        start, end = byte_range(request, len(body))
        return Response(body[start:end], 206, {"content-range": f"bytes {start}-{end - 1}/{len(body)}"})

    async def token(self, request: Request) -> Response:
        expires = int(time.time()) + 3600
        return JSONResponse({"casUrl": self.base, "accessToken": "token", "exp": expires})

    # --- the bucket

    async def create(self, request: Request) -> Response:
        name = bucket_of(request)
        status = 409 if name in self.buckets else 200
        self.buckets.setdefault(name, {})
        return JSONResponse({"url": f"{self.base}/buckets/{name}"}, status)

    async def info(self, request: Request) -> Response:
        name = bucket_of(request)
        if name not in self.buckets:
            return JSONResponse({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        info = {"id": name, "private": True, "createdAt": "1970-01-01T00:00:00.000Z"}
        return JSONResponse(info | {"size": 0, "totalFiles": 0})

    async def batch(self, request: Request) -> Response:
        files = self.buckets[bucket_of(request)]
        for operation in map(json.loads, (await request.body()).splitlines()):
            if operation["type"] == "deleteFile":
                files.pop(operation["path"], None)
            else:
                files[operation["path"]] = operation["xetHash"]
        return JSONResponse({"success": True, "failed": []})

    async def paths_info(self, request: Request) -> Response:
        files, asked = self.buckets[bucket_of(request)], (await request.json())["paths"]
        return JSONResponse([self.described(path, files[path]) for path in asked if path in files])

    def described(self, path: str, file: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "xetHash": file, "size": self.size(file)}

    async def tree(self, request: Request) -> Response:
        """Files and folders below a prefix; not `recursive`: those that lie in it."""
        prefix = request.path_params.get("prefix")
        start = f"{prefix}/" if prefix else ""
        files = {
            name: one for name, one in self.buckets[bucket_of(request)].items() if name.startswith(start)
        }
        folders = {str(folder) for name in files for folder in PurePosixPath(name).parents} - {"."}
        found = [{"type": "directory", "path": path} for path in sorted(folders) if path.startswith(start)]
        found += [self.described(path, file) for path, file in sorted(files.items())]
        if request.query_params.get("recursive", "").lower() != "true":
            found = [one for one in found if "/" not in one["path"].removeprefix(start)]
        return JSONResponse(found)

    async def resolve(self, request: Request) -> Response:
        file = self.buckets[bucket_of(request)][request.path_params["path"]]
        headers = {"X-Xet-Hash": file, "X-Linked-Size": str(self.size(file)), "ETag": f'"{file}"'}
        headers["X-Xet-Refresh-Route"] = f"{self.base}/api/buckets/{bucket_of(request)}/xet-read-token"
        return Response(headers=headers)


@contextmanager
def serve() -> Iterator[Hub]:
    """A running server's state; `base` is its address."""
    hub = Hub()
    with answering(hub.app()) as hub.base:
        yield hub
