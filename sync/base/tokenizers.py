"""Whether two models mean the same by a token id: what ids mean, how conversations are rendered, what ends.

Ids mean text: that is what `agree` compares. Names of special ids (bos, pad, unk), how an added token is
flagged, and the text of a chat template are no part of it. A fingerprint, for tokenizers elsewhere,
has two parts of 32 hex digits (BLAKE3, 128 bits each): vocabulary, and how text is cut. Works on any
tokenizer object of transformers; imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3

from sync.base.errors import ConfigError, DataError
from sync.base.hub import check_reachable
from sync.base.settings import ModelSource

PARTS: Final = ("vocabulary", "merges")
END, OTHER = 256, 257
"""In the place of a first byte: see `first_bytes`."""
_SPACE: Final = "\u2581"
"""What tokenizers of SentencePiece's kind write for a space."""
_DIGITS: Final = 32


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer, with the config's chat template. Raises ConfigError when it cannot be loaded."""
    path = Path(source.path)
    if (path.is_absolute() or source.path.startswith(".")) and not path.is_dir():
        raise ConfigError(f"model folder {source.path!r} does not exist: correct `path`, or give a Hub id")
    check_reachable(source.path, source.revision, "model")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except Exception as error:  # of its files, in the words of several libraries
        remedy = "it is no folder here; correct `path` or `revision`, or log in to the Hub (HF_TOKEN)"
        remedy = "save one beside the model" if path.is_dir() else remedy
        raise ConfigError(f"the tokenizer of {source.path!r} cannot be loaded: {remedy}. {error}") from error
    if source.chat_template is not None:
        try:
            file = Path(source.chat_template)
            if file.is_dir() or not (file.is_file() or file.suffix):  # a model, whose template it is
                tokenizer.chat_template = load_tokenizer(ModelSource(path=str(file))).chat_template
            else:
                tokenizer.chat_template = _template(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {source.chat_template!r} cannot be read: {error}") from error
    elif isinstance(text := tokenizer.chat_template, str) and text:
        tokenizer.chat_template = _template(text, f"of {source.path}")
    return at_time(tokenizer, source.template_time)


def _template(text: str, name: str) -> str:
    """The text of a chat template. Raises ConfigError for what is none."""
    if text.lstrip("\ufeff").strip():
        try:
            json.loads(text.lstrip("\ufeff"))
        except (ValueError, RecursionError):
            return text.lstrip("\ufeff")
    raise ConfigError(
        f"chat_template {name} is empty or JSON, and a template is Jinja: write the text of its key "
        "'chat_template' into a file of its own, or name the model's folder"
    )


def at_time(tokenizer: Any, moment: datetime | None) -> Any:
    """The tokenizer, whose chat template reads `moment` from its clock; None: the machine's clock."""
    if moment is not None:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=moment.strftime)
    return tokenizer


def vocab_size(tokenizer: Any, known_ids: int | None = None) -> int:
    """One more than the largest id, and at most `known_ids`; rows of a model beyond it are padding."""
    size = max(tokenizer.get_vocab().values()) + 1
    return size if known_ids is None else min(size, known_ids)


def never_sample_from(model: Any, known: int) -> None:
    """Give ids from `known` on a probability of 0 in all logits that `model.compute_logits` makes after this.
    For rows of the output head that the tokenizer has no id for: the trainer leaves them out too. The shape
    stays, ids below `known` keep their logits."""
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:  # a tensor-parallel worker that does not sample gets none
            logits[..., known:] = float("-inf")
        return logits

    model.compute_logits = compute_logits


def fingerprint(tokenizer: Any, known_ids: int | None = None) -> str:
    """64 hex digits over the vocabulary (below `known_ids`) and the rules that cut text, in this order."""
    size = vocab_size(tokenizer, known_ids)
    vocabulary = sorted(item for item in tokenizer.get_vocab().items() if item[1] < size)
    return _digest(vocabulary) + _digest(_rules(tokenizer))


def chat_template_fingerprint(tokenizer: Any) -> str | None:
    """32 hex digits over what two conversations render to; None: it has no chat template."""
    return _digest(rendered(tokenizer)) if tokenizer.chat_template else None


_DAY: Final = datetime(2026, 1, 1)


def rendered(tokenizer: Any, variables: Mapping[str, Any] = {}) -> list[str]:
    """Two conversations as the chat template writes them on one fixed day; why not, where it refuses one.

    `variables`: further ones of the template.
    """
    user, system = {"role": "user", "content": "A?"}, {"role": "system", "content": "S."}
    whole = [system, user, {"role": "assistant", "content": "B."}, {"role": "user", "content": "C?"}]
    from jinja2 import TemplateError

    texts, further = [], {"strftime_now": _DAY.strftime, **variables}
    for messages in ([user], whole):
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **further
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            text = f"refused: {type(error).__name__}"
        texts.append(str(text))
    return texts


# --- where a completion ends


CONTENT: Final = "\u2603answer\u2603"
"""Stands for an assistant's content where a template is rendered to see what it writes around it."""


def end_ids(source: ModelSource, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> list[int]:
    """Ids that end a completion: of the model's tokenizer, of its generation config, and `stop_token_ids`."""
    listed = _listed_ends(source.path, source.revision)
    return sorted({*stop_token_ids} | ({tokenizer.eos_token_id} - {None}) | listed)


def text_reader(tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> Callable[[Sequence[int]], str]:
    """A function that turns a completion's ids into its text as code reads it. The text has its special
    tokens, such as markers of tool calls, but not the token that ends it: one of `end_ids`, `end_of_turn` or,
    of the run, `stop_token_ids`."""
    ends = {getattr(tokenizer, "eos_token_id", None), end_of_turn(tokenizer), *stop_token_ids}
    if name := getattr(tokenizer, "name_or_path", ""):
        ends |= _listed_ends(name, _raise_exceptions_for_connection_errors=False)

    def text(token_ids: Sequence[int]) -> str:
        ids = [*token_ids]
        while ids and ids[-1] in ends:
            ids.pop()
        return str(tokenizer.decode(ids))

    return text


def end_of_turn(tokenizer: Any, variables: Mapping[str, Any] = {}) -> int | None:
    """The special token that the chat template, with `variables`, writes right behind an assistant's content.
    None: it writes none there, it refuses a conversation, or there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    from jinja2 import TemplateError

    texts = zip(("user", "assistant", "user"), ("?", CONTENT, "!"), strict=True)
    turns = [{"role": role, "content": text} for role, text in texts]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):  # rendering prompts says so
        return None
    behind = str(text).rpartition(CONTENT)[2].lstrip()
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids and ids[0] in special_ids(tokenizer) | {tokenizer.eos_token_id} else None


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id for token_id, token in added.items() if token.special}


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each id is as UTF-8, or a part of it; an added token is its name. Raises DataError where tokens
    alone do not say: their text depends on their neighbours, or is not kept."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = {step["type"] for step in (decoder or {}).get("decoders", [decoder or {"type": "Fuse"}])}
    if backend is None or (
        other := kinds - {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Fuse", "Strip"}
    ):
        why = f"decodes by {', '.join(sorted(other))}" if backend is not None else "has no fast form"
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} {why}, so that its tokens alone do not say which "
            "bytes they are: student and teacher with different tokenizers need one of byte-level BPE's or "
            "SentencePiece's kind"
        )
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}

    def of(token: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(alphabet[character] for character in token)
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return (token.replace(_SPACE, " ") if kinds & {"Replace", "Metaspace"} else token).encode()

    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    known = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        known[id_] = token.encode() if token in added else of(token)
    return known


def first_bytes(tokenizer: Any, ends: Collection[int]) -> np.ndarray:
    """i8 [V]: the first byte of each id's text; END: one of `ends`; OTHER: it is special, or has no text."""
    first = np.array([data[0] if data else OTHER for data in token_bytes(tokenizer)])
    first[[*special_ids(tokenizer)]] = OTHER
    first[[id_ for id_ in ends if id_ < len(first)]] = END
    return first


def _listed_ends(path: str, revision: str | None = None, **options: bool) -> set[int]:
    """Ids in a model's generation config, or without any there in its config; `options`: of `cached_file`."""
    from transformers.utils import cached_file

    for name in ("generation_config.json", "config.json"):
        file = cached_file(
            path, name, revision=revision, _raise_exceptions_for_missing_entries=False, **options
        )
        try:
            listed = json.loads(Path(file).read_bytes()).get("eos_token_id") if file else None
            if listed is not None:
                ids = {as_index(id_) for id_ in (listed if isinstance(listed, list) else [listed])}
                if ids and min(ids) < 0:
                    raise ValueError(f"it is {listed}")
                return ids
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{file} has no eos_token_id that can be read ({error}): write an id or a list of ids, or "
                "download the file anew"
            ) from None
    return set()


# --- what two tokenizers have in common


class Agreement(NamedTuple):
    """What student and teacher mean alike."""

    known_ids: int
    """Ids below it mean the same text to both; what either has beyond it is used by neither."""
    lines: list[str]
    """What differs, and what is done about it."""


def agree(student: Any, teacher: Any) -> Agreement:
    """Compare what ids mean. Raises DataError with the first ids that mean different text."""
    ours, theirs = ({id_: text for text, id_ in side.get_vocab().items()} for side in (student, teacher))
    common = sorted(ours.keys() & theirs.keys())
    clashes = [id_ for id_ in common if ours[id_] != theirs[id_]]
    reserved = [id_ for id_ in clashes if _PLACEHOLDER.search(ours[id_]) or _PLACEHOLDER.search(theirs[id_])]
    clashes = [id_ for id_ in clashes if id_ not in {*reserved}]
    known = 1 + max(common, default=-1)
    if clashes:
        known = clashes[0]
        added = {*student.get_added_vocab().values()} & {*teacher.get_added_vocab().values()}
        if any(id_ not in added for id_ in common if id_ >= known):
            raise DataError(
                f"{len(clashes)} of {len(common)} token ids mean other text to the teacher: "
                + ", ".join(f"{id_} is {ours[id_]!r} and {theirs[id_]!r}" for id_ in clashes[:3])
            )
    lines = []
    if reserved:
        names = ", ".join(f"{id_} is {ours[id_]!r} and {theirs[id_]!r}" for id_ in reserved[:3])
        lines.append(f"{names}: a reserved id and its name, taken for the same")
    for side, texts in (("student", ours), ("teacher", theirs)):
        if more := sorted(id_ for id_ in texts if id_ >= known):
            names = ", ".join(f"{texts[id_]!r} ({id_})" for id_ in more[:3])
            lines.append(
                f"{len(more)} ids from {more[0]} on are the {side}'s alone, such as {names}: they are never "
                "sampled and left out of both sides' probabilities"
            )
    of_names = {name: [getattr(t, f"{name}_token", None) for t in (student, teacher)] for name in _NAMES}
    words = {name: [repr(token) if token else "none" for token in pair] for name, pair in of_names.items()}
    if renamed := [f"{name} is {mine} and {other}" for name, (mine, other) in words.items() if mine != other]:
        lines.append(f"{', '.join(renamed)}: names alone, the teacher is given the student's ids")
    if _rules(student) != _rules(teacher):
        lines.append(
            "merges, normalizer or pre-tokenizer differ: prompts are cut as the student cuts them, which the "
            "teacher may have seen seldom"
        )
    return Agreement(known, lines)


_PLACEHOLDER: Final = re.compile("reserved|unused|placeholder|dummy|extra_id|<SPECIAL_")
"""Part of the name of a token that no model was trained on; later models of a family give its id a name."""
_NAMES: Final = ("bos", "pad", "unk")
"""Special tokens whose names are compared; the ends have a line of their own."""


def differing_parts(ours: str, other: str) -> list[str]:
    """Names of the parts (of PARTS) in which two fingerprints differ; empty: the same tokenizer."""
    cuts = slice(_DIGITS), slice(_DIGITS, None)
    return [name for name, cut in zip(PARTS, cuts, strict=True) if ours[cut] != other[cut]]


def _rules(tokenizer: Any) -> Any:
    """What else decides how text becomes ids; None for tokenizers without a Rust backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    weighted = isinstance(rules["model"].get("vocab"), list)  # Unigram: token scores decide how text is cut
    model = {key: value for key, value in rules["model"].items() if weighted or key != "vocab"}
    return [model, rules.get("normalizer"), rules.get("pre_tokenizer")]


def _digest(value: Any) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest(_DIGITS // 2)
