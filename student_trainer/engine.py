"""The student as one rank trains it: loaded under ZeRO-3, stepped, checkpointed, exported.

Letters: R rows, L longest row, C completion tokens, S tokens of all rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from student_trainer import checkpoint, parallelism
from student_trainer.checkpoint_files import CHECKPOINTS, Index
from student_trainer.config import LoRAConfig, TrainerConfig
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.expert_layers import Originals, check_experts, originals
from student_trainer.head import Loss, chunked_loss, token_logp
from student_trainer.objectives.divergences import Targets, future_credit
from student_trainer.ranks import Ranks
from student_trainer.routing import Routers, replayed, routers
from student_trainer.sequence_split import SequenceGroup, SplitRows, join, split, split_attention
from student_trainer.step import Stopwatch, laid_out, train_step
from student_trainer.varlen import PackedRows, computing, replace_attention, row_attention
from student_trainer.weights import Weights
from sync.base.errors import ConfigError
from sync.base.tokenizers import OTHER, end_ids, first_bytes, load_tokenizer, vocab_size
from sync.wire import TrainBatch, TrainerHello, TrainerWelcome, Version
from sync.wire.head import HeadShape, OutputHead, soft_cap_of

log = logging.getLogger(__name__)
LEAST: Final = 3
"""Tokens whose median says something: one may be sent to another expert by rounding."""


class Learner:
    """The student's engine, optimizer and weights on this rank, and the version that they are at.

    Order: constructed → `hello` is sent to the controller → `begin` with its answer → everything else. All is
    collective, the constructor too.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks) -> None:
        self.ranks, self._config, self._folder = ranks, config, config.run_dir / CHECKPOINTS
        self.engine, student, self._tokenizer = load(config, ranks)
        self.vocab = student.head.shape.vocab
        """The number of ids of the student's tokenizer."""
        self.ends = tuple(end_ids(config.student, self._tokenizer, config.stop_token_ids))
        """Ids that end a completion."""
        check_head(student, self.engine, ranks.device)
        check_rows(student, self.engine, ranks.device)
        self.weights = Weights(student.model, ranks)
        self._configured = hyperparameters(self.engine.optimizer.param_groups)
        (path, altered), state = checkpoint.find(self._folder, ranks), None
        if path is not None:
            log.info("resuming from %s", path)
            shared = config.trainer.expert_parallel
            state = checkpoint.load(self.engine, path, self.weights.fingerprint, ranks, shared)
        self.hello = TrainerHello(
            world_size=ranks.world_size,
            checkpoint=None if state is None else Version.parse(state.version),
            fingerprint=self.weights.fingerprint,
            run=config.run,
            run_id=None if state is None else state.run_id,
            sequence_parallel=config.trainer.sequence_parallel,
            altered=altered,
        )

    @cached_property
    def first_V(self) -> Tensor:
        """int64 [V]: `Targets.first_V`."""
        first_V, known_V = first_bytes(self._tokenizer, self.ends)[: self.vocab], np.full(self.vocab, OTHER)
        known_V[: len(first_V)] = first_V
        return torch.from_numpy(known_V).to(self.ranks.device)

    def begin(self, welcome: TrainerWelcome, loss: Loss) -> None:
        """Take where training starts, and what is minimised."""
        self.version, self._run_id, self._loss = welcome.version, welcome.run.id, loss
        self.parts: dict[str, float] = {}
        """`StepReport.parts` of the newest step, of this rank."""

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Take one optimizer step on `batch`, which makes the next version; metrics of the step."""
        share = self._config.trainer.lr_share(batch.version.step, self._config.steps)
        zero = self.engine.optimizer
        # DeepSpeed makes a second optimizer for what a partial offload leaves on the GPU
        for optimizer in (zero, getattr(zero, "backup_optimizer", zero)):
            apply_rate(optimizer.param_groups, self._configured, share)
        clock = Stopwatch(self.ranks.device)
        metrics = train_step(self.engine, batch, self._loss, self.ranks, clock)
        self.version, self.parts = after(self.version), clock.seconds()
        return metrics

    def save(self) -> Path:
        """Write a checkpoint; its folder."""
        size, settings = self.ranks.world_size, self._config.trainer
        index = Index(
            str(self.version), size, self.weights.fingerprint, self._run_id, settings.expert_parallel
        )
        return checkpoint.save(self.engine, self._folder, index, self.ranks, settings.keep_checkpoints)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder, whole or not at all; an older one is replaced."""
        partial = folder.with_name(f".partial-{folder.name}")
        if self.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.weights.save_folder(partial, self._tokenizer)
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)


def after(version: Version) -> Version:
    """The version that the next step makes."""
    return Version(version.lineage, version.step + 1)


def hyperparameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters of each param_group of a fresh optimizer, with the rate before any schedule."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def apply_rate(groups: list[dict[str, Any]], initial: list[dict[str, Any]], share: float) -> None:
    """Give every group its hyperparameters again, the rate times `share`; a checkpoint's are overwritten."""
    for group, initial_group in zip(groups, initial, strict=True):
        group.update(initial_group, lr=initial_group["lr"] * share)


# --- the module ---------------------------------------------------------------------------------------------


class Head(nn.Module):
    """The model's output layer under another forward: it shares the very parameters, tied or not.

    Being a module, DeepSpeed's hooks gather its weight when it runs, as for any other.
    """

    def __init__(self, layer: Any, shape: HeadShape, chunk: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = layer.weight
        self.bias: nn.Parameter | None = getattr(layer, "bias", None)
        self.shape, self.chunk = shape, chunk

    def forward(
        self, hidden_CH: Tensor, targets: Targets | None, loss: Loss | None, rows: SplitRows | None = None
    ) -> Any:
        """Loss sum and statistics (see head.chunked_loss); without targets, the raw projection [C, V].

        `rows`: where the tokens lie whose rows other ranks have parts of.
        """
        head = OutputHead(self.weight, self.bias, self.shape)
        if targets is None or loss is None:
            return head.raw(hidden_CH)
        if loss.discount is not None and targets.row_N is not None and loss.discount.applies(targets):
            logp_C = token_logp(hidden_CH.detach(), head, targets.token_N, self.chunk)
            factor_C = loss.discount.factor(logp_C, targets)
            credited = logp_C - targets.teacher_logp_N, factor_C, targets.row_N
            future_C = future_credit(*credited) if rows is None else rows.future_credit(*credited)
            targets = replace(targets, future_N=future_C)
        return chunked_loss(hidden_CH, head, targets, loss, self.chunk)


class Student(nn.Module):
    """Hidden states of the model, then the loss in chunks."""

    def __init__(
        self,
        model: nn.Module,
        shape: HeadShape,
        chunk: int,
        varlen: bool = False,
        group: SequenceGroup | None = None,
    ) -> None:
        """`varlen`: whether rows come end to end (`varlen.replace_attention` has prepared it).

        `group`: the ranks that rows are split over (by `sequence_split.split_attention`).
        """
        super().__init__()
        self.model, self.varlen, self.group = model, varlen, group
        self.head = Head(plain(model).get_output_embeddings(), shape, chunk)

    @property
    def config(self) -> Any:
        """transformers' text configuration, where DeepSpeed's AutoEP reads how routers choose and weigh."""
        return plain(self.model).config.get_text_config()

    @cached_property
    def _routers(self) -> Routers:
        return routers(self.model)

    def routed(self, routes_SMK: Tensor | None) -> AbstractContextManager[None]:
        """Have the routers take these experts, in forward and backward passes; with None they choose."""
        if routes_SMK is None:
            return nullcontext()
        return replayed(self._routers, routes_SMK.to(self.head.weight.device))

    def forward(
        self,
        tokens_RL: Tensor,
        positions_C: Tensor,
        targets: Targets | None = None,
        loss: Loss | None = None,
        layout: PackedRows | SplitRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss sum over the C positions and statistics (see head.chunked_loss).

        `layout`: the rows that lie end to end in the only one, R = 1, or those of which this is a part.
        Without targets: log p [C, V] at temperature 1, ours and the model's own, for `check_head`.
        """
        base = plain(self.model).base_model
        more = {} if layout is None else layout.arguments(tokens_RL.device)
        hidden_RLH = base(input_ids=tokens_RL, use_cache=False, **more).last_hidden_state
        hidden_CH = hidden_RLH.flatten(0, 1).index_select(0, positions_C)
        if targets is not None:
            total, stats = self.head(hidden_CH, targets, loss, layout if self.group else None)
            return total, stats
        shape = replace(self.head.shape, temperature=1.0)
        theirs_RLV = self.model(input_ids=tokens_RL, use_cache=False, **more).logits
        theirs_CV = theirs_RLV.flatten(0, 1).index_select(0, positions_C)[:, : shape.vocab]
        ours_CV = shape.logits(self.head(hidden_CH, None, None)[:, : shape.vocab].float())
        return ours_CV.log_softmax(1), theirs_CV.float().log_softmax(1)


def head_shape(config: Any, vocab: int, temperature: float) -> HeadShape:
    """How this family of models turns its head's output into logits, from its transformers configuration."""
    scale = getattr(config, "logit_scale", None)
    if scale is None:
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return HeadShape(vocab, float(scale), soft_cap_of(config), temperature)


def plain(model: nn.Module) -> Any:
    """The transformers model inside, without peft's wrapping."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


# --- loading ------------------------------------------------------------------------------------------------


def load(config: TrainerConfig, ranks: Ranks) -> tuple[Any, Student, Any]:
    """The engine, the student under ZeRO-3 in it, experts shared as configured, its tokenizer. Collective."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    settings, source = config.trainer, config.student
    ds_config = deepspeed_config(settings)
    partitioning = HfDeepSpeedConfig(ds_config)
    model = _pretrained(config, torch.bfloat16 if in_bf16(ds_config) else torch.float32)
    tokenizer, text = load_tokenizer(source), plain(model).config.get_text_config()
    for problem in parallelism.problems(settings, text, ranks.world_size):
        raise ConfigError(problem)
    if settings.sequence_parallel > 1:
        replace_attention(plain(model), settings.attention, split_attention)
    elif settings.packing == "varlen":
        replace_attention(plain(model), settings.attention)
    vocab = vocab_size(tokenizer, source.known_ids)
    if vocab > text.vocab_size:
        raise ConfigError(
            f"{source.path}: the tokenizer has {vocab} ids, the model {text.vocab_size} rows: "
            "resize the model's embeddings, or give it its own tokenizer"
        )
    shape, varlen = head_shape(text, vocab, config.temperature), settings.packing == "varlen"
    student = Student(model, shape, settings.head_chunk, varlen, join(settings, ranks))
    before, size = Originals(), settings.expert_parallel
    if size > 1:
        section = parallelism.section(settings, text.model_type)
        before, ds_config = originals(student, section, ranks.rank), {**ds_config, "expert_parallel": section}
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=student, model_parameters=trained, config=ds_config)
    engine.partitioning = partitioning  # transformers has only a weak reference
    if before:
        gap = check_experts(before, student, ranks)
        log.info("%d layers of experts are shared by %d ranks each, equal to %.1g", len(before), size, gap)
    return engine, student, tokenizer


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
    without_randomness(model).train()
    return model if settings.lora is None else with_adapters(model, settings.lora, config.seed)


def without_randomness(model: Any) -> Any:
    """`model` itself, in training mode from now on the same function as in evaluation.

    The rollout engine samples without dropout and router jitter. With them the trainer would compare another
    p with μ and with the teacher at every token: ρ would not be 1 at age 0, and a student equal to its
    teacher would move.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def with_adapters(model: Any, lora: LoRAConfig, seed: int) -> Any:
    """peft's wrapping of `model`: adapters alone are trained, from the same random start on every rank.

    Raises ConfigError for adapters of the embeddings or of the output layer, whose weight alone `Head` has.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = lora.target_modules
    adapters = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(layer, BaseTunerLayer) for layer in ends):
        raise ConfigError(
            f"trainer.lora.target_modules is {targets}: embeddings and output layer get no adapter, only the "
            'linear layers between them do; leave their names out, or set it to "all-linear"'
        )
    if getattr(model, "is_gradient_checkpointing", False):
        model.enable_input_require_grads()
    return wrapped


# --- what is measured before anything is trained ------------------------------------------------------------


@torch.no_grad()
def check_head(student: Student, run: nn.Module, device: torch.device) -> float:
    """Largest difference in nats between our log-probabilities and the model's own on 12 tokens.

    `run` is what to call in the student's place: the student itself, or the engine that wraps it. Raises
    ConfigError for a difference that the model's precision does not explain: the family's head does something
    that `head_shape` does not cover, and every objective would be wrong.
    """
    tokens_RL = torch.arange(12, device=device).remainder(student.head.shape.vocab).reshape(1, 12)
    run.eval()
    ours_CV, theirs_CV = run(tokens_RL, torch.arange(12, device=device))
    run.train()
    difference = float((ours_CV - theirs_CV).abs().max())
    precise = student.head.weight.dtype == torch.float32
    limit = 1e-4 if precise else 2.0**-6 * max(1.0, float(theirs_CV.abs().max()))
    if not difference <= limit:
        raise ConfigError(
            f"{type(plain(student.model)).__name__}: our head differs from the model's own logits by "
            f"{difference:.3g} nats (limit {limit:.3g}): this model family's head is not supported"
        )
    return difference


@torch.no_grad()
def check_rows(student: Student, run: nn.Module, device: torch.device) -> float:
    """How far the log-probabilities of three rows of one micro-batch, split over the ranks of a group where
    there is one, are from those of each row alone. Collective.

    Alone by transformers' plainest attention, "eager". Of a token: the norm of the difference between centred
    log-probabilities, as a share of their norm. Of a row, or of what one rank computes of it: the median, as
    rounding may send a token to another expert. Of all: the largest. Raises ConfigError where the model's
    precision does not explain it, or a layer was not told of packed rows, which would see each other, or of
    split ones, which would not see their own.
    """
    length_R = np.array([5, 7, 6]) * (1 if student.group is None else 2 * student.group.size)
    flat = (7 * np.arange(length_R.sum()) + 3) % student.head.shape.vocab
    laid, begin_R, packed = laid_out(flat, length_R, student.varlen)
    places = np.arange(len(flat)) + np.repeat(begin_R - (length_R.cumsum() - length_R), length_R)
    layout: Any = packed
    tokens_RL, place_S, flat_S = map(torch.from_numpy, (laid, places, flat))
    own_S = torch.arange(len(flat))
    if student.group is not None:
        tokens_RL, place_S, layout = split(student.group, tokens_RL, place_S, layout)
        own_S = layout.index_C
    model = plain(student.model)
    run.eval()
    together_SV, _ = run(tokens_RL.to(device), place_S.to(device), None, None, layout)
    with computing(model, "eager"):
        rows = flat_S.to(device).split(length_R.tolist())
        alone_SV = torch.cat([run(row[None], torch.arange(len(row), device=device))[0] for row in rows])
    run.train()
    pair = together_SV, alone_SV[own_S.to(device)]
    together_SV, alone_SV = (logits - logits.mean(1, keepdim=True) for logits in pair)
    gap_S = (together_SV - alone_SV).norm(dim=1) / alone_SV.norm(dim=1).clamp(min=1e-6)
    part_S = torch.from_numpy(np.repeat(np.arange(len(length_R)), length_R)).to(device)
    if student.group is not None:  # all ranks find the same
        gap_S, rank_S = layout.whole(torch.stack([gap_S, torch.full_like(gap_S, student.group.rank)]))
        part_S = part_S * student.group.size + rank_S.long()
    parts = [gap_S[part_S == part] for part in part_S.unique()]
    gap = float(torch.stack([part.median() for part in parts if len(part) >= LEAST]).max())
    limit = 1e-4 if student.head.weight.dtype == torch.float32 else 0.2
    attention, layers = model.config._attn_implementation, model.config.get_text_config().num_hidden_layers
    told = attention.startswith(row_attention.__name__) or student.group is not None
    if layout and told and len(layout.modules) < layers:
        problem = f"{layers - len(layout.modules)} of {layers} layers were not told how rows lie"
    elif not gap <= limit:
        problem = f"rows together and rows alone differ by {gap:.3g} of their logits (limit {limit:g})"
    else:
        return gap
    remedy = 'trainer.packing = "padded"' if student.varlen else 'trainer.attention = "eager"'
    if student.group is not None:
        remedy = "trainer.sequence_parallel = 1"
    raise ConfigError(f"{type(model).__name__} with attention {attention!r}: {problem}: set {remedy}")
