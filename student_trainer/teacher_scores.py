"""Scores that teachers keep, fetched by the rank that trains on them (`Rows.kept`).

    reference ─▶ GET at the teacher ─▶ digest ─▶ checks ─▶ cut to the trained tokens ─▶ the arrays of Rows
                        └── gone, or not what was kept ─▶ POST /v1/score with the tokens ──┘

Nothing is lost with a teacher: what it kept can be computed again from the tokens, which are on record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Final, NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from sync import wire
from sync.base import errors
from sync.base.errors import DataError, DistillError, Interrupted, Overloaded, Unreachable, WireError
from sync.base.retry import Backoff
from sync.wire import Kept, Rows, Scored, ScoreReply, ScoreSequence, TrainBatch, Want, checks
from sync.wire.client import BlockingPeer

log = logging.getLogger(__name__)
CONNECTIONS: Final = 4
"""Rows that are fetched at a time."""
FETCH_SECONDS: Final = 60.0
ASK_SECONDS: Final = 5.0
"""Least time between two questions where a teacher's processes are."""
SCORE_SECONDS: Final = 300.0
_FIELDS: Final = {
    "teacher_logprob": "logprob",
    "teacher_topk_ids": "topk_ids",
    "teacher_topk_logprob": "topk_logprob",
    "student_topk_teacher_logprob": "gathered",
    "student_topk_ids": "gather_ids",
    "teacher_hidden": "hidden",
    "teacher_entropy": "entropy",
}
"""Array of Rows → that of Scored."""


class KeptRow(NamedTuple):
    """What a rank knows of one row whose scores are kept. T: its tokens up to the last that is trained on."""

    teacher: str
    kept: Kept
    sequence: ScoreSequence
    """The T tokens, behind the prompt that the teacher saw."""


class TeacherScores:
    """Fetches for one rank, from any thread, one batch at a time.

    `student_topk`: ids of the student that the teacher has scored, and keeps with the scores. When these are
    gone, the teacher's own most likely ids take their place: any set that does not depend on the sampled
    token leaves the objective unbiased. `servers`: where a teacher is now, by name. Raises DataError where
    its reply cannot be used twice, Interrupted once `stopping` is set; one that is gone is waited for.
    """

    def __init__(
        self,
        teachers: Sequence[str],
        want: Want,
        student_topk: int,
        vocab_size: int,
        servers: Callable[[str], wire.TeacherServers],
        connect: Callable[[str], BlockingPeer],
        stopping: threading.Event,
    ) -> None:
        self._teachers, self._want, self._vocab_size = teachers, want, vocab_size
        self._k, self._again = student_topk, replace(want, topk=want.topk or student_topk)
        self._ask, self._connect, self._stopping = servers, cache(connect), stopping
        self._servers: dict[str, wire.TeacherServers] = {}
        self._asked: dict[str, float] = {}
        """Teacher → when its servers were last looked up, time.monotonic()."""
        self._why = "they are of an earlier start"
        self._threads = ThreadPoolExecutor(CONNECTIONS, "scores")

    def filled(self, batch: TrainBatch) -> TrainBatch:
        """The batch with all scores in its rows."""
        rows = [row for micro in batch.micro_batches for row in kept_rows(micro, self._teachers)]
        scores = [*self._threads.map(self._scores, rows)]
        if again := sum(parts[0].kept is None for parts in scores):
            log.warning(
                "%d of %d rows of %s were scored again, the last because %s",
                again, len(rows), batch.version, self._why,
            )  # fmt: skip
        row_scores = iter(scores)
        micros = [
            micro if micro.kept is None else with_scores(micro, [*islice(row_scores, len(micro.kept))])
            for micro in batch.micro_batches
        ]
        return replace(batch, micro_batches=micros)

    def _scores(self, row: KeptRow) -> list[Scored]:
        """Scores of consecutive positions, of the T tokens; `kept` where they were fetched."""
        kept = row.kept
        if kept.url in self._urls(row.teacher, kept.url):  # else of another start of the run
            try:
                body = self._connect(kept.url).once(f"/v1/scores/{kept.key}", None, FETCH_SECONDS)
                if blake3(body).digest(wire.DIGEST_BYTES) != kept.digest:
                    raise WireError(f"{kept.url}: the body of {kept.key} has another digest")
                parts = self._checked(row, wire.frames(body, ScoreReply), self._want, self._k)
                return [replace(part, kept=kept) for part in parts]
            except DistillError as error:
                self._why = str(error)
        return self._scored_again(row)

    def _urls(self, teacher: str, url: str) -> list[str]:
        """Where a teacher's processes are, looked up anew when `url` is none of them; empty: nowhere."""
        now = time.monotonic()
        known = self._servers.get(teacher)
        if known is None or (url not in known.urls and now - self._asked.get(teacher, 0.0) > ASK_SECONDS):
            self._asked[teacher] = now
            with suppress(Unreachable, Overloaded):
                known = self._servers[teacher] = self._ask(teacher)
        return known.urls if known else []

    def _scored_again(self, row: KeptRow) -> list[Scored]:
        """Have the teacher's processes compute them, one after the other until one does."""
        request = wire.encode(wire.ScoreRequest(sequences=[row.sequence], want=self._again))
        backoff, bad, tries, url = Backoff(0.5, 10.0), 0, 0, "no known URL"
        while not self._stopping.is_set():
            try:
                if tries or row.teacher not in self._servers:
                    self._servers[row.teacher] = self._ask(row.teacher)
                servers = self._servers[row.teacher]
                url = servers.urls[tries % len(servers.urls)]
                peer = self._connect(url)
                tries += 1
                body = peer.once("/v1/score", request, SCORE_SECONDS, servers.fingerprint)
                parts = self._checked(row, [wire.decode(body, ScoreReply)], self._again)
                if not self._k:
                    return parts
                none = {"topk_ids": None, "topk_logprob": None}  # the teacher's ids in the student's place
                return [replace(p, gather_ids=p.topk_ids, gathered=p.topk_logprob, **none) for p in parts]
            except (Overloaded, Unreachable, errors.WrongServer) as error:
                least = error.retry_after if isinstance(error, Overloaded) else 0.0
                log.warning("teacher %s is asked again: %s", row.teacher, error)
                self._stopping.wait(backoff.next(least))
            except DistillError as error:
                bad += 1
                if bad == 2:
                    raise DataError(f"teacher {row.teacher} at {url}: {error}") from None
                log.warning("teacher %s at %s is asked again: %s", row.teacher, url, error)
        raise Interrupted(f"stopped before teacher {row.teacher} gave scores")

    def _checked(
        self, row: KeptRow, replies: Iterable[ScoreReply], want: Want, gathered: int = 0
    ) -> list[Scored]:
        """The scores of the trained tokens, a part from each reply. Raises WireError for what is none."""
        missing, parts = row.sequence.token_ids.shape[0] - row.sequence.start, list[Scored]()
        for reply in replies:
            scored = reply.results[0] if len(reply.results) == 1 else None
            if isinstance(scored, wire.ScoreRefused):
                raise WireError(f"{scored.id[:80]} is refused: {scored.error[:500]}")
            if scored is None or scored.id != row.sequence.id:
                raise WireError(
                    f"a reply has {len(reply.results)} results, or another's than {row.sequence.id}"
                )
            count = len(scored.logprob.data) // 4
            if problem := checks.scored(scored, count, gathered, want, self._vocab_size, with_ids=True):
                raise WireError(f"scores of {scored.id}: {problem}")
            scored = checks.without_bad_entropy(scored, count)
            if missing > 0:
                arrays = ((name, getattr(scored, name)) for name in _FIELDS.values())
                trained = {name: array and array.cut(missing) for name, array in arrays}
                parts.append(replace(scored, **trained))
            missing -= count
        if missing > 0:
            raise WireError(f"scores of {row.sequence.id} are of {missing} tokens too few")
        return parts


def kept_rows(rows: Rows, teachers: Sequence[str]) -> Iterator[KeptRow]:
    """The rows that carry a reference, in order; the others carry their scores."""
    if rows.kept is None or rows.teacher_prompts is None or rows.teacher is None:
        return
    arrays = rows.prompt_lens, rows.completion_lens, rows.teacher
    sizes = zip(*(wire.unpack(array).tolist() for array in arrays), strict=True)
    tokens, token = wire.unpack(rows.tokens), 0
    for row, (before, count, teacher) in enumerate(sizes):
        kept, seen = rows.kept[row], rows.teacher_prompts[row]
        assert kept is not None, "the controller sends references"
        prompt = seen or wire.pack(tokens[token : token + before])
        token += before + count
        completion = wire.pack(tokens[token - count : token])
        yield KeptRow(teachers[teacher], kept, ScoreSequence.of(rows.ids[row], prompt, completion))


def with_scores(rows: Rows, scores: Sequence[Sequence[Scored]]) -> Rows:
    """`rows` with the scores of each in its arrays; without rows there is nothing to fill."""
    parts = [part for row_parts in scores for part in row_parts]
    if not parts:
        return rows
    arrays: dict[str, wire.Array | None] = {}
    for field, name in _FIELDS.items():
        present = [array for part in parts if (array := getattr(part, name)) is not None]
        arrays[field] = wire.Array.joined(present) if len(present) == len(parts) else None
    return replace(rows, **arrays, kept=[row_parts[0].kept for row_parts in scores])
