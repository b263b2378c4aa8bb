"""What is checked before anything is started, and once the teachers answer: one clear message each."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from distill.buffer import staleness
from distill.config import RunConfig, TaskPrompts
from distill.launch.student import flag_name
from distill.preflight.probes import Finding
from distill.preflight.processor import check_processors
from distill.prompts.held_out import NOTHING_HELD_OUT, PromptSplit, data_sources, open_prompts
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.objectives.needs import needs, student_topk, teacher_temperature
from sync import secrets, tokenizers
from sync.errors import ConfigError, DataError
from sync.settings import ModelSource
from sync.wire import TeacherInfo
from teacher_service.describe import load_tokenizer
from teacher_service.router import Router

logger = logging.getLogger(__name__)
CANNOT_WRITE = ("openai", "sglang")
"""Engines that score, and never complete a prompt."""


def check(config: RunConfig) -> PromptSplit:
    """Everything that can be known beforehand; the prompts, read once. Raises ConfigError or DataError."""
    check_processors(config)
    check_folder(config.student, "student")
    for name, teacher in config.teachers.items():
        if not teacher.urls:
            check_folder(teacher, f"teachers.{name}")
    deepspeed_config(config.trainer)
    check_secrets(config)
    _check_combinations(config)
    _check_temperature(config)
    router = Router(config.teachers)
    tokenizer = load_tokenizer(config.student)
    _check_tokenizers(config, tokenizer)
    _check_topk(config, tokenizers.vocab_size(tokenizer))
    split = open_prompts(config, tokenizer, longest_sequence(config))
    split = split._replace(vocab_size=tokenizers.vocab_size(tokenizer))
    router.check(data_sources(split))
    _check_reward(config, split)
    if config.evaluation is not None and not split.held_out:
        raise ConfigError(NOTHING_HELD_OUT)
    return split


def missing_scores(config: RunConfig, info: TeacherInfo) -> Finding:
    """What the objective needs and a teacher that answers cannot give."""
    want = needs(config.objective, config.rollout.temperature)
    asked = {
        "topk": want.topk > 0,
        "hidden": want.hidden,
        "gather": student_topk(config.objective) > 0,
        "write": config.objective.on_policy < 1,
        "temperature": want.temperature != 1.0,
    }
    lacking = [mark for mark, wanted in asked.items() if wanted and mark not in info.can]
    figure = f'engine "{info.engine}" gives {", ".join(info.can) or "the sampled token alone"}'
    problem = (
        f'objective "{config.objective.type}" needs {", ".join(lacking)}: choose objective "sampled" with '
        'on_policy = 1 and teacher_temperature = "one", or the transformers engine'
    )
    return Finding("marks", figure, problem if lacking else None)


def shares_template(config: RunConfig, teacher: str) -> bool:
    """Whether prompts go through the student's chat template and that teacher is shown them as they are."""
    prompts = config.prompts
    templated = not isinstance(prompts, TaskPrompts) and prompts.template == "chat"
    return templated and config.teachers[teacher].prompt_transform is None


def longest_sequence(config: RunConfig) -> int:
    """Tokens of prompt and completion that the student, its replicas and every local teacher take."""
    limits = [student_limit(config)]
    for teacher in config.teachers.values():
        if not teacher.urls and teacher.engine != "openai" and teacher.prompt_transform is None:
            limits.append(teacher.max_length or context_length(teacher))
    return min(limits)


def student_limit(config: RunConfig) -> int:
    """Longest sequence of a replica: the model's own limit, or max-model-len when that is less.

    Raises ConfigError for a max-model-len that is no number.
    """
    own = context_length(config.student)
    given = {flag_name(key): value for key, value in config.student.engine_args.items()}
    asked = given.get("max-model-len", own)
    if not isinstance(asked, int):
        raise ConfigError(
            f"student.engine_args has max-model-len = {asked!r}, and prompts are measured against it: write "
            "the number of tokens"
        )
    return min(own, asked) if asked > 0 else own


def context_length(source: ModelSource) -> int:
    """Longest sequence that a model takes, in tokens. Raises ConfigError when its config cannot be read."""
    return int(text_config(source).max_position_embeddings)


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


def check_folder(source: ModelSource, key: str) -> None:
    """Raise ConfigError for a path that looks like a folder and holds no model."""
    path = Path(source.path)
    looks_local = path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") != 1
    looks_local = looks_local or path.parent.is_dir()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{key}.path {source.path} holds no config.json: name a folder that save_pretrained wrote"
            )
    elif looks_local and source.path.count("/") > 0:
        raise ConfigError(
            f"{key}.path {source.path} does not exist: name a model folder, or a Hub id "
            "such as Qwen/Qwen3-0.6B"
        )


def _check_combinations(config: RunConfig) -> None:
    staleness.rules(config)
    if config.rollout.top_p < 1:
        raise ConfigError(
            f"rollout.top_p is {config.rollout.top_p:g} and must be 1: the objectives compare whole "
            "distributions, and nucleus sampling gives none to the tokens it cuts off; leave it out"
        )
    if config.evaluation is not None and config.weights.transport != "snapshot":
        raise ConfigError(
            f'weights.transport is "{config.weights.transport}" and evaluation reads versions '
            'from the store: set weights.transport = "snapshot", or evaluation = false'
        )
    for name, teacher in config.teachers.items():
        if teacher.engine in CANNOT_WRITE and config.objective.on_policy < 1:
            raise ConfigError(
                f"objective.on_policy is {config.objective.on_policy:g} and engine {teacher.engine!r} of "
                f'teacher {name!r} cannot write: set on_policy = 1, or engine = "transformers" or "vllm"'
            )
    unknown = config.objective.teacher_coefficients.keys() - config.teachers.keys()
    if unknown:
        raise ConfigError(
            f"objective.teacher_coefficients names {', '.join(sorted(unknown))}, the teachers are "
            f"{', '.join(config.teachers)}: use their names"
        )
    if config.trainer.lora is not None and config.weights.transport != "snapshot":
        raise ConfigError(
            f'weights.transport is "{config.weights.transport}" and [trainer.lora] publishes adapters, '
            'which go through a store: set weights.transport = "snapshot"'
        )
    for name, teacher in config.teachers.items():
        if teacher.follow_student_every is not None:
            check_following(config, name)
        if config.evaluation is not None and teacher.prompt_transform is not None:
            raise ConfigError(
                f"teachers.{name}.prompt_transform is set and evaluation shows both models the same prompt: "
                "set evaluation = false"
            )
    if config.tracking.wandb != "disabled" and importlib.util.find_spec("wandb") is None:
        raise ConfigError('tracking.wandb needs the wandb package: install it, or set it to "disabled"')


def _check_temperature(config: RunConfig) -> None:
    """Refuse a teacher that cannot be at its temperature; warn where the optimum is not the teacher."""
    rollouts = config.rollout.temperature
    theirs = teacher_temperature(config.objective, rollouts)
    for name, teacher in config.teachers.items():
        if teacher.engine != "transformers" and theirs != 1:
            raise ConfigError(
                f'objective.teacher_temperature is "rollout" at temperature {rollouts:g}, and engine '
                f"{teacher.engine!r} of teacher {name!r} gives log-probabilities at 1 alone, from which no "
                'others follow: set engine = "transformers", or teacher_temperature = "one"'
            )
    if theirs != rollouts:
        logger.warning(
            "rollout.temperature is %g and the teacher's is 1: the student learns to be the teacher when it "
            "is sampled at %g, not at 1, where it is evaluated; set objective.teacher_temperature = "
            '"rollout" to make it the teacher at every temperature',
            rollouts,
            rollouts,
        )


def check_secrets(config: RunConfig) -> None:
    """Raises ConfigError for secrets where a command line or an engine's own log would show them."""
    for place in secrets.found(config.model_dump(mode="json")):
        parts = place.split("/")[1:]
        if "engine_args" in parts or "launcher_args" in parts:
            raise ConfigError(
                f"{'.'.join(parts)} holds a secret, which a command line or the engine's log would show: set "
                "it in the environment, such as [student.env] (HF_TOKEN, …), and leave it out"
            )


def check_following(config: RunConfig, name: str) -> None:
    """Raises ConfigError when this run gives teacher `name` nothing to follow."""
    rules = {
        f'weights.transport is "{config.weights.transport}", and it reads the store': config.weights.transport
        != "snapshot",
        "trainer.lora is set, and adapters alone are no model": config.trainer.lora is not None,
        "trust_remote_code too, and no code comes from a store": config.teachers[name].trust_remote_code,
        f'objective "{config.objective.type}" keeps its head, which would go out of date': needs(
            config.objective
        ).hidden,
    }
    for reason in (reason for reason, broken in rules.items() if broken):
        raise ConfigError(
            f"teachers.{name}.follow_student_every is set and {reason}: change that, or leave it out"
        )


def _check_topk(config: RunConfig, vocab: int) -> None:
    k = max(needs(config.objective).topk, student_topk(config.objective))
    if k > vocab:
        raise ConfigError(
            f"objective.k is {k} and the student's tokenizer has {vocab} ids: set objective.k = {vocab} or "
            'less, or objective.type = "full"'
        )


def _check_reward(config: RunConfig, split: PromptSplit) -> None:
    if config.objective.task is not None and split.reward_fn is None:
        raise ConfigError(
            f'objective.task is set and prompts of type "{config.prompts.type}" have no reward: '
            "set prompts.reward_fn, take prompts of a task, or leave objective.task out"
        )
    if config.objective.task is not None and config.objective.on_policy == 0:
        raise ConfigError(
            "objective.task rewards the student's completions and objective.on_policy is 0, so there are "
            "none: raise on_policy, or leave objective.task out"
        )
    if config.evaluation is not None and config.evaluation.metric == "pass_rate" and split.reward_fn is None:
        raise ConfigError(
            f'evaluation.metric is "pass_rate" and nobody judges prompts of type "{config.prompts.type}": '
            'set prompts.reward_fn, or evaluation.metric = "reverse_kl"'
        )


def _check_tokenizers(config: RunConfig, tokenizer: Any) -> None:
    """Compare with every teacher whose tokenizer can be loaded here."""
    for name, teacher in config.teachers.items():
        if teacher.urls:
            continue
        theirs = load_tokenizer(teacher)
        lines = tokenizers.differences(tokenizer, theirs, ("student", f"teacher {name}"))
        if lines:
            raise DataError(
                f"student {config.student.path} and teacher {teacher.path} have different tokenizers: "
                f"{'; '.join(lines)}. Token ids must mean the same to both: choose models of one family"
            )
        templates = [tokenizers.chat_template_fingerprint(one) for one in (tokenizer, theirs)]
        if shares_template(config, name) and templates[0] != templates[1]:
            raise DataError(
                f"student {config.student.path} and teacher {teacher.path} have different chat templates: "
                "the teacher would be shown a format it was not taught. Name the same Jinja file in "
                f"student.chat_template and teachers.{name}.chat_template, or set "
                f"teachers.{name}.prompt_transform"
            )
