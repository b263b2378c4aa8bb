"""A teacher with a tokenizer of its own: it scores the text of a completion, not its ids.

    student's ids ─▶ bytes ─▶ text ─▶ teacher's ids ─▶ log q of each ─▶ log q of each segment ─▶ trainer

A segment is the shortest run of the student's tokens that covers the same bytes as a run of the teacher's. By
the chain rule log q of a segment is the sum over the teacher's tokens in it. Special tokens stand for
themselves: the student's end of a completion is the teacher's, another one that of the same name, or its
name as text. Bytes that are no UTF-8 are the replacement character to the teacher. The last segment of a
completion that a limit cut off is not scored: it may have gone on.

The teacher is asked about one way of cutting a text, its tokenizer's own, and p is that of the tokens that
the student sampled. So the divergence is that of texts, less the entropy of the student's ways of cutting a
text, plus what the teacher holds on other ways than its tokenizer's.

Whether a segment begins at a place, and the teacher has a distribution there, depends on how the text goes
on; of use to the trainer is what follows from the text before. So G are those of the student's tokens that
the teacher's tokenizer always parts from what stands before, since no token of its vocabulary holds the last
byte before and the first one behind side by side. Whichever of G is sampled, the teacher's distribution is
known, and the same. Its most likely tokens that are the student's too, and of G, are S.

Letters: L ids of the student's completion, M of the teacher's, K of a position, B values of a byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from distill.config import RunConfig
from distill.interfaces import Transform
from distill.prompts.rows import Kind, plain_ids, render
from distill.prompts.stream import Prompt
from sync import wire
from sync.base.address import Place
from sync.base.errors import DataError
from sync.base.tokenizers import (
    END,
    OTHER,
    end_ids,
    end_of_turn,
    first_bytes,
    load_tokenizer,
    special_ids,
    token_bytes,
)
from sync.wire import Scored, ScoreRefused, Segment, TeacherCompletion, checks, pack, unpack
from sync.wire.claims import Claim
from teacher_service.client import Reply, TeacherClient
from teacher_service.router import load_transforms

_REPLACED: Final = "\ufffd".encode()
_PARTED: Final = 256
"""In the place of the last byte: behind a special token, or nothing."""
_SHOWN: Final = 12
"""Tokens that are shown."""


class Aligned(NamedTuple):
    """A completion as the teacher is given it."""

    token_ids: np.ndarray
    """i4 [M]"""
    segment: np.ndarray
    """u1 [L] of Segment"""
    ends: np.ndarray
    """i8: where each segment ends in M"""
    behind: np.ndarray = np.zeros(0, "i4")
    """i4: the first of the teacher's ids of what is not scored, if there are any"""

    def scores(self, logprob_M: np.ndarray) -> np.ndarray:
        """f4 [L]: log q of segments at its last token, 0 elsewhere; from log q of the teacher's tokens."""
        until = np.concatenate([[0.0], logprob_M.cumsum(dtype="f8")])[self.ends]
        goes_on_L = np.append(self.segment[1:], Segment.BEGINS) == Segment.GOES_ON
        scores_L = np.zeros(len(self.segment), "f4")
        scores_L[~goes_on_L & (self.segment != Segment.UNSCORED)] = np.diff(until, prepend=0.0)
        return scores_L

    def sent(self, want: wire.Want) -> np.ndarray:
        """i4: the ids that the teacher is sent."""
        return np.append(self.token_ids, self.behind) if want.topk else self.token_ids

    def starts(self) -> tuple[np.ndarray, np.ndarray]:
        """i8: where segments begin in L, and in M; that which is not scored too, where it is `behind`."""
        begins = np.flatnonzero(self.segment == Segment.BEGINS)
        if len(self.behind):
            begins = np.append(begins, np.argmax(self.segment == Segment.UNSCORED))
        return begins, np.append(0, self.ends)[: len(begins)]

    def alone(self) -> np.ndarray:
        """i8: places in L of the tokens that are one token to the teacher too."""
        begins = np.flatnonzero(self.segment == Segment.BEGINS)
        scored = int((self.segment != Segment.UNSCORED).sum())
        single = np.diff(begins, append=scored) == 1
        return begins[single & (np.diff(self.ends, prepend=0) == 1)]


class Translation:
    """From prompts and completions of the student to those of one teacher."""

    def __init__(self, student: Any, teacher: Any, ends: Collection[int]) -> None:
        """`student`, `teacher`: tokenizers of transformers; `ends`: the student's ids that end a completion.

        Raises DataError for a tokenizer whose tokens are no text, and for a teacher without an end.
        """
        self._student, self._teacher = student, teacher
        self._student_bytes, self._teacher_bytes = token_bytes(student), token_bytes(teacher)
        self._ends = frozenset(ends) & {*range(len(self._student_bytes))}
        end = end_of_turn(teacher)
        if (end := teacher.eos_token_id if end is None else end) is None:
            raise DataError(
                f"the tokenizer of {teacher.name_or_path} has no end token, and no chat template that ends a "
                "turn with one: set eos_token in its tokenizer_config.json"
            )
        self.end = int(end)
        """The teacher's id for the end of a completion."""
        self._written = set[Kind]()

    @cached_property
    def shared(self) -> np.ndarray:
        """i4: by the teacher's id, the student's of the same bytes or, of special ones, the same meaning; -1:
        there is none."""
        special = special_ids(self._student) | {*self.special}
        ours = {data: id_ for id_, data in enumerate(self._student_bytes) if data and id_ not in special}
        theirs = {data: id_ for id_, data in enumerate(self._teacher_bytes) if data in ours}
        shared = np.full(len(self._teacher_bytes), -1, "i4")
        for data, id_ in theirs.items():
            shared[id_] = ours[data]
        shared[[*special_ids(self._teacher)]] = -1
        shared[[*self.special.values()]] = [*self.special]
        return shared

    @cached_property
    def _first(self) -> np.ndarray:
        """i8 [V] of the student: `first_bytes`."""
        return first_bytes(self._student, self._ends)

    @cached_property
    def _last(self) -> np.ndarray:
        """i8 [V] of the student: the last byte of each token; OTHER: it has none."""
        last = np.array([data[-1] if data else OTHER for data in self._student_bytes])
        last[[*self.special]] = _PARTED
        return last

    @cached_property
    def _parted(self) -> np.ndarray:
        """bool [B, B]: the teacher's tokenizer always parts a text between these bytes, and cuts what stands
        before alike whatever follows: rules that look ahead do so over white space.

        Bytes that are no UTF-8 are the replacement character to it.
        """
        special, parted = special_ids(self._teacher), np.ones((OTHER + 1, OTHER + 1), bool)
        words = [data for id_, data in enumerate(self._teacher_bytes) if id_ not in special]
        for pair in {pair for word in words for pair in pairwise(word)}:
            parted[pair] = False
        first, last = _REPLACED[0], _REPLACED[-1]
        parted[0x80:256] &= parted[last]
        parted[:, 0xC0:256] &= parted[:, [first]]
        parted[:256, 0x80:0xC0] = False  # within a character
        parted[[*b" \t\n\v\f\r"]] = False
        parted[OTHER] = False
        others = {*np.flatnonzero(self._first == OTHER).tolist()} - self.special.keys()
        names = [self._student_bytes[id_][:1] for id_ in others]
        parted[:, OTHER] = parted[:, [*b"".join(names)]].all(1) & (b"" not in names)
        parted[:, END] = True
        return parted

    def support(
        self, token_ids: Sequence[int], aligned: Aligned, theirs_MK: np.ndarray, logq_MK: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """From the teacher's most likely ids and their log q: S of each token, i4 [L, K], -1 where there are
        fewer than K; log q of all of them, [L, K], 0 where no segment begins; `Scored.parted`."""
        begins, starts = aligned.starts()
        before = np.append(_PARTED, self._last[[*token_ids]])[begins]
        ours, parted = self.shared[theirs_MK[starts]], self._parted[before]
        among = parted[np.arange(len(begins)), self._first[[*token_ids]][begins]]
        size = len(token_ids), theirs_MK.shape[1]
        support_LK, logq_LK = np.full(size, -1, "i4"), np.zeros(size, logq_MK.dtype)
        parted_LB = np.zeros((len(token_ids), wire.PARTED_BYTES), "u1")
        support_LK[begins] = np.where(np.take_along_axis(parted, self._first[ours], 1), ours, -1)
        logq_LK[begins] = logq_MK[starts]
        parted_LB[begins] = np.packbits(parted & among[:, None], axis=1)
        return support_LK, logq_LK, parted_LB

    @cached_property
    def back(self) -> Translation:
        """From completions of the teacher to the student's."""
        return Translation(self._teacher, self._student, {self.end, self._teacher.eos_token_id} - {None})

    @cached_property
    def special(self) -> dict[int, int]:
        """The student's special ids → the teacher's: of the same name, or both end a completion."""
        theirs = {self._teacher.convert_ids_to_tokens(id_): id_ for id_ in special_ids(self._teacher)}
        names = {id_: self._student.convert_ids_to_tokens(id_) for id_ in special_ids(self._student)}
        same = {id_: theirs[name] for id_, name in names.items() if name in theirs}
        stops = {self.end, self._teacher.eos_token_id}
        return same | {id_: self.end for id_ in self._ends if same.get(id_) not in stops}

    def prompt(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt as the teacher's own template renders it. Raises DataError for what it refuses."""
        if not prompt.messages:
            return plain_ids(self._teacher, prompt.text or self._student.decode(prompt.token_ids))
        messages, variables = json.loads(prompt.messages)
        return render(self._teacher, messages, variables, self._written)

    def completion(self, token_ids: Sequence[int]) -> Aligned:
        """A completion of the student. Raises DataError for text that the teacher's tokenizer changes."""
        runs, start = list[Aligned](), 0
        for place in [place for place, id_ in enumerate(token_ids) if id_ in self.special]:
            runs.append(self._text(token_ids[start:place], followed=True))
            other = np.array([self.special[token_ids[place]]], "i4")
            runs.append(Aligned(other, np.array([Segment.BEGINS], "u1"), np.array([1])))
            start = place + 1
        runs.append(self._text(token_ids[start:], followed=False))
        sizes = np.cumsum([0, *(len(run.token_ids) for run in runs)])
        ends = [run.ends + size for run, size in zip(runs, sizes, strict=False)]
        return Aligned(
            np.concatenate([run.token_ids for run in runs]),
            np.concatenate([run.segment for run in runs]),
            np.concatenate(ends),
            runs[-1].behind,
        )

    def _text(self, token_ids: Sequence[int], followed: bool) -> Aligned:
        """Tokens between two special ones; `followed`: one stands behind them."""
        pieces = [self._student_bytes[id_] for id_ in token_ids]
        text, byte_of = read(b"".join(pieces))
        theirs = self.encode(text)
        ours_L = np.cumsum([len(piece) for piece in pieces], dtype="i8")
        theirs_M = byte_of[np.cumsum([len(self._teacher_bytes[id_]) for id_ in theirs], dtype="i8")]
        known_M = np.flatnonzero(theirs_M >= 0)
        shared = np.intersect1d(ours_L, theirs_M[known_M])
        shared = shared if followed else shared[:-1]
        last_L = np.searchsorted(ours_L, shared, "right")
        ends = known_M[np.searchsorted(theirs_M[known_M], shared, "right") - 1] + 1
        segment = np.full(len(pieces), Segment.GOES_ON, "u1")
        segment[np.concatenate([[0], last_L])[: len(last_L)]] = Segment.BEGINS
        segment[last_L[-1] if len(last_L) else 0 :] = Segment.UNSCORED
        scored = int(ends[-1]) if len(ends) else 0
        behind = theirs[scored : scored + 1] if Segment.UNSCORED in segment else []
        return Aligned(np.array(theirs[:scored], "i4"), segment, ends, np.array(behind, "i4"))

    def figures(self, prompts: Sequence[Prompt]) -> list[str]:
        """What is to be known of the two tokenizers, in words; `prompts`: texts to cut."""
        whole = [[*prompt.token_ids, *sorted(self._ends)[:1]] for prompt in prompts]
        cut = [(ids, self.completion(ids)) for ids in whole]
        ours = sum(len(ids) for ids, _ in cut)
        theirs = sum(len(aligned.token_ids) for _, aligned in cut)
        alone = sum(len(aligned.alone()) for _, aligned in cut)
        parted = 0
        for ids, _ in cut:
            last = np.append(_PARTED, self._last[ids[:-1]])
            parted += int(self._parted[last, self._first[ids]].sum())
        same = {*self._student_bytes} & {*self._teacher_bytes}
        names = [
            f"{self._student.convert_ids_to_tokens(id_)!r} is {self._teacher.convert_ids_to_tokens(other)!r}"
            for id_, other in sorted(self.special.items())
        ]
        ids, aligned = cut[0]
        texts = [
            "|".join(tokenizer.decode([id_]) for id_ in some[:_SHOWN])
            for tokenizer, some in ((self._student, ids), (self._teacher, aligned.token_ids.tolist()))
        ]
        return [
            f"{alone / ours:.0%} of the tokens of {len(cut)} prompts are one token to both, {ours:,} of the "
            f"student's are {theirs:,} of the teacher's; {len(same):,} tokens, of "
            f"{len(self._student_bytes):,} and {len(self._teacher_bytes):,}, are the same text",
            f"{parted / ours:.0%} of the tokens stand where the teacher's tokenizer always parts a text: "
            'objective "topk" learns there from more than the token that was sampled',
            f"special tokens: {', '.join(names[:_SHOWN])}",
            f"{texts[0]!r} is {texts[1]!r} to the teacher",
        ]

    def encode(self, text: str) -> list[int]:
        """The teacher's ids of text that follows other text. Raises DataError for text that it changes.

        SentencePiece's kind writes a space before what it takes for a beginning: it is given a line's end to
        begin with, whose ids are taken away again.
        """
        tried = [self._cut(text), self._cut("\n" + text)]
        for before, ids in zip((b"", b"\n"), tried, strict=True):
            start, data = 0, b""
            while data.lstrip(b" ") != before and start < len(ids):
                data, start = data + self._teacher_bytes[ids[start]], start + 1
            if b"".join(self._teacher_bytes[id_] for id_ in ids[start:]) == text.encode():
                return ids[start:]
        changed = self._teacher.decode(tried[0])
        raise DataError(
            f"the tokenizer of {self._teacher.name_or_path} changes text: {text!r:.60} is {changed!r:.60} to "
            "it. A teacher that scores text must keep it: choose one whose tokenizer neither normalises nor "
            "lacks characters"
        )

    def _cut(self, text: str) -> list[int]:
        encoded = self._teacher(text, add_special_tokens=False, split_special_tokens=True)
        return [int(id_) for id_ in encoded["input_ids"]]


class TextTeacher(TeacherClient):
    """The client of a teacher that scores and writes text: sequences have its ids up to `start`, then the
    student's; completions of its prompts have the student's."""

    def __init__(self, translation: Translation, *arguments: Any) -> None:
        """`arguments`: of TeacherClient."""
        super().__init__(*arguments)
        self.translation = translation

    score_ids = TeacherClient.score
    """Scores of the teacher's own ids."""
    generate_ids = TeacherClient.generate
    """Completions in the teacher's own ids."""

    async def score(
        self,
        sequences: Sequence[wire.ScoreSequence],
        want: wire.Want = wire.Want(),
        limit: float | None = None,
    ) -> Reply[Scored | ScoreRefused]:
        """Log-probabilities by segment, and S from `want.topk` ids; refused: text that it cannot have."""
        aligned = await asyncio.to_thread(lambda: [self._aligned(sequence) for sequence in sequences])
        both = [*zip(sequences, aligned, strict=True)]
        asked = [
            wire.ScoreSequence(
                sequence.id,
                wire.Array.joined([sequence.token_ids.cut(sequence.start), pack(ids)]),
                sequence.start,
            )
            for sequence, other in both
            if isinstance(other, Aligned) and len(ids := other.sent(want))
        ]
        reply: Reply[Scored | ScoreRefused] = Reply([], "")
        if asked:
            reply = await self.score_ids(asked, replace(want, entropy=False), limit)
        answered = {answer.id: answer for answer in reply.results}

        def results() -> list[Scored | ScoreRefused]:
            return [self._by_segment(*pair, answered.get(pair[0].id), want) for pair in both]

        return Reply(await asyncio.to_thread(results), reply.server)

    async def generate(
        self,
        prompts: Sequence[wire.TeacherPrompt],
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        temperature: float = 1.0,
        limit: float | None = None,
    ) -> Reply[TeacherCompletion | ScoreRefused]:
        """Completions of at most `max_tokens` ids of either; refused: what the student cannot write."""
        special = self.translation.special
        ends = {special[id_] for id_ in stop_token_ids if id_ in special} | {self.translation.end}
        reply = await self.generate_ids(
            prompts, max_tokens, sorted(ends), temperature=temperature, limit=limit
        )

        def results() -> list[TeacherCompletion | ScoreRefused]:
            return [self._as_student(answer, max_tokens) for answer in reply.results]

        return Reply(await asyncio.to_thread(results), reply.server)

    def _as_student(
        self, answer: TeacherCompletion | ScoreRefused, limit: int
    ) -> TeacherCompletion | ScoreRefused:
        """A completion in the student's ids, as many whole segments as `limit` allows; the log-probability of
        a segment stands at its last token, 0 at the others."""
        if isinstance(answer, ScoreRefused):
            return answer
        if problem := checks.teacher_completion(answer, limit, len(self.translation.shared)):
            return ScoreRefused(answer.id, str(problem), unusable=True)
        try:
            aligned = self.translation.back.completion(unpack(answer.token_ids).tolist())
        except DataError as error:
            return ScoreRefused(answer.id, str(error), no_text=True)
        ends = aligned.ends[aligned.ends <= limit]
        if not len(ends):
            text = f"none of {limit} tokens of the student end where one of its completion does"
            return ScoreRefused(answer.id, text)
        begins, _ = aligned.starts()
        logprob_M = np.zeros(ends[-1], "f4")
        logprob_M[ends - 1] = np.add.reduceat(unpack(answer.logprob), begins)[: len(ends)]
        whole = len(ends) == len(aligned.ends) and not len(aligned.behind)
        reason = answer.finish_reason if whole else "length"
        return TeacherCompletion(answer.id, pack(aligned.token_ids[: ends[-1]]), pack(logprob_M), reason)

    def _aligned(self, sequence: wire.ScoreSequence) -> Aligned | ScoreRefused:
        try:
            return self.translation.completion(_completion(sequence))
        except DataError as error:
            return ScoreRefused(sequence.id, str(error), no_text=True)

    def _by_segment(
        self,
        sequence: wire.ScoreSequence,
        aligned: Aligned | ScoreRefused,
        answer: Scored | ScoreRefused | None,
        want: wire.Want,
    ) -> Scored | ScoreRefused:
        """`answer`: to the teacher's ids; None: there are none."""
        if isinstance(aligned, ScoreRefused):
            return aligned
        if isinstance(answer, ScoreRefused):
            return answer
        if answer is None:
            empty = pack(np.zeros((0, want.topk), "i4")), pack(np.zeros((0, want.topk), "f4"))
            answer = Scored(sequence.id, pack(np.zeros(0, "f4")), *(empty if want.topk else ()))
        count, known = len(aligned.sent(want)), len(self.translation.shared)
        if problem := checks.scored(answer, count, 0, replace(want, entropy=False), known):
            return ScoreRefused(sequence.id, str(problem), unusable=True)
        scores_L = aligned.scores(unpack(answer.logprob)[: len(aligned.token_ids)])
        scored = Scored(sequence.id, pack(scores_L), segment=pack(aligned.segment))
        if answer.topk_ids is None or answer.topk_logprob is None:
            return scored
        topk_MK = unpack(answer.topk_ids), unpack(answer.topk_logprob)
        arrays = map(pack, self.translation.support(_completion(sequence), aligned, *topk_MK))
        return replace(scored, **dict(zip(("topk_ids", "topk_logprob", "parted"), arrays, strict=True)))


def _completion(sequence: wire.ScoreSequence) -> list[int]:
    return unpack(sequence.token_ids)[sequence.start :].tolist()


def translations(config: RunConfig) -> dict[str, Translation]:
    """Of every teacher with a tokenizer of its own. Raises ConfigError, DataError."""
    if not config.by_text:
        return {}
    student = load_tokenizer(config.student)
    ends = end_ids(config.student, student, config.rollout.stop_token_ids)
    return {
        name: Translation(student, load_tokenizer(config.teachers[name]), ends) for name in config.by_text
    }


def clients(
    config: RunConfig, where: Mapping[str, Sequence[Place]], token: str | None, claim: Claim
) -> tuple[dict[str, TeacherClient], dict[str, Transform]]:
    """Clients of the teachers where `topology.places` has them, and what those see that do not see the
    student's prompts."""
    by_name, made = translations(config), dict[str, TeacherClient]()
    for name in config.teachers:
        rest = name, where[f"teachers.{name}"], token, claim
        made[name] = TextTeacher(by_name[name], *rest) if name in by_name else TeacherClient(*rest)
    prompts = {name: translation.prompt for name, translation in by_name.items()}
    return made, prompts | load_transforms(config.teachers)


def read(data: bytes) -> tuple[str, np.ndarray]:
    """Text of bytes, and of each place between two bytes of its UTF-8 the place in `data`, i8; -1: none, as
    within a replacement character, which stands for what is no UTF-8."""
    text, places, start = "", [0], 0
    while start < len(data):
        valid, wrong = data[start:], 0
        try:
            valid.decode()
        except UnicodeDecodeError as error:
            valid, wrong = valid[: error.start], error.end - error.start
        text += valid.decode()
        places += range(start + 1, start + len(valid) + 1)
        start += len(valid) + wrong
        if wrong:
            text += "\ufffd"
            places += [-1, -1, start]
    return text, np.array(places, "i8")
