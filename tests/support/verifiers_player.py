"""Plays episodes of verifiers environments with scripted students, and prints what came of them as JSON.

Run by the interpreter of `make environments`, which has no pytest: test_verifiers_environment.py reads it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from byte_tokenizer import byte_tokenizer
from episodes import Played

from distill.environments.config import EnvironmentConfig
from distill.environments.episode import Environment, Episode, Limits, play
from distill.environments.verifiers_host import VerifiersEnvironment
from distill.tasks import calculate
from distill.tasks.teaching import make_tokenizer
from sync.base.errors import DistillError
from sync.wire import Generated, Version, VersionSpan, pack

GUESSES = [f"[{n}]" for n in range(1, 21)]
VOCABULARY = ["<pad>", "</s>", "u:", "a:", "s:", "higher", "lower", "?", *GUESSES, "[", "]", *string.digits]
"""Every guess is one token, and may be spelled with several."""
TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'u:', 'assistant': 'a:', 'system': 's:'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
CHATML = Path(__file__).parents[2] / "configs/templates/chatml.jinja"
Student = Callable[[str], list[int]]
"""The text so far → its answer's ids."""


def guess_tokenizer() -> Any:
    tokenizer = make_tokenizer(VOCABULARY, r"</s>|[uas]:|higher|lower|\[[0-9]+\]|.", "</s>", "<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def bisecting(rng: random.Random, spelled: float = 0.0, sloppy: float = 0.0) -> Student:
    """Guesses the middle; a share is spelled digit by digit, another is any number, or none."""

    def answer(text: str) -> list[int]:
        low, high = 1, 20
        for guess, hint in re.findall(r"\[(\d+)\]</s>u:(higher|lower)", text):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        guess = f"[{(low + high) // 2}]"
        if rng.random() < sloppy:
            guess = rng.choice([*GUESSES, "?", "[[", "[99]"])
        words = list(guess) if rng.random() < spelled or guess not in VOCABULARY else [guess]
        return [VOCABULARY.index(word) for word in [*words, "</s>"]]

    return answer


async def played(
    environment: Environment | VerifiersEnvironment,
    tokenizer: Any,
    name: str,
    task: int,
    student: Student,
    seconds: float = 120.0,
) -> dict[str, Any]:
    """One episode by the loop that a run has, as facts."""
    if isinstance(environment, VerifiersEnvironment):
        environment = Played(environment)
    said: list[list[int]] = []

    async def generate(episode: Episode) -> Generated:
        ids = student(tokenizer.decode(episode.context))
        said.append(ids)
        span = VersionSpan(Version(0, 0), 0, len(ids))
        return Generated(
            episode.id, pack(np.array(ids, "i4")), pack(np.zeros(len(ids), "f4")), [span], "stop"
        )

    episode, limits = Episode(name), Limits(16, 4096, None, len(tokenizer))
    error = None
    try:
        async with asyncio.timeout(seconds):
            await play(environment, episode, task, generate, limits)
    except (DistillError, TimeoutError) as problem:
        error = f"{type(problem).__name__}: {problem}"
        await environment.end(name)
    [first, *more] = episode.sequences
    return {
        "prompt": first.prompt,
        "token_ids": first.token_ids,
        "own": first.own,
        "more": [(one.prompt, one.token_ids) for one in more],
        "said": said,
        "again": tokenizer.encode(tokenizer.decode(first.context)),
        "text": tokenizer.decode(first.context),
        "ended": episode.ended,
        "reward": episode.reward,
        "metrics": episode.metrics,
        "error": error,
    }


@asynccontextmanager
async def opened(name: str, tokenizer: Any, **options: Any) -> AsyncIterator[VerifiersEnvironment]:
    config = EnvironmentConfig(type="verifiers", environment=name, options=options)
    host = VerifiersEnvironment("tried", config, tokenizer)
    async with host.serving():
        yield host


async def guesses() -> dict[str, Any]:
    tokenizer = guess_tokenizer()
    async with opened("textarena_guess", tokenizer) as environment:

        async def one(episode: int, task: int, **shares: float) -> dict[str, Any]:
            student = bisecting(random.Random(episode), **shares)
            return await played(environment, tokenizer, f"0:{episode}:0", task, student)

        many = await asyncio.gather(*(one(i, i, spelled=0.3, sloppy=0.2) for i in range(50)))
        clean = [await one(100 + i, i % 5, spelled=float(i >= 5)) for i in range(10)]
        random.seed(5)
        drawn = random.random()
        random.seed(5)
        await one(200, 7)
        untouched = random.random() == drawn
        twice = Played(environment)
        first = await twice.begin("given up", 3)
        await twice.end("given up")
        await twice.end("unknown")
        again = await twice.begin("given up", 3)
        await twice.end("given up")
        return {
            "tasks": environment.tasks,
            "many": many,
            "clean": clean,
            "randomness untouched": untouched,
            "same again": first == again,
        }


async def wrongs() -> dict[str, Any]:
    import misbehaving  # and verifiers with it

    tokenizer = guess_tokenizer()
    facts: dict[str, Any] = {}
    options = {"player": {"harness": {"id": "direct"}}}
    async with opened("misbehaving", tokenizer, **options) as environment:
        facts["tasks"] = environment.tasks
        for task, wrong in enumerate([*misbehaving.TASKS, "no task"]):
            student = bisecting(random.Random(task))
            seconds = 1.0 if "hangs" in wrong else 120.0
            facts[wrong] = await played(environment, tokenizer, wrong, task, student, seconds)
    facts["left"] = len(environment._of)
    return facts


async def sums() -> dict[str, Any]:
    tokenizer = byte_tokenizer(CHATML.read_text(), names=("<tool_call>", "</tool_call>"))

    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    def compute(expression: str) -> str:
        return call("compute", expression=expression)

    def student(*answers: str) -> Student:
        def answer(text: str) -> list[int]:
            said = answers[text.count("<|im_start|>assistant") - 1]
            if said == "…":
                said = re.findall(r"tool\s+(-?\d+)<", text)[-1]
            return tokenizer.encode(said + "<|im_end|>")

        return answer

    agent = {"runtime": {"type": "subprocess"}}
    options = {"agent": agent, "renderer": {"tool_parser": "qwen3"}, "taskset": {"size": 30}}
    async with opened("calculator", tokenizer, **options) as environment:
        wrong = (
            compute("1/0"),
            compute("two"),
            call("compile"),
            call("compute", base=2),
            compute("\ud800"),
            "<tool_call>{",
        )
        errors = await played(environment, tokenizer, "errors", 0, student(*wrong))
        question = re.search(r"(\d+)\*(\d+)\+(\d+)=", errors["text"])
        a, b, c = map(int, question.groups())
        right = student(compute(f"{a}*{b}") + compute("2+2"), compute(f"{a * b}+{c}"), "…")
        return {
            "tasks": environment.tasks,
            "errors": errors,
            "right": await played(environment, tokenizer, "right", 0, right),
        }


async def toy() -> dict[str, Any]:
    """The quickstart's: a call with an error, the right ones, the answer."""
    tokenizer = calculate.calculate_tokenizer()

    def caller(text: str) -> list[int]:
        question = re.match(r"u:(\d\d)\*(\d\d)\+(\d\d)=", text)
        a, b, c = map(int, question.groups())
        said = [f"{a}{b}", f"{a}*{b}", f"{a * b}+{c}", str(a * b + c)][text.count("a:") - 1]
        words = [*said, calculate.EOS]
        if text.count("a:") < 4:
            words = [*calculate.BEGIN, *said, *calculate.END]
        return [calculate.VOCABULARY.index(word) for word in words]

    options = {"agent": {"runtime": {"type": "subprocess"}}, "renderer": {"tool_parser": "qwen3"}}
    taskset = {"size": 30, "lowest": calculate.LOWEST}
    async with opened("calculator", tokenizer, taskset=taskset, **options) as environment:
        return await played(environment, tokenizer, "toy", 3, caller)


async def one_turn() -> dict[str, Any]:
    tokenizer = guess_tokenizer()
    agent = {"harness": {"id": "direct"}, "runtime": {"type": "subprocess"}}
    async with opened("one_turn", tokenizer, agent=agent) as environment:
        return await played(environment, tokenizer, "one", 1, bisecting(random.Random(0)))


async def main() -> None:
    facts = {"guesses": await guesses(), "wrongs": await wrongs(), "sums": await sums()}
    facts["toy"], facts["one turn"] = await toy(), await one_turn()
    facts["torch"] = "torch" in sys.modules
    sys.stdout.write(json.dumps(facts))


if __name__ == "__main__":
    asyncio.run(main())
