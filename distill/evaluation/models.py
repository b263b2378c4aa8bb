"""Models on one device, in fp32 for the evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sync.base.errors import DataError
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer
from sync.weights.snapshots.checkpoint import let_others_read, read_folder
from teacher_service.engines.transformers import find_device

Device = Literal["auto", "cpu", "cuda"]


def load_model(source: ModelSource, folder: Path | None = None, device: Device = "auto") -> Any:
    """A model folder or Hub id; `folder`: a version of it, a model or an adapter."""
    if folder is None:
        model = _load(source)
    elif (folder / "adapter_config.json").is_file():
        model = merged(source, folder, torch.float32)
    elif source.trust_remote_code:  # weights come from a store, code from the model's own source alone
        fresh, weights = _load(source), dict(read_folder(folder))
        model = type(fresh).from_pretrained(
            None, config=fresh.config, state_dict=weights, dtype=torch.float32
        )
    else:
        model = _load(source.model_copy(update={"path": str(folder), "revision": None}))
    return model.to(find_device(device)).eval()


def _load(source: ModelSource, dtype: Any = torch.float32) -> Any:
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        source.path, revision=source.revision, trust_remote_code=source.trust_remote_code, dtype=dtype
    )


def merged(base: ModelSource, adapter: Path, dtype: Any = None) -> Any:
    """`base` + `adapter` as a transformers model, added in fp32, then cast to `dtype` (None: the base's).

    Raises DataError when the adapter does not fit the base.
    """
    from peft import PeftModel

    model = _load(base, "auto")
    kept = dtype or model.dtype
    try:
        wrapped = PeftModel.from_pretrained(model.to(torch.float32), str(adapter))
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{adapter} is no adapter of {base.path}: {error}") from error
    return wrapped.merge_and_unload().to(kept)


def write_merged(base: ModelSource, adapter: Path, folder: Path) -> None:
    """Write base + adapter as a Hugging Face model folder, with the base's tokenizer."""
    merged(base, adapter).save_pretrained(folder)
    let_others_read(folder)
    load_tokenizer(base).save_pretrained(folder)
