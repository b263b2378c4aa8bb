"""The files of a run's record: facts are rows of `run.db`, arrays blocks in `arrays/`; one thread writes.

    execute, add_arrays ──▶ list of a commit ──▶ blocks to arrays/NNNNNNNN.bin, fdatasync ──▶ BEGIN … COMMIT

Bytes come before the row that names them: what a crash leaves behind the last row is garbage that nothing
reads, and a row without its bytes cannot be durable. Every start begins a file of its own. A full disk undoes
the transaction, and the same list is repeated until there is space.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sqlite3
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal
from urllib.parse import quote

import msgspec
import zstandard

from distill import waits
from distill.record.blocks import pack_block, unpack_block
from distill.record.rollout import Block, Location, Rollout
from sync.base.durable import force, make_folder
from sync.base.errors import ConfigError, DataError, DistillError
from sync.base.formats import check_format
from sync.base.mounts import network_mount

RECORD: Final = "run.db"  # in a run's folder
FORMAT: Final = 2  # of run.db, whose user_version it is, and of arrays/
BUSY_SECONDS: Final = 30.0  # how long a start waits for readers that copy run.db
_BLOCK_BYTES: Final = 256 << 10  # of a block's records: what is decompressed to read one of them
_FACT: Final = "INSERT INTO fact VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_Statement = tuple[str, tuple[Any, ...]]
"""SQL and its parameters; a Location, the last of them, becomes its block and place."""
logger = logging.getLogger(__name__)


def open_read_only(path: Path) -> sqlite3.Connection:
    """A run's database for questions, while its controller writes it or afterwards.

    `path`: run.db. Raises DataError when it is missing, damaged or of another format, RemoteError when its
    controller has locked it and gives no copy.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing: name the folder of a run that this release began")
    still = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if still else ''}"
    with _readable(path):
        if still or not network_mount(path.parent):
            connection = sqlite3.connect(address, uri=True, isolation_level=None)
        else:
            from distill.record.copies import open_copy  # and with it an HTTP client

            connection = open_copy(path)
        _check_format(connection, path)
    return connection


def last_at(connection: sqlite3.Connection) -> int:
    """Number of the last record; 0: none."""
    row = connection.execute("SELECT value FROM fact WHERE key = 'at'").fetchone()
    return int(row[0]) if row else 0


def other_controller(folder: Path) -> DataError:
    """What a controller raises when another one has written to the record meanwhile."""
    return DataError(
        f"another controller has written to {folder / RECORD} since this one began, and one alone may: this "
        "one stops, and what it did last is not on record; look for the other one, on other machines too, "
        "and leave one running"
    )


def arrays_path(folder: Path, number: int) -> Path:
    """File of arrays `number` in a run's folder."""
    return folder / "arrays" / f"{number:08d}.bin"


def reader(folder: Path) -> Callable[[Location], Rollout]:
    """Gives a committed rollout with its arrays, or its prompt. Raises DataError where the file is missing or
    damaged."""

    @lru_cache(maxsize=4)
    def entries(block: Block) -> list[Rollout]:
        where = f"{arrays_path(folder, block.file)} at byte {block.start}"
        return unpack_block(read_bytes(folder, block), where)

    def read(location: Location) -> Rollout:
        assert location.block is not None, "what is read was committed"
        return entries(location.block)[location.place]

    return read


class Store:
    """`run.db` and `arrays/` in `folder`; one writer.

    Nothing is on disk until the `commit()` that follows returns. When the disk is full, `commit()` waits
    until there is space, and with it everybody who needs it. Raises DataError for a damaged database.
    """

    def __init__(
        self,
        folder: Path,
        fsync: Literal["always", "batch", "never"] = "batch",
        file_bytes: int = 64 << 20,
        retry_seconds: float = 5.0,
        write: Callable[[int, memoryview], int] = os.write,
    ) -> None:
        make_folder(folder / "arrays")
        self.folder, self._fsync = folder, fsync
        self._file_bytes, self._retry_seconds, self._write = file_bytes, retry_seconds, write
        self.facts: Callable[[], dict[str, Any]] = dict
        """The small facts that a commit writes anew, beside the number of the newest change."""
        self._items: list[_Statement] = []
        self._changed = False  # something was added that no commit has taken
        self._arrays: list[tuple[Rollout, Location]] = []
        self._lists = deque[tuple[list[_Statement], list[tuple[Rollout, Location]], bool]]()
        self._blocks: list[Block] = []
        """Whose rows no transaction has committed."""
        self._writer = ThreadPoolExecutor(1, "record")
        self._compressor = zstandard.ZstdCompressor(level=1)  # making one costs more than a small block
        self._unsynced = False  # a transaction was committed that a power cut may undo
        self._unsynced_bytes = False  # in the newest file of arrays
        self.file = max((int(path.stem) for path in (folder / "arrays").glob("*.bin")), default=-1) + 1
        """Number of the newest file of arrays: what is not committed yet will be in this one or a newer."""
        self._file, self._size = -1, 0
        self.read = reader(folder)
        path = folder / RECORD
        self.connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        with _readable(path):
            if mount := network_mount(folder):  # the log's index in shared memory does not work there
                logger.warning(
                    "%s is on a network file system (%s): the record is locked, and its readers get copies "
                    "from the controller while the run goes on", folder, mount,
                )  # fmt: skip
                self.connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.connection.execute("PRAGMA journal_mode = WAL")
            if not self.connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                schema = (files("distill.record") / "schema.sql").read_text()
                self.connection.executescript(f"BEGIN; {schema} PRAGMA user_version = {FORMAT}; COMMIT")
            _check_format(self.connection, path)
            self.at = self._committed_at = last_at(self.connection)
            """Number of the newest change, and of the newest on disk, unless another controller writes."""
            self._row, self._block = (
                self.connection.execute(f"SELECT 1 + coalesce(max({key}), -1) FROM {table}").fetchone()[0]
                for key, table in (("row", "rollout_row"), ("number", "block"))
            )
            self._names: dict[str | None, int | None] = {
                name: number for number, name in self.connection.execute("SELECT number, name FROM name")
            }
            self._names[None] = None

    def begin(self) -> None:
        """Begin what changes with the next record; the facts change with it, also where no row does."""
        self.at += 1
        self._changed = True

    def execute(self, sql: str, *parameters: Any) -> None:
        """Queue a statement for the next commit. A Location at the end stands for its block and place."""
        self._items.append((sql, parameters))

    def insert(self, table: str, *values: Any) -> None:
        self.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", *values)

    def name(self, name: str | None) -> int | None:
        """The number of a name that rollouts have often."""
        if name not in self._names:
            self._names[name] = number = len(self._names)
            self.insert("name", number, name)
        return self._names[name]

    def new_row(self) -> int:
        """The row of a rollout that was not on record."""
        self._row += 1
        return self._row - 1

    def add_arrays(self, entry: Rollout, row: int) -> Location:
        """Queue arrays of a rollout, or its prompt, for the next commit; returns where they will be."""
        location = Location(None, 0, row)
        self._arrays.append((entry, location))
        return location

    async def commit(self, *, durable: bool = False) -> None:
        """Write what was added. `durable`: a power cut cannot undo it, also under fsync "batch".

        A cancelled commit may still write; the next one writes what it left.
        """
        forced = self._fsync == "always" or (durable and self._fsync == "batch")
        if self._changed or (forced and (self._unsynced or self._lists)):
            for key, value in {"at": self.at, **self.facts()}.items():
                self.execute(_FACT, key, msgspec.json.encode(value).decode())
            self._lists.append((self._items, self._arrays, forced))
            self._items, self._arrays, self._changed = [], [], False
        if self._lists:
            flush = partial(asyncio.get_running_loop().run_in_executor, self._writer, self._flush)
            what, retry = f"the record in {self.folder}", self._retry_seconds
            await waits.for_space(waits.RECORD, what, flush, retry_seconds=retry)

    async def free(self, needed: Collection[int], before: int) -> None:
        """Remove the files of arrays older than file `before` that are not `needed`."""

        def remove() -> None:
            for path in (self.folder / "arrays").glob("*.bin"):
                if int(path.stem) < before and int(path.stem) not in needed:
                    path.unlink()

        await asyncio.get_running_loop().run_in_executor(self._writer, remove)

    async def copy(self) -> BinaryIO:
        """A copy of run.db as of the last commit; it has no name. Commits wait meanwhile.

        Raises DataError when there is no room for it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._copy)

    def close(self) -> None:
        """Release the files; nothing that waits for a commit is written."""
        self._writer.shutdown()
        self.connection.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- in the writer's thread ---------------------------------------------------------------------------

    def _flush(self) -> None:
        lists = list(self._lists)  # of other commits too, and more may be added meanwhile
        if not lists:
            return
        forced = any(forced for *_, forced in lists)
        self._write_arrays([entry for _, arrays, _ in lists for entry in arrays if entry[1].block is None])
        level = "OFF" if self._fsync == "never" else "FULL" if forced else "NORMAL"
        execute = self.connection.execute
        execute(f"PRAGMA synchronous = {level}")
        try:
            execute("BEGIN IMMEDIATE")
            if last_at(self.connection) != self._committed_at:
                raise other_controller(self.folder)
            new = map(msgspec.structs.astuple, self._blocks)
            self.connection.executemany("INSERT INTO block VALUES (?, ?, ?, ?, ?)", new)
            statements = itertools.chain.from_iterable(items for items, *_ in lists)
            for sql, same in itertools.groupby(statements, itemgetter(0)):
                self.connection.executemany(sql, (_bound(*parameters) for _, parameters in same))
            at = last_at(self.connection)
            execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                execute("ROLLBACK")
            raise
        self._committed_at, self._unsynced = at, (self._unsynced and not forced) or level == "NORMAL"
        self._blocks.clear()
        for _ in lists:
            self._lists.popleft()

    def _write_arrays(self, waiting: list[tuple[Rollout, Location]]) -> None:
        """Append the blocks of these and sync them; sets their locations."""
        done = 0
        while done < len(waiting):
            entries = (entry for entry, _ in itertools.islice(waiting, done, None))
            payload, count = pack_block(entries, _BLOCK_BYTES, self._compressor)
            start = self._append(payload)
            block = Block(self._block, self.file, start, len(payload), zlib.crc32(payload))
            self._blocks.append(block)
            self._block += 1
            for place in range(count):
                location = waiting[done + place][1]
                location.place, location.block = place, block
            done += count
        self._sync()

    def _sync(self) -> None:
        if self._unsynced_bytes and self._fsync != "never":
            os.fdatasync(self._file)
        self._unsynced_bytes = False

    def _append(self, payload: bytes) -> int:
        """First byte of the payload in the newest file; a partial write is truncated again."""
        if self._file >= 0 and self._size + len(payload) > self._file_bytes and self._size:
            self._sync()
            os.close(self._file)
            self._file, self._size, self.file = -1, 0, self.file + 1
        while self._file < 0:
            path, flags = arrays_path(self.folder, self.file), os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                self._file = os.open(path, flags | os.O_APPEND, 0o644)
                force(path.parent)
            except FileExistsError:  # of another controller, which the transaction will find
                self.file += 1
        rest, self._unsynced_bytes = memoryview(payload), True
        try:
            while rest:
                rest = rest[self._write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(payload)
        return self._size - len(payload)

    def _copy(self) -> BinaryIO:
        with tempfile.NamedTemporaryFile(prefix="run-", suffix=".db") as file:
            try:
                with closing(sqlite3.connect(file.name)) as copy:
                    copy.execute("PRAGMA synchronous = OFF")
                    self.connection.backup(copy)
            except sqlite3.OperationalError as error:
                raise DataError(
                    f"no copy of the record can be made in {file.name} ({error}): set TMPDIR"
                ) from None
            return open(file.name, "rb")


def _bound(*parameters: Any) -> tuple[Any, ...]:
    *others, last = parameters
    if not isinstance(last, Location):
        return parameters
    assert last.block is not None, "arrays are written before the rows that name them"
    return (*others, last.block.number, last.place)


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    check_format(path, connection.execute("PRAGMA user_version").fetchone()[0], FORMAT)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the system or SQLite says of a file that is gone, damaged or locked into a DataError."""
    try:
        yield
    except DistillError:
        raise
    except (sqlite3.DatabaseError, ValueError, OSError) as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
            raise ConfigError(
                f"{path} is locked by another process: wait for the controller or the reader that has it"
            ) from None
        raise DataError(
            f"{path} cannot be read ({error}): restore the file from a copy, or start a new run"
        ) from None


def read_bytes(folder: Path, block: Block) -> bytes:
    """A block of arrays, packed. Raises DataError where the file is missing or damaged."""
    path = arrays_path(folder, block.file)
    with _readable(path), path.open("rb") as file:
        file.seek(block.start)
        payload = file.read(block.size)
    if len(payload) != block.size or zlib.crc32(payload) != block.crc:
        raise DataError(
            f"{path} is damaged in the {block.size} bytes from {block.start} on: restore the file from a "
            "copy, or start a new run"
        )
    return payload
