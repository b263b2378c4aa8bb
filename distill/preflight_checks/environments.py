"""Checks of environments: their sections before anything is started, their services once they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec
import numpy as np

from distill.config import RunConfig
from distill.config.prompts import EnvironmentPrompts, MixturePrompts
from distill.environments.client import EnvironmentClient
from distill.preflight_checks.probes import Finding
from distill.prompts.stream import Prompt
from sync.base import tokenizers
from sync.base.errors import ConfigError
from sync.base.own_code import check_module
from sync.wire import Array, EnvironmentInfo, EpisodeFailed, Turn, pack, unpack

ANSWER: Final = "I do not know."
"""The student's answer to the first turns that the preflight plays."""


def sources(config: RunConfig) -> dict[str, EnvironmentPrompts]:
    """Key of a source of prompts ("prompts", "prompts.parts.NAME") → its environment and tasks."""
    parts: dict[str, object] = {"prompts": config.prompts}
    if isinstance(config.prompts, MixturePrompts):
        parts = {f"prompts.parts.{name}": part for name, part in config.prompts.parts.items()}
    return {key: part for key, part in parts.items() if isinstance(part, EnvironmentPrompts)}


def problems(config: RunConfig) -> Iterator[str]:
    """What is wrong between [environments.NAME] and the other sections."""
    sections, used = config.environments, sources(config)
    for key, source in used.items():
        if source.environment not in sections:
            known = ", ".join(sections) or "none"
            rule = f"{key}.environment is {source.environment!r}, the environments are {known}"
            yield f"{rule}: use their names"
    for name in sections.keys() - {entry.environment for entry in used.values()}:
        yield f"environments.{name} is named by no prompts: set prompts.environment, or leave it out"
    if used and config.objective.on_policy < 1:
        yield (
            f"objective.on_policy is {config.objective.on_policy:g}, and a teacher's completion of a prompt "
            "is no episode: set it to 1, or take prompts of another type"
        )
    for name, teacher in config.teachers.items():
        if used and teacher.prompt_transform is not None:
            yield (
                f"teachers.{name}.prompt_transform is set, and prompts of an environment come with its first "
                "turn: leave it out"
            )
    for name in sections:
        yield from check_environment(config, name)


def check_environment(config: RunConfig, name: str) -> Iterator[str]:
    """What keeps this environment from being started here; nothing where it is reached by URL."""
    section = config.environments[name]
    if section.urls:
        return
    if section.python is not None and not section.python.is_file():
        remedy = (
            "make one with `make environments`, or" if section.type == "verifiers" else "leave it out, or"
        )
        yield (
            f"environments.{name}.python {section.python} does not exist: {remedy} name the interpreter of a "
            "virtual environment"
        )
    if section.type == "python" and section.python is None:
        try:
            check_module(section.environment, f"environments.{name}.environment")
        except ConfigError as error:
            yield str(error)


# --- services that answer


def longest(config: RunConfig, limit: int) -> int:
    """Tokens of the longest episode; `limit`: of the student. 0: there are no environments."""
    return max((environment.max_tokens or limit for environment in config.environments.values()), default=0)


def same_tokenizer(student: str, info: EnvironmentInfo) -> Finding:
    """Whether it makes the student's tokens; `student`: fingerprint of the student's tokenizer."""
    parts = tokenizers.differing_parts(student, info.tokenizer_fingerprint)
    figure = f"of {info.environment}"
    problem = f"different {', '.join(parts)}: start it from this run's configuration"
    return Finding("same tokenizer", figure, problem if parts else None)


def enough_tasks(config: RunConfig, name: str, info: EnvironmentInfo) -> Finding:
    """Whether it has the tasks that the prompts name."""
    there, problem = info.tasks, None
    for key, source in sources(config).items():
        if (
            source.environment == name
            and there is not None
            and (source.tasks is None or source.tasks > there)
        ):
            count = "not set" if source.tasks is None else source.tasks
            problem = f"{key}.tasks is {count}: set it to {there} or less"
    return Finding("tasks", "endless" if there is None else f"{there}", problem)


def first_fits(prompts: Sequence[Prompt], limit: int) -> Finding:
    """Whether its first prompts leave room for an answer in an episode of `most` tokens."""
    longest_ = max((len(prompt.token_ids) for prompt in prompts), default=0)
    problem = "no answer fits behind that: raise max_tokens of the environment, or max-model-len"
    figure = f"up to {longest_} tokens of an episode of {limit}"
    return Finding("first prompts", figure, problem if longest_ >= limit else None)


async def with_first_prompts(
    sample: Sequence[Prompt], clients: Mapping[str, EnvironmentClient], limit: int, tokenizer: Any
) -> list[Prompt]:
    """`sample` with the first prompts of its first `limit` episodes of each environment, others left out.

    Each is played on by an answer of `tokenizer`'s, to the second turn or the end. Raises ConfigError for a
    task that does not begin with a turn, or fails at the answer.
    """
    ids = list(tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    answer = pack(np.array(ids if end is None else [*ids, end], "i4"))
    prompts: list[Prompt] = []
    begun = dict.fromkeys(clients, 0)
    for prompt in sample:
        if not (name := prompt.environment):
            prompts.append(prompt)
        elif begun[name] < limit:
            begun[name] += 1
            prompts.append(await _begun(prompt, clients[name], answer))
    return prompts


async def _begun(prompt: Prompt, client: EnvironmentClient, answer: Array) -> Prompt:
    id, task = f"preflight:{uuid4().hex}", f"environments.{client.name}: task {prompt.task}"
    try:
        said = await client.begin(id, prompt.task)
        second = await client.proceed(id, said.turn, answer, "stop") if isinstance(said, Turn) else said
    finally:
        await client.end([id])
    if not isinstance(said, Turn):
        error = getattr(said, "error", "it is over before the student's first turn")
        raise ConfigError(f"{task} cannot be played: {error}")
    if isinstance(second, EpisodeFailed):
        raise ConfigError(f"{task} cannot be played on when the student answers {ANSWER!r}: {second.error}")
    return msgspec.structs.replace(prompt, token_ids=unpack(said.token_ids).tolist())
