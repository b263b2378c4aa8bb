"""[prompts]: where prompts and rewards come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sync.base.settings import Content, Fixed, Holds, Live, Name, Settings, TemplateVariables


class _Rewarded(Settings):
    pass_threshold: Live[float] = 1.0
    """Least reward of a completion that passes, for pass rates, pass@1 and maj@k; set it where rewards are
    graded."""


class TaskPrompts(_Rewarded):
    """A task that generates prompts and computes rewards."""

    type: Content[Literal["task"]]
    task: Fixed[str]
    """A module of distill.tasks by name, any "package.module" with a function `make`,
    "package.module:function", or the name that an installed package registers (docs/extending.md)."""
    options: Fixed[dict[str, Any]] = {}
    """Arguments of that function."""
    reward_timeout_seconds: Live[float] = Field(10.0, gt=0)
    """Time limit of the check of one completion; one that exceeds it costs the completion."""


class RowPrompts(_Rewarded):
    """Prompts in rows of a file or dataset."""

    field: Content[str] = "prompt"
    """Field (column) of the prompt: a text, or a list of chat messages (role and content, or ShareGPT's from
    and value; also as JSON text)."""
    source_field: Content[str | None] = None
    """Field that names the data source, by which prompts are routed to teachers; None: "default" for all."""
    answer_field: Content[str | None] = None
    """Field of the reference answer, which `reward_fn` reads; None: there are none."""
    reward_fn: Fixed[str | None] = None
    """Reward of a completion, for `objective.task` and, from `pass_threshold` on, the pass rate. "exact": 1
    when it equals the answer; "contains": 1 when the answer occurs in it as whole words; "number": 1
    when both end on the same decimal number (none ends on 1/2 or 3:45); "math": 1 when math-verify
    finds its final answer equal (extra `math`); "package.module:function": what function(prompt,
    completion) returns, a bool or a finite number, or a pair of that and the answer as text for maj@k,
    from `prompt.answer`, `prompt.text` and the completion's text, or a name that an installed package
    registers for one. It runs in processes of its own. None: no reward and no pass rate."""
    reward_timeout_seconds: Live[float] = Field(10.0, gt=0)
    """Time limit of `reward_fn` for one completion; one that exceeds it costs the completion."""
    template: Content[Literal["chat", "plain"]] = "chat"
    """chat: apply the student's chat template, once. plain: take the text as it is."""
    chat_template_kwargs: Content[TemplateVariables] = {}
    """Further variables of the chat template, such as {enable_thinking = false}; one that it does not read is
    refused."""
    system_prompt: Content[str | None] = None
    """System message of prompts that begin with none."""
    prompt_suffix: Content[str] = ""
    """Text after each prompt, inside the user's last message."""
    drop_answer: Content[bool] = False
    """Leave the assistant's turn out that ends a list of messages; else such a row is refused, for its answer
    would be in the prompt."""
    min_prompt_tokens: Content[int] = Field(1, ge=1)
    """Shorter prompts, template included, are dropped and counted."""
    max_prompt_tokens: Content[int | None] = Field(None, ge=1)
    """Longer prompts are dropped and counted. None: a prompt that leaves no room for `rollout.max_tokens` is
    refused."""


class JsonlPrompts(RowPrompts):
    """A file with one JSON object per line."""

    type: Content[Literal["jsonl"]]
    path: Annotated[Content[Path], Holds.FILE]
    """The file."""


class DatasetPrompts(RowPrompts):
    """A dataset that `datasets.load_dataset` loads."""

    type: Content[Literal["dataset"]]
    path: Annotated[Content[str], Holds.MODEL]
    """A Hub id, or a folder of Parquet, JSON, CSV or Arrow files."""
    name: Content[str | None] = None
    """Configuration of the dataset; None: its only one."""
    split: Content[str] = "train"
    """Such as "train" or "train[:10%]"."""
    revision: Content[str | None] = None
    """Commit, tag or branch on the Hub."""
    stream_rows: Fixed[int | None] = Field(None, ge=1)
    """Stream the dataset: so many prompts are in memory, twice, and are shuffled among themselves. A row that
    cannot be used is dropped and counted. None: all rows are read, checked and shuffled."""


class EnvironmentPrompts(_Rewarded):
    """Episodes of an environment: it gives the prompts of every turn, and the reward."""

    type: Content[Literal["environment"]]
    environment: Content[str]
    """Name of a section [environments.NAME]."""
    tasks: Content[int | None] = Field(None, ge=2)
    """Its tasks 0 to `tasks` − 1, in shuffled epochs; None: it has no end of tasks, in order. The first
    `evaluation.prompts` of them, at most a tenth, are held out."""


SinglePrompts = Annotated[TaskPrompts | JsonlPrompts | DatasetPrompts, Field(discriminator="type")]
PartPrompts = Annotated[
    TaskPrompts | JsonlPrompts | DatasetPrompts | EnvironmentPrompts, Field(discriminator="type")
]


class MixturePrompts(Settings):
    """Several sources: each prompt is drawn from one of them at random, in proportion to the weights.

    Each goes through its rows pass after pass, at its own pace.
    """

    type: Content[Literal["mixture"]]
    parts: Fixed[dict[Name, PartPrompts]] = Field(min_length=1)
    """Name → a source of type task, jsonl, dataset or environment. The name is the data source of its
    prompts, by which they are routed to teachers; a part sets no `source_field`."""
    weights: Fixed[dict[str, Annotated[float, Field(gt=0)]]] = {}
    """Name → share of the prompts, relative to the others; parts not named: 1."""


PromptsConfig = Annotated[
    TaskPrompts | JsonlPrompts | DatasetPrompts | EnvironmentPrompts | MixturePrompts,
    Field(discriminator="type"),
]


def sources_of(prompts: PromptsConfig) -> dict[str, PartPrompts]:
    """Key of each source of prompts, "prompts" or "prompts.parts.NAME" → the source."""
    if isinstance(prompts, MixturePrompts):
        return {f"prompts.parts.{name}": part for name, part in prompts.parts.items()}
    return {"prompts": prompts}


def pass_threshold(prompts: PromptsConfig, source: str) -> float:
    """The least reward that passes, for a prompt of data source `source`."""
    return (prompts.parts[source] if isinstance(prompts, MixturePrompts) else prompts).pass_threshold
