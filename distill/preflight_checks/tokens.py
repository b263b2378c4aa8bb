"""What ids and text mean in a run: tokenizers that its models share, its chat template, its first prompts.

`resolve` changes the configuration before any row is read: `known_ids` of every model, the end ids of
teachers and template in `rollout.stop_token_ids`, the chat template of a student that has none, the clock of
one. `first_prompts` shows what came of the first rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from distill.config import RunConfig
from distill.config.loading import recorded
from distill.config.prompts import EnvironmentPrompts, RowPrompts, sources_of
from distill.prompts.rows import REFUSALS, rendered
from distill.prompts.sources import PromptSplit, sample_prompts, text_config
from distill.prompts.stream import Mixture, Prompt
from distill.translation import translations
from sync.base import tokenizers
from sync.base.errors import ConfigError, DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import at_time, end_ids, end_of_turn
from teacher_service.config import TeacherConfig

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
_OF: Final = "tokenizers of the student and teacher {}: "


def resolve(config: RunConfig) -> tuple[RunConfig, Any, list[str]]:
    """Compare the student's tokenizer with those of the teachers that can be read here, and render two turns.

    Returns a configuration whose models mean the same by an id, the student's tokenizer with the chat
    template that prompts are rendered by, and what differs and is done about it. Raises what
    `check_rendering` does, DataError for ids that mean different text too, and ConfigError for a tokenizer
    with more ids than its model has rows.
    """
    templated = {name: shares_template(config, name) for name in config.teachers}
    tokenizer = tokenizers.load_tokenizer(config.student)
    check_rows(config.student, tokenizer, "student")
    size = known = tokenizers.vocab_size(tokenizer, config.student.known_ids)
    largest, lines = tokenizers.vocab_size(tokenizer), list[str]()
    readable = {
        name: theirs
        for name, teacher in config.teachers.items()
        if (theirs := _readable(teacher)) is not None
    }
    for name, theirs in readable.items():
        teacher = config.teachers[name]
        agreement, why = _agreement(config, name, tokenizer, theirs)
        if agreement is None:
            lines += [why] if why else []
            config = config.with_(teachers={name: {"tokenizer": "own"}})
            if templated[name] and not theirs.chat_template:
                raise DataError(
                    f"teacher {teacher.path} has a tokenizer of its own and no chat template to render "
                    f"prompts by: name one in teachers.{name}.chat_template, or set prompts.template = "
                    '"plain"'
                )
            continue
        rows, largest = _rows(teacher, size), max(largest, tokenizers.vocab_size(theirs))
        known = min(known, agreement.known_ids, rows)
        differences = [*agreement.lines]
        if rows < min(agreement.known_ids, size):
            differences.append(
                f"the teacher's model has {rows} rows: ids beyond them are left out of both sides"
            )
        if templated[name]:
            config, line = _template(config, name, tokenizer, theirs)
            differences += [line] if line else []
        lines += [_OF.format(name) + difference for difference in differences]
    sharing = [name for name, teacher in config.teachers.items() if teacher.tokenizer != "own"]
    _check_needed(tokenizer, known, any(templated[name] for name in sharing))
    config, more = _with_ends(
        config, {name: readable[name] for name in sharing if name in readable}, tokenizer, known
    )
    if known < largest:
        same = {"known_ids": known}
        config = config.with_(student=same, teachers=dict.fromkeys(sharing, same))
    config, rendering = check_rendering(config, tokenizer)
    return config, tokenizer, [*lines, *more, *rendering]


def _agreement(
    config: RunConfig, name: str, tokenizer: Any, theirs: Any
) -> tuple[tokenizers.Agreement | None, str]:
    """What student and teacher mean alike; None: the teacher scores text, and why, if that is our choice.

    Raises DataError where ids must mean the same and do not.
    """
    teacher = config.teachers[name]
    if teacher.tokenizer == "own":
        return None, ""
    try:
        return tokenizers.agree(tokenizer, theirs), ""
    except DataError as error:
        differ = f"student {config.student.path} and teacher {teacher.path} have different vocabularies"
        if teacher.tokenizer == "auto":
            return None, f'{differ}, {error}: the teacher scores text (teachers.{name}.tokenizer = "own")'
        raise DataError(
            f"{differ}, {error}: token ids must mean the same to both where teachers.{name}.tokenizer is "
            '"student". Choose models of one family, or set it to "own"'
        ) from None


def _with_ends(
    config: RunConfig, readable: Mapping[str, Any], tokenizer: Any, known: int
) -> tuple[RunConfig, list[str]]:
    """The configuration, in which completions also end where a teacher's do, and what was added."""
    ends, stops, lines = end_ids(config.student, tokenizer), config.rollout.stop_token_ids, list[str]()
    for name, theirs in readable.items():
        for end in end_ids(config.teachers[name], theirs):
            if end in ends or end in stops:
                continue
            done = "which the student does not have: it is left out"
            if end < known:
                stops = [*stops, end]
                done = (
                    f"the student at {_names(tokenizer, ends)}: completions end at either, and {end} is "
                    "learnt (rollout.stop_token_ids)"
                )
            lines.append(f"{_OF.format(name)}the teacher ends at {_names(theirs, [end])}, {done}")
    return config.with_(rollout={"stop_token_ids": stops}), lines


def check_rows(source: ModelSource, tokenizer: Any, section: str) -> None:
    """Raise ConfigError when the tokenizer has an id that the model has no row for."""
    size = tokenizers.vocab_size(tokenizer, source.known_ids)
    rows = _rows(source, size)
    if size > rows:
        beyond = [f"{token!r} ({id_})" for token, id_ in tokenizer.get_vocab().items() if rows <= id_ < size]
        raise ConfigError(
            f"{section}.path {source.path}: its tokenizer has {size} ids and its model {rows} rows, so there "
            f"is none for {', '.join(sorted(beyond)[:3])}: resize the model's embeddings, give it its own "
            f"tokenizer, or set {section}.known_ids = {rows} where no prompt has them"
        )


def _rows(source: ModelSource, size: int) -> int:
    """Rows of the model's embedding; `size` where its config names none."""
    return int(getattr(text_config(source), "vocab_size", None) or size)


def _readable(teacher: TeacherConfig) -> Any | None:
    """Its tokenizer; None: it runs elsewhere, with files that are not here."""
    try:
        return tokenizers.load_tokenizer(teacher)
    except ConfigError:
        if not teacher.urls or teacher.tokenizer == "own":
            raise
        return None


def _template(config: RunConfig, name: str, tokenizer: Any, theirs: Any) -> tuple[RunConfig, str | None]:
    """The configuration with a template for a student without one, and what differs.

    Raises DataError when two conversations render to different text.
    """
    teacher = config.teachers[name]
    if not tokenizer.chat_template and theirs.chat_template:
        tokenizer.chat_template = theirs.chat_template
        path = teacher.chat_template or teacher.path
        line = f"the student has no chat template: prompts are rendered by the teacher's ({path})"
        return config.with_(student={"chat_template": path}), line
    kinds = template_variables(config)
    mine, other = ([tokenizers.rendered(side, kind) for kind in kinds] for side in (tokenizer, theirs))
    if mine != other:
        raise DataError(
            f"student {config.student.path} and teacher {teacher.path} have different chat templates: the "
            "teacher would see a format it was not trained on. Name the same Jinja file in "
            f"student.chat_template and teachers.{name}.chat_template, or set "
            f"teachers.{name}.prompt_transform"
        )
    if tokenizer.chat_template == theirs.chat_template:
        return config, None
    return config, "chat templates differ in text and render conversations alike: the student's is used"


def _check_needed(tokenizer: Any, known: int, templated: bool) -> None:
    """Raise DataError when the student cannot do without an id that a teacher does not have."""
    needed = {} if tokenizer.eos_token_id is None else {tokenizer.eos_token_id: "a completion ends with it"}
    if templated and tokenizer.chat_template:
        for text in tokenizers.rendered(tokenizer):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            needed |= dict.fromkeys(ids, "the chat template writes it")
    for id_, use in needed.items():
        if id_ >= known:
            text = tokenizer.convert_ids_to_tokens(id_)
            raise DataError(
                f"id {id_} ({text!r}) means nothing to a teacher, and {use} for the student: choose a "
                "teacher that has it, or give the student a tokenizer without it"
            )


def _names(tokenizer: Any, ids: list[int]) -> str:
    tokens = [tokenizer.convert_ids_to_tokens(id_) for id_ in ids]
    named = zip(ids, tokens, strict=True)
    return ", ".join(f"{'no token' if t is None else repr(t)} ({id_})" for id_, t in named) or "nothing"


# --- the chat template


def check_rendering(config: RunConfig, tokenizer: Any) -> tuple[RunConfig, list[str]]:
    """Render two turns, and compare the tokenizer with its file.

    Returns the configuration, in which completions also end at the token that the template writes behind an
    assistant's turn, and what is to be known. Raises DataError for a template that does not open the
    assistant's turn, and for a tokenizer that loses text.
    """
    lines = [*_tokenizer_lines(config.student, tokenizer)]
    if tokenizer.chat_template and (kinds := template_variables(config)):
        variables = kinds[0]
        template = str(tokenizer.chat_template)
        if "strftime_now" in template:
            if (moment := config.student.template_time) is None:
                before = recorded(config.run_dir) if (config.run_dir / "config.json").is_file() else {}
                student = before.get("student")
                began = isinstance(student, dict) and student.get("template_time")
                moment = (
                    datetime.fromisoformat(str(began)) if began else datetime.now().replace(microsecond=0)
                )
                at_time(tokenizer, moment)
                config = config.with_(student={"template_time": moment})
            lines.append(
                f"the chat template reads the clock, which stays at {moment} (student.template_time)"
            )
        lines += _opening_lines(tokenizer, variables)
        end = end_of_turn(tokenizer, variables)
        ends = end_ids(config.student, tokenizer, config.rollout.stop_token_ids)
        if end is not None and end not in ends:
            stops = [*config.rollout.stop_token_ids, end]
            config = config.with_(rollout={"stop_token_ids": stops})
            lines.append(
                f"the chat template ends a turn with {_names(tokenizer, [end])}, at which the model does not "
                f"stop: rollout.stop_token_ids = {stops}"
            )
    return config, [f"prompts: {line}" for line in lines]


def first_prompts(config: RunConfig, split: PromptSplit, tokenizer: Any) -> list[str]:
    """The first prompt of every source with its special tokens, the first answers, and the end ids."""
    lines = list[str]()
    parts = split.train.parts if isinstance(split.train, Mixture) else {"": split.train}
    for name, source in parts.items():
        first = [source[index] for index in range(min(3, len(source) if isinstance(source, Sized) else 3))]
        where = f" of {name}" if name else ""
        lines += _shown(first, where, tokenizer)
    ends = end_ids(config.student, tokenizer, config.rollout.stop_token_ids)
    names = _names(tokenizer, ends) if ends else "no token: only rollout.max_tokens ends them"
    lines.append(f"prompts: completions end at {names}")
    first = [prompt for prompt in sample_prompts(split) if prompt.token_ids]
    for name, translation in translations(config).items():
        lines += [_OF.format(name) + line for line in translation.figures(first)]
    return lines


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


def shares_template(config: RunConfig, teacher: str) -> bool:
    """Whether prompts go through the student's chat template and that teacher sees them as they are."""
    return bool(template_variables(config)) and config.teachers[teacher].prompt_transform is None


def template_variables(config: RunConfig) -> list[Mapping[str, Any]]:
    """Variables of the chat template, of every source of prompts that goes through it."""
    kinds = list[Mapping[str, Any]]()
    for part in sources_of(config.prompts).values():
        if isinstance(part, RowPrompts) and part.template == "chat":
            kinds.append(part.chat_template_kwargs)
        if isinstance(part, EnvironmentPrompts):
            section = config.environments.get(part.environment)
            kinds.append(getattr(section, "chat_template_kwargs", {}))
    return kinds


def _opening_lines(tokenizer: Any, variables: Mapping[str, Any]) -> Iterator[str]:
    """Raises DataError when the prompt ends before the assistant's turn is opened."""
    try:
        asked = rendered(tokenizer, _CONVERSATION[:1], variables)
        closed = rendered(tokenizer, _CONVERSATION[:1], variables, opened=False)
        answered = rendered(tokenizer, _CONVERSATION, variables, opened=False)
    except REFUSALS as error:
        yield f"the chat template takes no question and answer ({type(error).__name__}: {error})"
        return
    begin = tokenizer.bos_token_id
    alone, whole = tokenizer("a")["input_ids"], tokenizer(asked, add_special_tokens=False)["input_ids"]
    if begin is not None and alone[:1] == [begin] != whole[:1]:
        yield (
            f"the chat template does not begin with {tokenizer.bos_token!r}, which the tokenizer puts before "
            "a text: so prompts begin without it"
        )
    opened, (header, answer, _) = asked.removeprefix(closed), answered.removeprefix(closed).partition(_ANSWER)
    plain = asked.startswith(closed) and answered.startswith(closed) and answer
    if plain and not opened.startswith(header) and not header.startswith(opened):
        raise DataError(
            f"the chat template opens the answer with {opened!r}, and in a conversation one begins with "
            f"{header!r}: name a template in student.chat_template that writes the same"
        )
    if plain and opened.strip() == header.strip() and opened != header and opened.strip():
        yield (
            f"the chat template opens the answer with {opened!r}, and in a conversation it begins behind "
            f"{header!r}: the student writes the difference"
        )
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
    raw.no_truncation()  # a file may hold both, which transformers sets with each call
    raw.no_padding()
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
