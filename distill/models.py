"""What a run's models say about themselves: their config, the longest sequence they take, their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distill.config import RunConfig
from sync.errors import ConfigError
from sync.settings import ModelSource
from sync.snapshots import checkpoint


def check_folder(source: ModelSource, key: str) -> None:
    """Raise ConfigError for a path that looks like a folder and holds no model."""
    path = Path(source.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{key}.path {source.path} holds no config.json: name a folder that save_pretrained wrote"
            )
        return
    hub_id = source.path.count("/") == 1 and not source.path.startswith((".", "~", "/"))
    if "/" in source.path and (not hub_id or path.parent.is_dir()):
        raise ConfigError(
            f"{key}.path {source.path} does not exist: name a model folder, or a Hub id "
            "such as Qwen/Qwen3-0.6B"
        )


def text_config(source: ModelSource) -> Any:
    """transformers' config of a model, of its text part. Raises ConfigError when it cannot be read."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config of model {source.path!r} cannot be read: {error}") from None
    return config.get_text_config()


def context_length(source: ModelSource) -> int:
    """Longest sequence that a model takes, in tokens. Raises ConfigError when its config cannot be read."""
    return int(text_config(source).max_position_embeddings)


def student_limit(config: RunConfig) -> int:
    """Longest sequence of a replica: the model's own limit, or max-model-len when that is less.

    Raises ConfigError for a max-model-len that is no number.
    """
    own = context_length(config.student)
    given = config.student.flags().get("max-model-len", own)
    if not isinstance(given, int):
        raise ConfigError(
            f"student.engine_args has max-model-len = {given!r}, and prompts are measured against it: write "
            "the number of tokens"
        )
    return min(own, given) if given > 0 else own


def longest_sequence(config: RunConfig) -> int:
    """Tokens of prompt and completion that the student, its replicas and every local teacher take."""
    limits = [student_limit(config)]
    for teacher in config.teachers.values():
        if not teacher.urls and teacher.prompt_transform is None:
            limits.append(teacher.max_length or context_length(teacher))
    return min(limits)


def count_parameters(source: ModelSource) -> int:
    """Parameters of a folder's tensors; of a Hub id, those of a model made from its config."""
    folder = Path(source.path)
    if any(folder.glob("*.safetensors")):
        places = checkpoint.tensors(folder).values()
        return sum(place.nbytes // checkpoint.BITS[place.kind].itemsize for place in places)
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config(source))
    return sum(parameter.numel() for parameter in model.parameters())
