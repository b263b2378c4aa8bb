"""What a run has understood of its prompts: checks of template and tokenizer in seconds, and lines to read.

`check_rendering` comes before any row is read; `first_prompts` shows what came of the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError

from distill.config import RunConfig
from distill.config.loading import recorded
from distill.config.prompts import EnvironmentPrompts, MixturePrompts, RowPrompts
from distill.prompts.rows import rendered
from distill.prompts.sources import PromptSplit
from distill.prompts.stream import Mixture, Prompt
from sync.base.errors import DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import at_time, end_ids, end_of_turn

_ANSWER: Final = "It is four."
_CONVERSATION: Final = (
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": _ANSWER},
)
"""No template changes these texts."""
_SAMPLE: Final = "The capital of France, on 1 line:\n  two  spaces, 12345 and a caf\u00e9."
"""Text whose spaces, digits and accents a tokenizer must keep."""
SHOWN: Final = 400
"""Characters of a prompt that are shown, half of them from its end."""


def check_rendering(config: RunConfig, tokenizer: Any) -> tuple[RunConfig, list[str]]:
    """Render two turns, and compare the tokenizer with its file.

    Returns the configuration, in which completions also end at the token that the template writes behind an
    assistant's turn, and what is to be known. Raises DataError for a template that does not open the
    assistant's turn, and for a tokenizer that loses text.
    """
    lines = [*_tokenizer_lines(config.student, tokenizer)]
    if tokenizer.chat_template and (variables := _variables(config)) is not None:
        template = str(tokenizer.chat_template)
        if "strftime_now" in template:
            if (moment := config.student.template_time) is None:
                moment = _start_of_run(config)
                at_time(tokenizer, moment)
                student = config.student.model_copy(update={"template_time": moment})
                config = config.model_copy(update={"student": student})
            lines.append(
                f"the chat template reads the clock, which stays at {moment} (student.template_time)"
            )
        lines += _opening_lines(tokenizer, variables)
        end = end_of_turn(tokenizer, variables)
        ends = {*end_ids(config.student, tokenizer), *config.rollout.stop_token_ids}
        if end is not None and end not in ends:
            stops = [*config.rollout.stop_token_ids, end]
            rollout = config.rollout.model_copy(update={"stop_token_ids": stops})
            config = config.model_copy(update={"rollout": rollout})
            lines.append(
                f"the chat template ends a turn with {_name(tokenizer, end)}, at which the model does not "
                f"stop: rollout.stop_token_ids = {stops}"
            )
    return config, [f"prompts: {line}" for line in lines]


def _start_of_run(config: RunConfig) -> datetime:
    """What the clock was when the run began; now, for one that begins."""
    if (config.run_dir / "config.json").is_file():
        before = recorded(config.run_dir).get("student")
        if isinstance(before, dict) and before.get("template_time"):
            return datetime.fromisoformat(str(before["template_time"]))
    return datetime.now().replace(microsecond=0)


def first_prompts(config: RunConfig, split: PromptSplit, tokenizer: Any) -> list[str]:
    """The first prompt of every source with its special tokens, the first answers, and the end ids."""
    lines = list[str]()
    parts = split.train.parts if isinstance(split.train, Mixture) else {"": split.train}
    for name, source in parts.items():
        first = [source[index] for index in range(_known(source, 3))]
        where = f" of {name}" if name else ""
        lines += _shown(first, where, tokenizer)
    ends = sorted({*end_ids(config.student, tokenizer), *config.rollout.stop_token_ids})
    named = ", ".join(_name(tokenizer, end) for end in ends) or "no token: only rollout.max_tokens ends them"
    return [*lines, f"prompts: completions end at {named}"]


def _known(source: Any, count: int) -> int:
    return min(count, len(source)) if hasattr(source, "__len__") else count


def _shown(prompts: Sequence[Prompt], where: str, tokenizer: Any) -> Iterator[str]:
    if not prompts[0].token_ids:
        yield f"prompts: environment {prompts[0].environment} gives those{where}"
        return
    text = str(tokenizer.decode(prompts[0].token_ids, skip_special_tokens=False))
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    yield f"prompts: the first{where} is {text!r} ({len(prompts[0].token_ids)} tokens)"
    answers = [prompt.answer for prompt in prompts if prompt.answer is not None]
    if answers:
        yield f"prompts: first answers{where}: {', '.join(f'{answer!r:.60}' for answer in answers)}"


def _variables(config: RunConfig) -> Mapping[str, Any] | None:
    """Variables of the chat template, of the first source that goes through it; None: none does."""
    prompts = config.prompts
    for part in prompts.parts.values() if isinstance(prompts, MixturePrompts) else [prompts]:
        if isinstance(part, RowPrompts) and part.template == "chat":
            return part.chat_template_kwargs
        if isinstance(part, EnvironmentPrompts):
            section = config.environments.get(part.environment)
            return getattr(section, "chat_template_kwargs", {})
    return None


def _opening_lines(tokenizer: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    """Raises DataError when the prompt ends before the assistant's turn is opened."""
    try:
        asked = rendered(tokenizer, _CONVERSATION[:1], variables)
        closed = rendered(tokenizer, _CONVERSATION[:1], variables, opened=False)
        answered = rendered(tokenizer, _CONVERSATION[:2], variables, opened=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        yield f"the chat template takes no question and answer ({type(error).__name__}: {error})"
        return
    header, answer, _ = answered.removeprefix(asked).partition(_ANSWER)
    if asked == closed and answered.startswith(asked) and answer and header.strip():
        raise DataError(
            f"the chat template does not open the assistant's turn: the prompt ends with {asked[-30:]!r}, "
            f"and an answer begins with {header!r}: name a template in student.chat_template that writes it "
            "where add_generation_prompt is true"
        )


def _tokenizer_lines(source: ModelSource, tokenizer: Any) -> Iterator[str]:
    """Raises DataError when the tokenizer makes ids of text that its own file does not, and loses some."""
    path = Path(source.path) / "tokenizer.json"
    if not path.is_file():
        return
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(path))
    expected = raw.encode(_SAMPLE, add_special_tokens=False).ids
    ids = list(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    if raw.decode(expected, skip_special_tokens=False).strip() != _SAMPLE:
        return  # a vocabulary that does not hold such text
    if text.strip() != _SAMPLE:
        raise DataError(
            f"the tokenizer of {source.path} (class {type(tokenizer).__name__}) makes {text!r} of "
            f"{_SAMPLE!r}, and its tokenizer.json does not: correct tokenizer_class in "
            "tokenizer_config.json, such as PreTrainedTokenizerFast"
        )
    if ids != expected:
        name = type(tokenizer).__name__
        yield f"the tokenizer (class {name}) cuts text in other places than its tokenizer.json"


def _name(tokenizer: Any, id_: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(id_)!r} ({id_})"
