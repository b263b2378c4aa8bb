"""The tokenizers of a run: what its models share, what differs, and what is done about it.

`resolve` changes the configuration accordingly: `known_ids` of every model, the end ids of the teachers in
`rollout.stop_token_ids`, the chat template of a student that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distill.config import RunConfig
from distill.prompts.sources import text_config
from sync.base import tokenizers
from sync.base.errors import ConfigError, DataError
from sync.base.settings import ModelSource
from teacher_service.config import TeacherConfig


class Shared(NamedTuple):
    """A configuration whose models mean the same by an id."""

    config: RunConfig
    tokenizer: Any
    """The student's, with the chat template that prompts are rendered by."""
    lines: list[str]
    """What differs, and what is done about it."""


def resolve(config: RunConfig, templated: dict[str, bool]) -> Shared:
    """Compare the student's tokenizer with those of the teachers that can be read here.

    `templated`: teachers to whom prompts go as the student's chat template renders them. Raises DataError for
    ids that mean different text, ConfigError for a tokenizer with more ids than its model has rows.
    """
    tokenizer = tokenizers.load_tokenizer(config.student)
    check_rows(config.student, tokenizer, "student")
    size, largest = (
        tokenizers.vocab_size(tokenizer, config.student.known_ids),
        tokenizers.vocab_size(tokenizer),
    )
    known, lines = size, list[str]()
    tokenizers_of = ((name, _readable(teacher)) for name, teacher in config.teachers.items())
    readable = {name: theirs for name, theirs in tokenizers_of if theirs is not None}
    for name, theirs in readable.items():
        teacher = config.teachers[name]
        try:
            agreement = tokenizers.agree(tokenizer, theirs)
        except DataError as error:
            raise DataError(
                f"student {config.student.path} and teacher {teacher.path} have different vocabularies, "
                f"{error}: token ids must mean the same to both, choose models of one family"
            ) from None
        rows, largest = _rows(teacher, size), max(largest, tokenizers.vocab_size(theirs))
        known = min(known, agreement.known_ids, rows)
        lines += [_of(name) + line for line in agreement.lines]
        if rows < min(agreement.known_ids, size):
            lines.append(
                f"{_of(name)}the teacher's model has {rows} rows: ids beyond them are left out of both sides"
            )
        if templated[name]:
            config, line = _template(config, name, tokenizer, theirs)
            lines += [_of(name) + line] if line else []
    ends = tokenizers.end_ids(config.student, tokenizer)
    _check_needed(tokenizer, known, any(templated.values()))
    stops, more = _stops(config, readable, tokenizer, ends, known)
    return Shared(_changed(config, known if known < largest else None, stops), tokenizer, [*lines, *more])


def _of(teacher: str) -> str:
    return f"tokenizers of the student and teacher {teacher}: "


def _stops(
    config: RunConfig, readable: Mapping[str, Any], tokenizer: Any, ends: list[int], known: int
) -> tuple[list[int], list[str]]:
    """`rollout.stop_token_ids` with the ends of the teachers that the student, which has `ends`, does not."""
    stops, lines = [*config.rollout.stop_token_ids], []
    for name, theirs in readable.items():
        for end in tokenizers.end_ids(config.teachers[name], theirs):
            if end in ends or end in stops:
                continue
            done = "which the student does not have: it is left out"
            if end < known:
                stops.append(end)
                done = (
                    f"the student at {_names(tokenizer, ends)}: completions end at either, and {end} is "
                    "learnt (rollout.stop_token_ids)"
                )
            lines.append(f"{_of(name)}the teacher ends at {_names(theirs, [end])}, {done}")
    return stops, lines


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
        if not teacher.urls:
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
        student = config.student.model_copy(update={"chat_template": path})
        line = f"the student has no chat template: prompts are rendered by the teacher's ({path})"
        return config.model_copy(update={"student": student}), line
    mine, other = map(tokenizers.chat_template_fingerprint, (tokenizer, theirs))
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
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(id_)!r} ({id_})" for id_ in ids) or "nothing"


def _changed(config: RunConfig, known: int | None, stops: list[int]) -> RunConfig:
    """The configuration with these; itself where nothing differs."""
    if stops != config.rollout.stop_token_ids:
        rollout = config.rollout.model_copy(update={"stop_token_ids": stops})
        config = config.model_copy(update={"rollout": rollout})
    if known is None:
        return config
    teachers = {
        name: teacher.model_copy(update={"known_ids": known}) for name, teacher in config.teachers.items()
    }
    student = config.student.model_copy(update={"known_ids": known})
    return config.model_copy(update={"student": student, "teachers": teachers})
