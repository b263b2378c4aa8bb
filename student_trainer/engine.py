"""Model and engine of one rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from student_trainer.config import LoRAConfig, TrainerConfig
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.model import Student, head_shape, plain
from student_trainer.schedule import Groups, hyperparameters
from sync.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What `load` makes; `keep` only has to stay alive: transformers holds it by a weak reference."""

    engine: Any
    student: Student
    tokenizer: Any
    hyperparameters: Groups
    """Of the optimizer as configured, before a checkpoint is loaded."""
    keep: Any

    @property
    def optimizers(self) -> list[Any]:
        """DeepSpeed's, and the second one that it makes for what a partial offload leaves on the GPU."""
        whole = self.engine.optimizer
        return [whole, whole.backup_optimizer] if hasattr(whole, "backup_optimizer") else [whole]


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
    return Loaded(engine, student, tokenizer, hyperparameters(engine.optimizer.param_groups), keep)


def _pretrained(config: TrainerConfig, dtype: torch.dtype) -> Any:
    """The transformers model, partitioned while it loads; with adapters when asked."""
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
    """`model` itself, in training mode from now on the same function as outside of it.

    The rollout engine samples without dropout. A trainer with it would compare another p with μ and with the
    teacher at every token: ρ is not 1 at age 0, and a student equal to its teacher would be moved. Adapters
    are made later and have a dropout of their own.
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
