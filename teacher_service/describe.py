"""A teacher's tokenizer, and its TeacherInfo: engine, fingerprints of model and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from sync.errors import ConfigError
from sync.settings import ModelSource
from sync.tokenizers import chat_template_fingerprint, fingerprint
from sync.wire import TeacherInfo
from teacher_service.engines.base import EngineInfo

_SAMPLES: Final = 64
"""Blocks read of each weight file for a fingerprint, evenly spaced: other weights differ in all of them."""
_BLOCK: Final = 4096
"""Bytes of each."""


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer, with the config's chat template. Raises ConfigError when it cannot be loaded."""
    path = Path(source.path)
    if (path.is_absolute() or source.path.startswith(".")) and not path.is_dir():
        raise ConfigError(f"model folder {source.path!r} does not exist: correct `path`, or give a Hub id")
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
        except OSError as error:
            raise ConfigError(f"chat_template {source.chat_template!r} cannot be read: {error}") from error
    return tokenizer


def describe(name: str, engine_info: EngineInfo, tokenizer: Any) -> TeacherInfo:
    """TeacherInfo of the teacher called `name`, whose model folder is read for its fingerprint."""
    shared = ("model", "revision", "dtype", "engine", "vocab_size", "hidden_size", "max_length")
    return TeacherInfo(
        name=name,
        tokenizer_fingerprint=fingerprint(tokenizer),
        chat_template_fingerprint=chat_template_fingerprint(tokenizer),
        fingerprint=_model_fingerprint(engine_info),
        can=list(engine_info.can),
        **{field: getattr(engine_info, field) for field in shared},
    )


def _model_fingerprint(engine_info: EngineInfo) -> str:
    """BLAKE3 hex over the model's name and samples of its weight files, where it is a folder here."""
    names = (engine_info.model, engine_info.revision, engine_info.dtype, engine_info.engine)
    hasher = blake3(repr(names).encode())
    folder = Path(engine_info.model)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        hasher.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(0, size - _BLOCK) // (_SAMPLES - 1))
                hasher.update(file.read(_BLOCK))
    return hasher.hexdigest()
