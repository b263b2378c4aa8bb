"""Samples of what is trained on, and what is not: samples.jsonl and quarantine.jsonl of a run, and `distill
samples`, which prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from distill.buffer import Batch
from distill.config.loading import load_run_dir
from sync.base.decoding import convert
from sync.base.jsonl import JsonLines, read_lines
from sync.base.tokenizers import load_tokenizer
from sync.wire import Array, unpack

Decode = Callable[[list[int]], str]  # token ids of a run as text
SAMPLES, QUARANTINE = "samples.jsonl", "quarantine.jsonl"
SHADES = ((4.0, "white on red3"), (2.0, "black on dark_orange"), (1.0, "black on khaki1"), (0.5, "khaki3"))
"""Styles of a token by log μ − log q, from this value in nats on; HTML shades up to the first."""
LONGEST = 4
"""Tokens of one character at most: its bytes in UTF-8."""


class Sample(msgspec.Struct, frozen=True):
    """One rollout of a batch. Producer: SampleFile; consumers: `distill samples`, the report."""

    version: str
    """The weights that its batch was trained on top of."""
    id: str
    age: int
    """Versions between its oldest token and the batch; 0 for a teacher's completion."""
    teacher: str
    prompt: list[int]
    tokens: list[int]
    logprob: list[float]
    """log μ of each token, nats"""
    teacher_logprob: list[float] | None
    """log q of each token, nats; None: there is no teacher"""
    reward: float | None
    """None: neither reward function nor environment gives one."""
    truncated: bool
    by_teacher: bool
    """The teacher generated the completion."""
    own: tuple[tuple[int, int], ...] = ()
    """Start and end of the student's tokens in each turn of an episode; the others are the environment's.
    Empty: it is none."""

    @property
    def parts(self) -> list[tuple[int, int, bool]]:
        """Start and end of each part of the tokens, in order, and whether an environment wrote it."""
        parts, at = list[tuple[int, int, bool]](), 0
        for start, end in self.own or [(0, len(self.tokens))]:
            parts += [(at, start, True), (start, end, False)]
            at = end
        return [part for part in [*parts, (at, len(self.tokens), True)] if part[0] < part[1]]

    @property
    def excess(self) -> list[float]:
        """log μ − log q of each token: the reverse KL as one sample shows it, nats; an environment's, and
        without a teacher every one: 0."""
        nats = [mu - q for mu, q in zip(self.logprob, self.teacher_logprob or self.logprob, strict=True)]
        for start, end, environment in self.parts:
            if environment:
                nats[start:end] = [0.0] * (end - start)
        return nats

    @property
    def own_length(self) -> int:
        """Tokens that the student, or the teacher in its place, generated."""
        return sum(end - start for start, end, environment in self.parts if not environment)

    @property
    def reverse_kl(self) -> float | None:
        """Mean of `excess` over these, nats per token; None: there is no teacher."""
        if self.teacher_logprob is None:
            return None
        return sum(self.excess) / max(1, self.own_length)


class Quarantine(msgspec.Struct, frozen=True):
    """One quarantined completion. Producers: Dispatcher, Record; consumer: `distill samples`."""

    id: str
    prompt: list[int]
    """Empty for a rollout that the record alone knew."""
    tokens: list[int]
    """Empty: they could not be read."""
    reason: str
    detail: str


class SampleFile:
    """Writes `count` rollouts of every `every`-th batch; 0: none."""

    def __init__(self, path: Path, every: int, count: int) -> None:
        self._lines, self._every, self._count = JsonLines(path), every, count
        self.close = self._lines.close

    def write(self, batch: Batch) -> None:
        """Write the samples of a batch whose rollouts have their arrays, if its turn has come."""
        if self._every == 0 or batch.version.step % self._every:
            return
        stride = max(1, len(batch.rollouts) // max(1, self._count))
        for rollout, age in list(zip(batch.rollouts, batch.ages, strict=True))[::stride][: self._count]:
            scored = rollout.scored
            sample = Sample(
                version=str(batch.version),
                id=rollout.id,
                age=age,
                teacher=rollout.teacher,
                prompt=unpack(rollout.prompt).tolist(),
                tokens=unpack(rollout.tokens).tolist(),
                logprob=_rounded(rollout.logprob),
                teacher_logprob=None if scored is None else _rounded(scored.logprob),
                reward=rollout.reward,
                truncated=rollout.truncated,
                by_teacher=rollout.by_teacher,
                own=rollout.own,
            )
            self._lines.write(sample)


def _rounded(logprob: Array) -> list[float]:
    values: list[float] = unpack(logprob).astype("f8").round(4).tolist()
    return values


# --- reading ----------------------------------------------------------------------------------------------


def read_samples(run_dir: Path) -> list[Sample]:
    """Samples of a run, each once, in the order of writing. Raises DataError for a file that was altered.

    Of a rollout whose batch was handed out again the last one stays.
    """
    samples = [convert(line, Sample) for line in read_lines(run_dir / SAMPLES, Sample)]
    return [*{sample.id: sample for sample in samples}.values()]


def read_quarantine(run_dir: Path) -> list[Quarantine]:
    """What a run quarantined, in the order of writing. Raises DataError for a file that was altered."""
    return [convert(line, Quarantine) for line in read_lines(run_dir / QUARANTINE, Quarantine)]


def choose(samples: Sequence[Sample], order: str, count: int) -> list[Sample]:
    """The first `count` in an order: newest, worst (by reverse KL, without a teacher by reward), longest, or
    the newest truncated ones."""
    keys: dict[str, Callable[[Sample], Any]] = {
        "worst": lambda sample: -(sample.reward or 0.0) if (kl := sample.reverse_kl) is None else kl,
        "longest": lambda sample: len(sample.tokens),
    }
    among = [sample for sample in samples if sample.truncated or order != "truncated"]
    return sorted(among, key=keys.get(order, lambda sample: sample.version), reverse=True)[:count]


def decoder(run_dir: Path) -> Decode:
    """By the student's tokenizer. Raises ConfigError for a folder that is no run, and without a tokenizer."""
    decode: Decode = load_tokenizer(load_run_dir(run_dir).student).decode
    return decode


def shown(sample: Sample, decode: Decode) -> Text:
    """One sample for a terminal: a line of figures, the prompt, the completion with a colour per token.

    Of an episode, each part begins on a line of its own with who said it.
    """
    line = Text(f"{sample.version}  {sample.id}  {figures(sample)}\n", style="bold")
    line.append(f"{decode(sample.prompt)}\n", style="dim")
    for number, (text, tokens) in enumerate(_parts(sample, decode)):
        if sample.own:
            who = "student" if text is None else "environment"
            line.append("\n" * (number > 0) + f"{who}: ", style="bold dim")
        line.append(text or "", style="dim")
        for piece, nats in tokens:
            line.append(piece, style=next((style for least, style in SHADES if nats >= least), ""))
    return line


def _parts(sample: Sample, decode: Decode) -> Iterator[tuple[str | None, list[tuple[str, float]]]]:
    """Of each part the text, where an environment wrote it; else None, and each token with its excess."""
    for start, end, environment in sample.parts:
        tokens = sample.tokens[start:end]
        if environment:
            yield decode(tokens), []
        else:
            yield None, [*zip(_pieces(tokens, decode), sample.excess[start:end], strict=True)]


def _pieces(tokens: Sequence[int], decode: Decode) -> Iterator[str]:
    """Text of each token; a character of several is in the last of them, and the others are empty."""
    begun = 0
    for end in range(1, len(tokens) + 1):
        text = decode([*tokens[begun:end]])
        if text.endswith("\ufffd") and end < min(len(tokens), begun + LONGEST):
            yield ""
        else:
            yield text
            begun = end


def shown_quarantined(completion: Quarantine, decode: Decode) -> Text:
    """One quarantined completion for a terminal: a line with the reason, the prompt, the completion."""
    line = Text(f"{completion.id}  {completion.reason}: {completion.detail}\n", style="bold")
    line.append(f"{decode(completion.prompt)}\n", style="dim")
    return line.append(decode(completion.tokens))


def shaded(sample: Sample, decode: Decode) -> str:
    """The completion as HTML: each token shaded by log μ − log q, what environments wrote in grey."""

    def token(piece: str, nats: float) -> str:
        alpha = min(1.0, max(0.0, nats) / SHADES[0][0])
        color = f"background:rgba(204,63,90,{alpha:.2f})"
        return f'<span title="{nats:.2f} nats" style="{color}">{escape(piece)}</span>'

    grey = '<span title="environment" style="color:#7b8794">{}</span>'
    return "".join(
        "".join(token(*pair) for pair in tokens) if text is None else grey.format(escape(text))
        for text, tokens in _parts(sample, decode)
    )


def figures(sample: Sample) -> str:
    """What is known of a sample besides its text."""
    parts = [
        "" if (reverse_kl := sample.reverse_kl) is None else f"reverse KL {reverse_kl:.3f}",
        f"{len(sample.own)} turns" if sample.own else "",
        f"{sample.own_length} tokens",
        f"age {sample.age}",
        "" if sample.reward is None else f"reward {sample.reward:g}",
        "truncated" if sample.truncated else "",
        ("completed by " * sample.by_teacher + f"teacher {sample.teacher}") * bool(sample.teacher),
    ]
    return "  ".join(part for part in parts if part)
