"""The student as one rank trains it: loaded under ZeRO-3, stepped, checkpointed, exported."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from student_trainer import checkpoint
from student_trainer.checkpoint_files import Index
from student_trainer.config import LoRAConfig, TrainerConfig
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.head import Loss
from student_trainer.model import Student, check_head, head_shape, plain
from student_trainer.ranks import Ranks
from student_trainer.step import train_step
from student_trainer.weights import Weights
from sync.errors import ConfigError
from sync.wire import TrainBatch, TrainerHello, TrainerWelcome, Version

log = logging.getLogger(__name__)


class Learner:
    """The student's engine, optimizer and weights on this rank, and the version that they are at.

    Order: constructed → `hello` is sent to the controller → `begin` with its answer → everything else. All is
    collective, the constructor too; torch.distributed must be up.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks, stopping: Callable[[], bool]) -> None:
        """`stopping`: whether a stop was requested: a checkpoint then does not wait for a full disk."""
        self.ranks = ranks
        self._config, self._stopping, self._folder = config, stopping, config.run_dir / "checkpoints"
        self._loaded = load(config)
        self.engine = self._loaded.engine
        self.vocab = self._loaded.student.head.shape.vocab
        """Ids of the student's tokenizer."""
        check_head(self._loaded.student, self.engine, ranks.device)
        self.weights = Weights(self._loaded.student, ranks)
        self._given = hyperparameters(self.engine.optimizer.param_groups)
        path, found = checkpoint.find(self._folder, config.checkpoint, ranks), None
        if path is not None:
            log.info("resuming from %s", path)
            found = checkpoint.load(self.engine, path, self.weights.fingerprint, ranks)
        self.hello = TrainerHello(
            world_size=ranks.world_size,
            checkpoint=None if found is None else Version.parse(found.version),
            fingerprint=self.weights.fingerprint,
            run=config.run,
            run_id=None if found is None else found.run_id,
        )

    def begin(self, welcome: TrainerWelcome, loss: Loss) -> None:
        """Where training starts, and what is minimised."""
        self.version, self._run_id, self._loss = welcome.version, welcome.run.id, loss

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take one optimizer step on `batch`, which makes the next version; metrics of the step."""
        share = self._config.trainer.lr_share(batch.version.step, self._config.steps)
        zero = self.engine.optimizer
        # DeepSpeed makes a second optimizer for what a partial offload leaves on the GPU
        for optimizer in (zero, getattr(zero, "backup_optimizer", zero)):
            apply_rate(optimizer.param_groups, self._given, share)
        metrics = train_step(self.engine, batch, self._loss, self.ranks)
        self.version = after(self.version)
        return metrics

    def save(self) -> Path | None:
        """Write a checkpoint; its folder. None: the disk is full, and a stop was requested."""
        size, keep = self.ranks.world_size, self._config.trainer.keep_checkpoints
        index = Index(str(self.version), size, self.weights.fingerprint, self._run_id)
        return checkpoint.save(self.engine, self._folder, index, self.ranks, keep, self._stopping)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder, whole or not at all; an older one is replaced."""
        partial = folder.with_name(f".partial-{folder.name}")
        if self.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.weights.save_folder(partial, self._loaded.tokenizer)
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)


def after(version: Version) -> Version:
    """The version that the next step makes."""
    return Version(version.lineage, version.step + 1)


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each param_group of a fresh optimizer: the rate before any schedule, betas, weight decay."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def apply_rate(groups: list[dict[str, Any]], given: list[dict[str, Any]], share: float) -> None:
    """Give every group its hyperparameters again, the rate times `share`; a checkpoint's are overwritten."""
    for group, own in zip(groups, given, strict=True):
        group.update(own, lr=own["lr"] * share)


class Loaded(NamedTuple):
    """What `load` makes; `keep` only has to stay alive: transformers holds it by a weak reference."""

    engine: Any
    student: Student
    tokenizer: Any
    keep: Any


def load(config: TrainerConfig) -> Loaded:
    """The student under ZeRO-3, its optimizer, its tokenizer. Collective; torch.distributed must be up."""
    import deepspeed
    from transformers import AutoTokenizer
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    settings, source = config.trainer, config.student
    ds_config = deepspeed_config(settings)
    keep = HfDeepSpeedConfig(ds_config)
    bf16 = bool(ds_config.get("bf16", {}).get("enabled"))
    model = _pretrained(config, torch.bfloat16 if bf16 else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(
        source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
    )
    if source.chat_template is not None:
        tokenizer.chat_template = Path(source.chat_template).read_text()
    text = plain(model).config.get_text_config()
    vocab = max(tokenizer.get_vocab().values()) + 1
    if vocab > text.vocab_size:
        raise ConfigError(
            f"{source.path}: the tokenizer has {vocab} ids, the model {text.vocab_size} rows: "
            "resize the model's embeddings, or give it its own tokenizer"
        )
    shape = head_shape(text, vocab, config.temperature)
    student = Student(model, shape, settings.head_chunk)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=student, model_parameters=trained, config=ds_config)
    return Loaded(engine, student, tokenizer, keep)


def _pretrained(config: TrainerConfig, dtype: torch.dtype) -> Any:
    """The transformers model, partitioned while it loads; with adapters where configured."""
    from transformers import AutoModelForCausalLM

    settings, source = config.trainer, config.student
    model = AutoModelForCausalLM.from_pretrained(
        source.path,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        attn_implementation=settings.attention,
        dtype=dtype,
    )
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    without_dropout(model).train()
    return model if settings.lora is None else with_adapters(model, settings.lora, config.seed)


def without_dropout(model: Any) -> Any:
    """`model` itself, in training mode from now on the same function as in evaluation.

    The rollout engine samples without dropout. With it the trainer would compare another p with μ and with
    the teacher at every token: ρ would not be 1 at age 0, and a student equal to its teacher would move.
    Adapters are made later and have a dropout of their own.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def with_adapters(model: Any, lora: LoRAConfig, seed: int) -> Any:
    """peft's wrapping of `model`: adapters alone are trained, from the same random start on every rank."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if getattr(model, "is_gradient_checkpointing", False):
        model.enable_input_require_grads()
    return wrapped
