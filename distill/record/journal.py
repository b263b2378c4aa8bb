"""Runs of the releases that kept a journal: what happened to them, written anew as rows and arrays.

    segment  "DJL3" | entry*                            journal/journal-00000000.log, …
    entry    "DJ" | u32 length | u32 crc32 | block      of records, oldest first
             "DS" | u32 length | u32 crc32 | u64        all before this offset was durable
    archive  "DA" | u32 length | u32 crc32 | block      journal/archive-00000000.log, in a segment's place

A crc32 also covers the place. Behind the last whole entry of the last segment may be what a crash tore.
"""

from __future__ import annotations

import logging
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from distill.buffer import Rules
from distill.prompts.stream import Cursor
from distill.record import changes as r
from distill.record.blocks import Column, Entries, filled
from distill.record.rollout import Rollout
from distill.record.state import RunState
from distill.record.store import RECORD, Store
from sync.base.decoding import convert
from sync.base.durable import rename
from sync.base.errors import DataError

JOURNAL: Final = "journal"  # in a run's folder
_MAGIC: Final = b"DJL3"
_HEAD: Final = struct.Struct("<2sII")
_PLACE: Final = struct.Struct("<2sIQQ")
_COMMIT: Final = 1000  # records that are written together
_KINDS: Final = {kind.__name__: kind for kind in r.Change.__subclasses__()}
logger = logging.getLogger(__name__)


async def import_journal(run_dir: Path, rules: Rules, keep_checkpoints: int) -> None:
    """Write run.db and arrays/ of a run that has a journal instead, which stays; else do nothing.

    `rules`: of the run that goes on. Raises DataError for a journal that is damaged, or of another release.
    """
    folder = run_dir / "importing"
    if (run_dir / RECORD).is_file() or not (run_dir / JOURNAL).is_dir():
        return
    for path in (folder, run_dir / "arrays"):
        shutil.rmtree(path, ignore_errors=True)  # of an import that was ended
    logger.warning("%s holds a journal: the record is made from it, once", run_dir)
    store, state = Store(folder), RunState(rules)
    store.facts = partial(r.facts, state)
    try:
        for record in _records(run_dir / JOURNAL):
            await _write(record, state, store, keep_checkpoints)
        await store.commit(durable=True)
        await store.free(state.files, store.file)
    finally:
        store.close()
    rename(folder / "arrays", run_dir / "arrays")
    rename(folder / RECORD, run_dir / RECORD)
    folder.rmdir()


async def _write(record: r.Change, state: RunState, store: Store, keep_checkpoints: int) -> None:
    """As a run did when it happened."""
    if isinstance(record, r.Opened):
        state.rules = replace(state.rules, batch=record.batch, bound=record.bound, group=record.group)
    store.begin()
    try:
        record.apply(state, store)
        if isinstance(record, r.Checkpointed):
            kept = state.kept(keep_checkpoints)
            if len(kept) == keep_checkpoints:
                store.begin()
                r.Covered(min(version.step for version in kept)).apply(state, store)
    except (LookupError, ValueError, AssertionError, ArithmeticError) as error:
        raise DataError(
            f"{type(record).__name__}, record {store.at} of the journal, contradicts those before it "
            f"({error!r}): go on with the release that began the run"
        ) from None
    if isinstance(record, r.Admitted) and record.rollout.id in state.buffer:
        state.buffer[record.rollout.id] = record.rollout.released()
    if store.at % _COMMIT == 0:
        await store.commit()


def _records(folder: Path) -> Iterator[r.Change]:
    named = [re.fullmatch(r"(?:journal|archive)-(\d{8,})\.log", path.name) for path in folder.iterdir()]
    numbers = sorted({int(name[1]) for name in named if name})
    if numbers != [*range(len(numbers))]:
        raise DataError(f"{folder} holds segments {numbers}: restore those that are missing from a copy")
    for number in numbers:
        path = folder / f"journal-{number:08d}.log"
        if path.is_file():  # else it is archived
            payloads = _payloads(path, number, last=number == numbers[-1])
        else:
            path = folder / f"archive-{number:08d}.log"
            payloads = iter([_payload(path.read_bytes(), 0, number, b"DA")])
        for payload in payloads:
            if payload is None:
                raise DataError(f"{path} is damaged: restore it from a copy")
            yield from _unpack(payload, path)


def _payload(data: bytes, offset: int, number: int, kind: bytes) -> bytes | None:
    """Of a whole entry of that kind; None: there is none."""
    if offset + _HEAD.size > len(data):
        return None
    magic, length, crc = _HEAD.unpack_from(data, offset)
    payload = data[offset + _HEAD.size :][:length]
    place = _PLACE.pack(kind, length, number, offset if kind == b"DJ" else 0)
    whole = magic == kind and len(payload) == length and zlib.crc32(payload, zlib.crc32(place)) == crc
    return payload if whole else None


def _payloads(path: Path, number: int, last: bool) -> Iterator[bytes | None]:
    """Of a segment's blocks, and None where it is damaged; what a crash has torn is left out."""
    data, offset = path.read_bytes(), len(_MAGIC)
    if not _MAGIC.startswith(data[:offset].rstrip(b"\0")):
        raise DataError(f"{path} begins with {data[:offset]!r}, not {_MAGIC!r}: it is of an older release")
    while offset < len(data):
        if (payload := _payload(data, offset, number, b"DJ")) is not None:
            yield payload
        elif (payload := _payload(data, offset, number, b"DS")) is None:
            later = (match.start() for match in re.finditer(b"DS", data[offset:]))
            durable = any(_payload(data, offset + place, number, b"DS") for place in later)
            if durable or not last:
                yield None
            return
        offset += _HEAD.size + len(payload)


def _unpack(payload: bytes, path: Path) -> Iterator[r.Change]:
    try:
        packed = payload[: len(zstandard.FRAME_HEADER)] == zstandard.FRAME_HEADER
        raw, columns = msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(payload) if packed else payload
        )
        rollouts = [convert(values, Rollout) for values in raw if values[0] == "Rollout"]
        whole = iter(filled(Entries([*rollouts], convert(columns, dict[str, Column]))))
        for name, *values in raw:
            if name == "Rollout":
                rollout = next(whole)
                assert isinstance(rollout, Rollout)
                yield r.Admitted(rollout)
            elif name != "Snapshot":  # of the state, which the records say too
                yield _record(name, values)
    except (msgspec.MsgspecError, zstandard.ZstdError, LookupError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} holds what this release cannot read ({error}): go on with the release that began the run"
        ) from None


def _record(name: str, values: list[Any]) -> r.Change:
    if name == "Issued":
        prompts, epoch, position, *by_teacher = values
        values = [prompts, Cursor(epoch, position), *by_teacher]
    kind = _KINDS[name]
    fields = dict(zip(kind.__struct_fields__, values, strict=False))
    return convert(fields, kind)
