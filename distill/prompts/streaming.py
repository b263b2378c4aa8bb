"""Prompts of a dataset that is streamed: a block of rows in memory, the next one read ahead in a thread.

The rows of a block are shuffled among themselves; blocks come in the order of the dataset, pass after pass.
Which prompt has which index depends on dataset, seed, block size and filters alone. A resumed run finds the
beginning of its block in a file (the state of `datasets`), or without it by reading from the start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec
import numpy as np
from blake3 import blake3

from distill.config.prompts import DatasetPrompts
from distill.prompts.rows import Row, RowReader, dataset_rows, open_dataset
from distill.prompts.stream import LARGEST_SHARE, Prompt, content_of, held_out_of
from sync.base import durable
from sync.base.decoding import json_decoder
from sync.base.errors import ConfigError, DataError
from sync.base.formats import check_json_format

log = logging.getLogger(__name__)
KEPT_STARTS: Final = 8
"""Newest blocks whose beginning is remembered, and the first."""
FIRST: Final = 256
"""Rows that are read at the start, or more where so many are needed to hold prompts out; as many stay."""
FORMAT: Final = 2  # of the file; in 1 the state of a block that a resume began at was that of the first row


class BlockStart(msgspec.Struct, frozen=True):
    """Where a block begins."""

    epoch: int
    """Passes over the dataset before it."""
    row: int
    """Rows of this pass before it."""
    state: dict[str, Any] | None = None
    """`datasets.IterableDataset.state_dict()`; None: of a pass that begins."""


class Starts(msgspec.Struct):
    """Content of the file of `keep`."""

    stream: str
    """`StreamSource.identity`."""
    starts: dict[int, BlockStart]
    """Block → its beginning."""
    format: int = FORMAT


def saved_starts(folder: Path) -> dict[str, Starts]:
    """What the files of streams in a run's folder hold, by name; those that are damaged are left out.

    Raises DataError for a format that this release does not read.
    """
    starts: dict[str, Starts] = {}
    for path in sorted(folder.glob("stream-*.json")):
        data = path.read_bytes()
        check_json_format(path, data, FORMAT)
        try:
            starts[path.name] = json_decoder(Starts).decode(data)
        except msgspec.DecodeError as error:
            log.warning("%s cannot be used (%s): the rows are read from the start", path, error)
    return starts


class StreamSource:
    """Endless prompts by index. Indices rise; one far from those before costs a new search for its block."""

    def __init__(self, config: DatasetPrompts, reader: RowReader, seed: int) -> None:
        assert config.stream_rows is not None, "a dataset without it is read whole"
        self._config, self._reader, self._seed, self._size = config, reader, seed, config.stream_rows
        self._held_out = frozenset[bytes]()
        """`content_of` the prompts that no pass gives out."""
        self._blocks: dict[int, list[Prompt]] = {}
        self._first: dict[int, Prompt] = {}
        """Prompts that checks before and during a run sample, whatever its position."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._pending: Future[None] | None = None
        self._file: Path | None = None
        # of the thread that reads, and of `keep` before it
        self._starts = {0: BlockStart(0, 0)}
        self._block = -1
        """Block that `_following` gives next, without a search; -1: none."""
        self._following: Iterator[tuple[BlockStart, list[Prompt]]] = iter(())

    @property
    def identity(self) -> str:
        """Digest of what decides which prompt has which index."""
        settings = self._config.model_dump_json(), self._seed, sorted(self._held_out), self._reader.longest
        return blake3(msgspec.json.encode([FORMAT, *settings])).hexdigest()

    def without(self, prompts: Iterable[Prompt]) -> StreamSource:
        """This stream, which never gives out these prompts either; before the first one is asked for."""
        self._held_out |= {content_of(prompt.token_ids) for prompt in prompts}
        return self

    def keep(self, path: Path, saved: Starts | None) -> None:
        """Remember beginnings of blocks in a file, and take those of the same stream that were `saved`."""
        self._file = path
        if saved is None:
            return
        if saved.stream == self.identity:
            self._starts |= saved.starts
        else:
            log.warning("%s is of another stream: the rows are read from the start", path)

    def __getitem__(self, index: int) -> Prompt:
        """Waits for a block that is not in memory. Raises DataError when it cannot be read."""
        if index in self._first:
            return self._first[index]
        while (loading := self.loading(index, index)) is not None:
            loading.result()
        prompt = self._blocks[index // self._size][index % self._size]
        if index < FIRST:
            self._first[index] = prompt
        return prompt

    def loading(self, first: int, last: int) -> Future[None] | None:
        """What to wait for before prompts `first` to `last` are in memory; None: they are.

        Reads ahead, and forgets all blocks before `first` and after the one that follows `last`.
        """
        blocks = range(first // self._size, last // self._size + 2)
        pending = self._pending
        if pending is None or pending.done():
            self._blocks = {block: self._blocks[block] for block in blocks if block in self._blocks}
            missing = [block for block in blocks if block not in self._blocks]
            pending = self._pending = self._thread.submit(self._read, missing[0]) if missing else None
        ready = all(block in self._blocks for block in blocks[:-1])
        return None if ready else pending

    def _read(self, block: int) -> None:
        """Read a block into memory; in the thread, so that one read follows the other."""
        at, self._block = self._block, -1
        if at != block:
            at = max(known for known in self._starts if known <= block)
            self._following = self._blocks_from(self._starts[at])
        for number, (start, prompts) in enumerate(self._following, at):
            if number not in self._starts:
                newest = sorted(self._starts)[-KEPT_STARTS:]
                self._starts = {known: self._starts[known] for known in (0, *newest)} | {number: start}
            if number == block:
                order = np.random.default_rng([self._seed, block]).permutation(self._size)
                self._blocks[block] = [prompts[place] for place in order]
                break
        self._block = block + 1
        self._save()

    def _blocks_from(self, start: BlockStart) -> Iterator[tuple[BlockStart, list[Prompt]]]:
        """Blocks in the order of the dataset, each with its beginning, from this one on, pass after pass.

        Raises DataError when a whole pass gives no prompt.
        """
        begins, prompts = start, list[Prompt]()
        while True:
            dataset, read_before = open_dataset(self._config), self._reader.read - start.row
            if start.state is not None:
                dataset.load_state_dict(start.state)
            is_empty = start.row == 0
            for prompt in self._reader.usable(self._numbered(iter(dataset), start), first=start.row == 0):
                if content_of(prompt.token_ids) in self._held_out:
                    continue
                is_empty = False
                prompts.append(prompt)
                if len(prompts) == self._size:
                    yield begins, prompts
                    row = self._reader.read - read_before
                    begins, prompts = BlockStart(start.epoch, row, dataset.state_dict()), []
            if is_empty:
                raise DataError(
                    f"dataset {self._config.path!r} gives no prompt to train on in "
                    f"{self._reader.read - read_before} rows ({self._reader.note or 'all are held out'}): "
                    "change the filters, or give more rows"
                )
            if self._reader.note:
                log.warning("pass %d has ended; %s", start.epoch, self._reader.note)
            start = BlockStart(start.epoch + 1, 0)

    def _numbered(self, rows: Iterator[Any], start: BlockStart) -> Iterator[Row]:
        from datasets.exceptions import DatasetsError

        for number in count(start.row):
            place = f"{self._config.path} row {number}"
            try:
                fields = next(rows)
            except StopIteration:
                return
            except (OSError, ValueError, DatasetsError, httpx2.HTTPError) as error:
                raise DataError(
                    f"{place} cannot be read ({type(error).__name__}: {error}): resume the run when it can be"
                ) from error
            yield Row(place, f"{start.epoch}.{number}", fields)

    def _save(self) -> None:
        if self._file is not None and self._file.parent.is_dir():
            saved = Starts(self.identity, {block: start for block, start in self._starts.items() if block})
            try:
                durable.write(self._file, msgspec.json.encode(saved))
            except OSError as error:
                log.warning(
                    "%s is not written (%s): a resume reads the stream from the start", self._file, error
                )


def open_stream(
    config: DatasetPrompts, reader: RowReader, seed: int, held_out_count: int
) -> tuple[StreamSource, list[Prompt]]:
    """A stream, and prompts of its first rows, at most LARGEST_SHARE of those, that it never gives out.

    Raises DataError for a dataset that cannot be read, ConfigError for one that may change before a resume.
    """
    if config.revision is None and not Path(config.path).is_dir():
        raise ConfigError(
            f"prompts.stream_rows streams {config.path!r} from the Hub, where its rows may change before a "
            "resume: name a commit in prompts.revision"
        )
    size = max(FIRST, math.ceil(held_out_count / LARGEST_SHARE))
    first = list(islice(reader.usable(dataset_rows(config)), size))
    prompts = [*{content_of(prompt.token_ids): prompt for prompt in reversed(first)}.values()][::-1]
    order = np.random.default_rng(seed).permutation(len(prompts))
    held_out = [prompts[place] for place in sorted(order[: held_out_of(len(prompts), held_out_count)])]
    again = RowReader(config, reader.tokenizer, reader.longest, reader.keeps_messages)  # it counts anew
    return StreamSource(config, again, seed).without(held_out), held_out
