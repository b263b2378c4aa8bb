"""The evaluator's models: loaded in fp32 on one device and cut to the tokenizer's vocabulary.

`build` loads teachers, held-out prompts and tokenizer once; every evaluation or probe loads its student.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from distill.config import EvaluationConfig, RunConfig
from distill.evaluation.evaluation import LanguageModel, Limits, evaluate, probe
from distill.prompts.sources import NOTHING_HELD_OUT, open_prompts
from sync.errors import ConfigError, DataError
from sync.settings import ModelSource
from sync.snapshots.checkpoint import let_others_read, read_folder
from sync.tokenizers import load_tokenizer, vocab_size
from sync.wire import EvalReport, ProbeReply, ProbeRequest, Version
from teacher_service.engines.head import find_head
from teacher_service.router import Router

Device = Literal["auto", "cpu", "cuda"]


class Weights(Protocol):
    """Where the weights of a version come from."""

    def folder(self, version: Version) -> Path:
        """A model or adapter folder that holds exactly `version`. Raises SnapshotError or StoreError."""
        ...


class LoadedModels(NamedTuple):
    """What the evaluator serves. Both raise DistillError for what cannot be evaluated."""

    evaluate: Callable[[Version], EvalReport]
    probe: Callable[[ProbeRequest], ProbeReply]


def build(config: RunConfig, weights: Weights) -> LoadedModels:
    """Load tokenizer, held-out prompts and teachers.

    Step 0 of any lineage is the student that the configuration names.
    """
    settings = config.evaluation or EvaluationConfig()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(config.student)
    split = open_prompts(config, tokenizer)
    if not split.held_out:
        raise ConfigError(NOTHING_HELD_OUT)
    teachers = {
        name: load_model(source, tokenizer, settings.device) for name, source in config.teachers.items()
    }
    ends = end_ids(config.student, tokenizer, config.rollout.stop_token_ids)
    limits = Limits(config.rollout.max_tokens, ends, settings.batch)
    route = Router(config.teachers)

    def evaluate_version(version: Version) -> EvalReport:
        folder = weights.folder(version) if version.step > 0 else None
        student = load_student(config.student, folder, tokenizer, settings.device)
        return evaluate(
            student,
            teachers,
            split.held_out,
            limits,
            route=route.route,
            reward_fn=split.reward_fn,
            seed=config.run.seed,
            version=version,
        )

    def probe_models(request: ProbeRequest) -> ProbeReply:
        if unknown := request.teachers.keys() - teachers.keys():
            raise ConfigError(
                f"the evaluator was started without teacher {', '.join(unknown)}: start it from the same file"
            )
        student = load_model(config.student, tokenizer, settings.device)
        return probe(request, student, teachers, config.objective, config.rollout.temperature)

    return LoadedModels(evaluate_version, probe_models)


class _OneFolder:
    """Every version is this folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def folder(self, version: Version) -> Path:
        return self._path


def evaluate_folder(config: RunConfig, model: Path | None) -> dict[str, Any]:
    """Evaluate `model` (None: the configuration's student) without a run: what `distill evaluate` prints.

    Raises ConfigError when `model` is no model folder.
    """
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model} holds no config.json: name a folder that save_pretrained wrote")
    if config.evaluation is None:
        config = config.model_copy(update={"evaluation": EvaluationConfig()})
    folder = model or Path(config.student.path)
    report = build(config, _OneFolder(folder)).evaluate(Version(0, 0 if model is None else 1))
    figures = msgspec.to_builtins(report)
    for name in ("schema", "type", "version"):
        figures.pop(name, None)
    return {"model": str(folder)} | figures


def load_model(source: ModelSource, tokenizer: Any, device: Device = "auto") -> LanguageModel:
    """A model folder or Hub id."""
    return _prepared(_load(source), tokenizer, device)


def load_student(
    student: ModelSource, folder: Path | None, tokenizer: Any, device: Device = "auto"
) -> LanguageModel:
    """A version of `student`: the model or adapter in `folder`; None: the student itself."""
    if folder is None:
        return load_model(student, tokenizer, device)
    if (folder / "adapter_config.json").is_file():
        return _prepared(merged(student, folder, torch.float32), tokenizer, device)
    if student.trust_remote_code:  # weights come from a store, code from the student's own source alone
        own, weights = _load(student), dict(read_folder(folder))
        model = type(own).from_pretrained(None, config=own.config, state_dict=weights, dtype=torch.float32)
        return _prepared(model, tokenizer, device)
    version = student.model_copy(update={"path": str(folder), "revision": None})
    return load_model(version, tokenizer, device)


def _load(source: ModelSource) -> Any:
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        source.path,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        dtype=torch.float32,
    )


def _prepared(model: Any, tokenizer: Any, device: Device) -> LanguageModel:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    return LanguageModel(model, find_head(model, vocab_size(tokenizer)))


def end_ids(source: ModelSource, tokenizer: Any, more: list[int]) -> tuple[int, ...]:
    """Ids that end a completion: those of the model's generation config, the tokenizer's, and `more`."""
    try:
        listed = GenerationConfig.from_pretrained(source.path, revision=source.revision).eos_token_id
    except OSError:  # a folder without generation_config.json
        listed = None
    own = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in (*own, tokenizer.eos_token_id, *more) if i is not None))


def merged(base: ModelSource, adapter: Path, dtype: Any = None) -> Any:
    """`base` + `adapter` as a transformers model, added in fp32, then cast to `dtype` (None: the base's).

    Raises DataError when the adapter does not fit the base.
    """
    from peft import PeftModel

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
    merged(base, adapter).save_pretrained(folder)
    let_others_read(folder)
    load_tokenizer(base).save_pretrained(folder)
