"""Whether two models mean the same by a token id: fingerprints of tokenizers and the parts that differ.

A fingerprint has three parts of 32 hex digits (BLAKE3, 128 bits each): vocabulary, merges, special ids.
Padded rows of a model, the padding token, truncation and padding settings are not part of it; the chat
template has a fingerprint of its own. Works on any tokenizer object of transformers; imports no torch.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from blake3 import blake3

from sync.base.errors import ConfigError
from sync.base.hub import check_reachable
from sync.base.settings import ModelSource

PARTS: Final = ("vocabulary", "merges", "special ids")
_DIGITS: Final = 32


class Tokenizer(Protocol):
    """What is read of a tokenizer."""

    chat_template: Any

    def get_vocab(self) -> dict[str, int]:
        """Token → id, added tokens included."""


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
    except (OSError, ValueError, ImportError) as error:
        remedy = (
            "save one beside the model"
            if path.is_dir()
            else "it is no folder here; correct `path` or `revision`, or log in to the Hub (HF_TOKEN)"
        )
        raise ConfigError(f"the tokenizer of {source.path!r} cannot be loaded: {remedy}. {error}") from error
    if source.chat_template is not None:
        try:
            tokenizer.chat_template = Path(source.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {source.chat_template!r} cannot be read: {error}") from error
    return at_time(tokenizer, source.template_time)


def at_time(tokenizer: Any, moment: datetime | None) -> Any:
    """The tokenizer, whose chat template reads `moment` from its clock; None: the machine's clock."""
    if moment is not None:
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, strftime_now=moment.strftime)
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id; rows of a model beyond it are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def never_sample_from(model: Any, known: int) -> None:
    """Give ids from `known` on a probability of 0 in all logits that `model.compute_logits` makes after this.

    For rows of the output head that the tokenizer has no id for: the trainer leaves them out too. The shape
    stays, ids below `known` keep their logits.
    """
    compute = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:  # a tensor-parallel worker that does not sample gets none
            logits[..., known:] = float("-inf")
        return logits

    model.compute_logits = compute_logits


def fingerprint(tokenizer: Tokenizer) -> str:
    """96 hex digits over vocabulary, merges and special ids, in this order."""
    parts = (sorted(tokenizer.get_vocab().items()), _merges(tokenizer), special_ids(tokenizer))
    return "".join(_digest(part) for part in parts)


def chat_template_fingerprint(tokenizer: Tokenizer) -> str | None:
    """32 hex digits over the chat template; None: it has none."""
    return _digest(tokenizer.chat_template) if tokenizer.chat_template else None


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The ids that begin and end a sequence, and the unknown one."""
    return {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}


def differing_parts(ours: str, other: str) -> list[str]:
    """Names of the parts (of PARTS) in which two fingerprints differ; empty: the same tokenizer."""
    if len(ours) != len(other) or len(ours) != _DIGITS * len(PARTS):
        return [] if ours == other else list(PARTS)
    return [name for i, name in enumerate(PARTS) if _part(ours, i) != _part(other, i)]


def _merges(tokenizer: Tokenizer) -> Any:
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


def _part(text: str, index: int) -> str:
    return text[index * _DIGITS : (index + 1) * _DIGITS]
