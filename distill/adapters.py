"""An adapter folder, as peft saves it, and the model that comes of it. Heavy imports come late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sync.errors import DataError
from sync.settings import ModelSource
from sync.snapshots.checkpoint import let_others_read


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return (folder / "adapter_config.json").is_file()


def merged(base: ModelSource, adapter: Path, dtype: Any = None) -> Any:
    """The transformers model `base` + `adapter`, added in fp32, then cast to `dtype` (None: the base's own).

    Raises DataError when the adapter does not fit the base.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base.path, revision=base.revision, trust_remote_code=base.trust_remote_code, dtype="auto"
    )
    kept = dtype or model.dtype
    try:
        wrapped = PeftModel.from_pretrained(model.to(torch.float32), str(adapter))
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{adapter} is no adapter of {base.path}: {error}") from error
    return wrapped.merge_and_unload().to(kept)


def write_merged(base: ModelSource, adapter: Path, folder: Path) -> None:
    """Write base + adapter as a Hugging Face model folder, with the base's tokenizer."""
    from teacher_service.describe import load_tokenizer

    merged(base, adapter).save_pretrained(folder)
    let_others_read(folder)
    load_tokenizer(base).save_pretrained(folder)
