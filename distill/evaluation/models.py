"""Models as the evaluator holds them: fp32, on one device, cut to the tokenizer's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from distill.adapters import is_adapter, merged
from distill.evaluation.evaluation import LanguageModel
from sync.settings import ModelSource
from sync.snapshots.checkpoint import read_folder
from sync.tokenizers import vocab_size
from teacher_service.engines.head import find_head


def load_model(
    source: ModelSource, tokenizer: Any, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> LanguageModel:
    """A model folder or Hub id in fp32, ready to be compared."""
    return _prepared(_plain(source), tokenizer, device)


def load_student(
    student: ModelSource,
    folder: Path | None,
    tokenizer: Any,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> LanguageModel:
    """A version of `student`: the model, or the adapter of it, in `folder`; None: the student itself."""
    if folder is None:
        return load_model(student, tokenizer, device)
    if is_adapter(folder):
        return _prepared(merged(student, folder, torch.float32), tokenizer, device)
    if student.trust_remote_code:  # weights come from a store, code from the student's own source alone
        own, weights = _plain(student), dict(read_folder(folder))
        model = type(own).from_pretrained(None, config=own.config, state_dict=weights, dtype=torch.float32)
        return _prepared(model, tokenizer, device)
    version = student.model_copy(update={"path": str(folder), "revision": None})
    return load_model(version, tokenizer, device)


def _plain(source: ModelSource) -> Any:
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        source.path,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        dtype=torch.float32,
    )


def _prepared(model: Any, tokenizer: Any, device: Literal["auto", "cpu", "cuda"]) -> LanguageModel:
    model = model.to(torch_device(device)).eval()
    return LanguageModel(model, find_head(model, vocab_size(tokenizer)))


def torch_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of a config's name; auto: a GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def end_ids(source: ModelSource, tokenizer: Any, more: list[int]) -> tuple[int, ...]:
    """Ids that end a completion: those of the model's generation config, the tokenizer's, and `more`."""
    try:
        listed = GenerationConfig.from_pretrained(source.path, revision=source.revision).eos_token_id
    except OSError:  # a folder without generation_config.json
        listed = None
    own = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in (*own, tokenizer.eos_token_id, *more) if i is not None))
