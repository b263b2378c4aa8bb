"""What is wrong with an answer, before any of it is recorded. Pure: message → the first Problem, or None.

The controller checks what replicas, teachers, the evaluator and the trainer send; the teacher service checks
the scores of its own engines. What follows from the mathematics:

log-probabilities  finite and at most 0. A sampled token had a probability above 0, and ρ = p/μ divides by it.
                   −inf among the ids of a top-k makes q·log q NaN. A skipped id (-1) carries 0.
top-k              the ids of a row differ, and their probabilities add up to at most 1.
entropy            is in no loss: where it cannot be used it becomes None.

Ranges of single numbers are part of the message types: the decoder refuses others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from sync.wire.base import DTYPES, Array, Version, VersionSpan, unpack
from sync.wire.evaluator import EvalReply, EvalReport, EvalRequest, PartReport
from sync.wire.replica import MASK_TIES, Generated, Routing, Sampling, SamplingMask, UpdateReply
from sync.wire.teacher import DIGEST_BYTES, PARTED_BYTES, Head, Kept, Scored, Segment, TeacherCompletion, Want
from sync.wire.trainer import CheckpointSaved, FinalDigests, Published, StepReport

ROUNDING: Final = 0.02
"""How far half precision may put a log-probability above 0, a mass above 1 or a divergence below 0."""
ANY_ID: Final = 1 << 31
"""A vocabulary size that refuses no id: for callers that do not know theirs."""
LARGEST_REWARD: Final = 1e30
"""Sums of rewards stay finite in fp32."""
Event = StepReport | Published | CheckpointSaved | FinalDigests


class Problem(NamedTuple):
    """Why an answer cannot be used."""

    field: str
    value: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, and must be {self.rule}"


class Range(NamedTuple):
    """What every element of an array must lie in, ends included."""

    low: float
    high: float
    name: str


LOGPROB: Final = Range(-math.inf, ROUNDING, "finite and at most 0")
FINITE: Final = Range(-math.inf, math.inf, "finite")
U1: Final = ("u1",)
I4: Final = ("i4",)
F4: Final = ("f4",)
HALF: Final = ("f2", "f4")
WIDE: Final = ("bf16", "f4")
ENTROPY: Final = Range(-ROUNDING, math.inf, "nats")


def ids(vocab_size: int, low: int = 0) -> Range:
    """Token ids; `low` -1: skipped ones too."""
    return Range(low, vocab_size - 1, f"ids of the vocabulary, {low} … {vocab_size - 1}")


# --- arrays -----------------------------------------------------------------------------------------------


def array(
    field: str,
    value: Array | None,
    dtypes: Sequence[str],
    shape: tuple[int | None, ...],
    within: Range | None,
    asked: bool = True,
) -> Problem | None:
    """Dtype, shape, bytes and elements of an array; missing is a problem, and so is one not `asked` for.
    `shape`: None for any size in that dimension. `within`: None: the elements are not looked at."""
    if not asked:
        rule = "left out: it was not asked for"
        return None if value is None else Problem(field, f"of shape {_text(value.shape)}", rule)
    if value is None:
        return Problem(field, "missing", f"{' or '.join(dtypes)} {_text(shape)}")
    if value.dtype not in dtypes:
        return Problem(field, f"of dtype {value.dtype}", " or ".join(dtypes))
    sizes = [got if size is None else size for got, size in zip(value.shape, shape, strict=False)]
    if list(value.shape) != sizes or len(sizes) != len(shape) or min(sizes) < 0:
        return Problem(field, f"of shape {_text(value.shape)}", f"of shape {_text(shape)}")
    needed = math.prod(sizes) * DTYPES[value.dtype].itemsize
    if needed != len(value.data):
        return Problem(field, f"{len(value.data)} bytes", f"{needed} bytes, as its shape says")
    return _elements(field, value, within) if within and value.data else None


def _elements(field: str, value: Array, within: Range) -> Problem | None:
    values = unpack(value)
    if value.dtype == "bf16":  # its bits: all ones in the exponent are inf or NaN
        finite = (values & 0x7FFF).max() < 0x7F80
        return None if finite else Problem(field, "inf or NaN in one place or more", within.name)
    values = values.astype("f4") if value.dtype == "f2" else values
    low, high = values.min(), values.max()
    for worst, wrong in ((low, not low >= within.low), (high, not high <= within.high)):
        if wrong or not np.isfinite(worst):
            return Problem(field, f"{worst} in one place or more", within.name)
    return None


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _same(field: str, value: object, asked: object) -> Problem | None:
    return None if value == asked else Problem(field, f"{value}", f"{asked}, as it was asked for")


def first(*problems: Problem | None) -> Problem | None:
    """The first that there is."""
    return next((problem for problem in problems if problem is not None), None)


def echo(answered: Sequence[str], asked: Sequence[str]) -> Problem | None:
    """The ids of all results of a reply: one for each that was asked, in that order."""
    if len(answered) != len(asked):
        return Problem("results", f"{len(answered)} of {len(asked)}", "one for each that was asked")
    return first(*(_same("id", got[:80], id) for got, id in zip(answered, asked, strict=True)))


# --- completions ------------------------------------------------------------------------------------------


def tokens(token_ids: Array, logprob: Array, limit: int, vocab_size: int, least: int = 1) -> Problem | None:
    """Tokens of a completion, `least` to `limit` of them, and their log-probabilities."""
    if problem := array("token_ids", token_ids, I4, (None,), ids(vocab_size)):
        return problem
    count = token_ids.shape[0]
    if not least <= count <= limit:
        return Problem("token_ids", f"{count} tokens", f"{least} to {limit}, as it was asked for")
    return array("logprob", logprob, F4, (count,), LOGPROB)


def spans(version_spans: Sequence[VersionSpan], count: int) -> Problem | None:
    """Version spans of `count` tokens: one after the other, none empty."""
    ends = [0, *(span.end for span in version_spans)]
    if [span.start for span in version_spans] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != count:
        text = ", ".join(f"[{span.start}, {span.end})" for span in version_spans[:4])
        return Problem("spans", text or "empty", f"contiguous from 0 to {count}, none of them empty")
    return None


def turn_tokens(token_ids: Array, vocab_size: int) -> Problem | None:
    """i4 [T], T >= 1: the tokens of one side of a turn."""
    if problem := array("token_ids", token_ids, I4, (None,), ids(vocab_size)):
        return problem
    return None if token_ids.data else Problem("token_ids", "empty", "one token or more")


def topk_ids(
    field: str, value: Array | None, count: int, k: int, vocab_size: int, low: int
) -> Problem | None:
    """i4 [count, k], the ids of a row all different; `low` -1: a row may have fewer. `k` 0: not asked for."""
    problem = array(field, value, I4, (count, k), ids(vocab_size, low), asked=k > 0)
    return problem or (_different(field, value, "ids") if value else None)


def _different(field: str, value: Array, what: str) -> Problem | None:
    """The numbers of each row are different; -1 stands for none."""
    ordered = np.sort(unpack(value), axis=-1)
    twice = ordered[..., 1:][(ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)]
    return Problem(field, f"{twice[0]} twice in a row", f"different {what}") if twice.size else None


def mask(sampling_mask: SamplingMask | None, token_ids: Array, vocab_size: int, top_k: int) -> Problem | None:
    """Sampling masks of the tokens [T] of a completion: different ids, the sampled one among them. `top_k`:
    of the request; 0: they were not asked for."""
    if not top_k:
        return Problem("mask", "there", "left out: it was not asked for") if sampling_mask else None
    if sampling_mask is None:
        return Problem("mask", "missing", "of every token, as it was asked for")
    rule = f"1 to {top_k} ids of a token, and {MASK_TIES} ties"
    sizes = Range(1, min(vocab_size, top_k + MASK_TIES), rule)
    count = token_ids.shape[0]
    if problem := array("mask.sizes", sampling_mask.sizes, I4, (count,), sizes):
        return problem
    sizes_T = unpack(sampling_mask.sizes).astype(np.int64)
    if problem := array("mask.ids", sampling_mask.ids, I4, (int(sizes_T.sum()),), ids(vocab_size)):
        return problem
    token_M, ids_M = np.repeat(np.arange(count), sizes_T), unpack(sampling_mask.ids)
    held_T = np.bincount(token_M[ids_M == unpack(token_ids)[token_M]], minlength=count)
    ordered_M = np.sort(token_M << 32 | ids_M)
    if (ordered_M[1:] == ordered_M[:-1]).any():
        return Problem("mask.ids", "one id twice for a token", "different ids")
    if not held_T.all():
        return Problem("mask.ids", "without the sampled token", "all that it was sampled from")
    return None


def routes(route_array: Array | None, places: int, routing: Routing | None) -> Problem | None:
    """Experts of `places` tokens; `routing` None: they were not asked for."""
    if routing is None or route_array is None:
        return array("routes", route_array, (), (), None, asked=routing is not None)
    shape = places, routing.layers, routing.chosen
    within = Range(0, routing.experts - 1, f"one of {routing.experts} experts")
    problem = array("routes", route_array, (routing.dtype,), shape, within)
    return problem or _different("routes", route_array, "experts")


def generated(answer: Generated, asked: Sampling, vocab_size: int) -> Problem | None:
    """A completion of the student; it may have no tokens."""
    if problem := tokens(answer.token_ids, answer.logprob, asked.max_tokens, vocab_size, least=0):
        return problem
    count = answer.token_ids.shape[0]
    return first(
        spans(answer.spans, count),
        topk_ids("topk_ids", answer.topk_ids, count, asked.student_topk, vocab_size, -1),
        mask(answer.mask, answer.token_ids, vocab_size, asked.top_k if asked.mask else 0),
    )


def teacher_completion(answer: TeacherCompletion, max_tokens: int, vocab_size: int) -> Problem | None:
    """A completion by a teacher."""
    return tokens(answer.token_ids, answer.logprob, max_tokens, vocab_size)


# --- scores -----------------------------------------------------------------------------------------------


def scored(
    answer: Scored,
    count: int,
    gather: int,
    want: Want,
    vocab_size: int,
    hidden_size: int | None = None,
    with_ids: bool = False,
) -> Problem | None:
    """A teacher's log-probabilities of `count` positions; `gather`: K of the ids to score, 0: none.

    `with_ids`: the ids that were scored are there too.
    The entropy is not looked at: see `without_bad_entropy`. `hidden_size` None: not known. With
    `want.keep` the arrays are elsewhere, and checked by the rank that fetches them.
    """
    topk, gather, hidden = (0, 0, False) if want.keep else (want.topk, gather, want.hidden)
    return first(
        array("logprob", answer.logprob, F4, (count,), LOGPROB),
        _kept(answer.kept, want.keep),
        topk_ids("topk_ids", answer.topk_ids, count, topk, vocab_size, -1 if answer.parted else 0),
        array("topk_logprob", answer.topk_logprob, HALF, (count, topk), LOGPROB, asked=topk > 0),
        array("gathered", answer.gathered, HALF, (count, gather), LOGPROB, asked=gather > 0),
        topk_ids("gather_ids", answer.gather_ids, count, gather * with_ids, vocab_size, -1),
        array("hidden", answer.hidden, WIDE, (count, hidden_size), FINITE, asked=hidden),
        array("parted", answer.parted, U1, (count, PARTED_BYTES), None) if answer.parted else None,
        array("segment", answer.segment, U1, (count,), ids(len(Segment))) if answer.segment else None,
    ) or (_mass(answer.topk_ids, answer.topk_logprob) if answer.topk_ids and answer.topk_logprob else None)


def _kept(kept: Kept | None, asked: bool) -> Problem | None:
    if kept is None:
        return Problem("kept", "missing", "where the scores are, as it was asked for") if asked else None
    if not asked:
        return Problem("kept", kept.key[:80], "left out: it was not asked for")
    if not re.fullmatch(r"[0-9a-f]{1,64}-[0-9]{1,19}", kept.key, re.ASCII):
        return Problem("kept.key", repr(kept.key[:80]), 'of the form "BOOT-NUMBER"')
    if len(kept.digest) != DIGEST_BYTES:
        return Problem("kept.digest", f"{len(kept.digest)} bytes", f"{DIGEST_BYTES} bytes of BLAKE3")
    return None


def _mass(ids: Array, topk_logprob: Array) -> Problem | None:
    probability = np.where(unpack(ids) >= 0, np.exp(unpack(topk_logprob).astype("f4")), 0.0)
    if (mass := probability.sum(axis=1).max(initial=0.0)) <= 1 + ROUNDING:
        return None
    rule = "log-probabilities of one distribution"
    return Problem("topk_logprob", f"of {mass:.3f} in sum of probabilities", rule)


def without_bad_entropy(answer: Scored, count: int) -> Scored:
    """The answer with None for an entropy that cannot be used: no loss needs it."""
    bad = answer.entropy is not None and array("entropy", answer.entropy, F4, (count,), ENTROPY)
    return msgspec.structs.replace(answer, entropy=None) if bad else answer


def head(message: Head) -> Problem | None:
    """A teacher's output head; not its elements, which are gigabytes."""
    if (problem := array("weight", message.weight, WIDE, (None, None), None)) or message.bias is None:
        return problem
    return array("bias", message.bias, WIDE, message.weight.shape[:1], None)


# --- the other reports ------------------------------------------------------------------------------------


def same_version(answer: EvalReply | EvalReport | UpdateReply, version: Version) -> Problem | None:
    """An answer about `version`: of the evaluator, or a replica's to its update."""
    return _same("version", answer.version, version)


def divergences(reply: EvalReply, request: EvalRequest) -> Problem | None:
    """A sum for every sequence of the request."""
    asked = {name: len(sequences) for name, sequences in request.teachers.items()}
    sums = {name: len(divergence.sums) for name, divergence in reply.teachers.items()}
    return same_version(reply, request.version) or _same("sums", f"{sums}", f"{asked}")


def evaluation(report: EvalReport, version: Version) -> Problem | None:
    """An evaluation of `version`; an exact divergence is at least 0."""
    of_all: list[EvalReport | PartReport] = [report, *report.sources.values(), *report.teachers.values()]
    exact = [part.reverse_kl for part in of_all if part.reverse_kl_error is None]
    low = [value for value in exact if value is not None and value < -ROUNDING]
    rule = "at least 0 where it is exact"
    return same_version(report, version) or (Problem("reverse_kl", f"{low[0]}", rule) if low else None)


def event(message: Event, start: int, reached: int, newest: int) -> Problem | None:
    """What a trainer did. Its lineage began at `start`; it has reported step `reached`, and its batches go up
    to `newest`. A loss that is not finite is no fault of the message: metrics may hold anything."""
    newest_step = min(newest, reached + 1) if isinstance(message, StepReport) else newest
    if not start <= (step := message.version.step) <= newest_step:
        return Problem("version.step", f"{step}", f"in {start} … {newest_step}")
    if isinstance(message, Published) and (message.rendezvous is None) == (message.kind == "broadcast"):
        rule = '"host:port" for a broadcast, and for nothing else'
        return Problem("rendezvous", f"{message.rendezvous}", rule)
    if isinstance(message, FinalDigests) and not message.digests:
        return Problem("digests", "empty", "the digest of every tensor")
    return None
