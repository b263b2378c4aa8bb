"""Checks of a configuration before anything is started: `check` runs them in order.

Each names the value, the rule and the remedy.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from distill.buffer import rules
from distill.config import RunConfig
from distill.config.prompts import EnvironmentPrompts, MixturePrompts, RowPrompts
from distill.evaluation.sets import check_rewards, open_sets
from distill.preflight_checks import environments, experts, objective, vocabulary
from distill.preflight_checks.devices import Where, check_devices
from distill.preflight_checks.machine import bulk_bytes, check_processor, runs_vllm
from distill.prompts.sources import PromptSplit, all_known, data_sources, open_prompts, text_config
from distill.prompts.understood import check_rendering, first_prompts
from student_trainer.config import unpackable
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.launch import names_others
from student_trainer.objectives.config import (
    ObjectiveConfig,
    Own,
    TopK,
    needs,
    student_topk,
    teacher_temperature,
)
from student_trainer.parallelism import row_problems
from sync.base import secrets, tokenizers
from sync.base.address import is_loopback
from sync.base.errors import ConfigError, SnapshotError
from sync.base.own_code import check_module, is_own, use_folder
from sync.base.settings import ModelSource, OwnStoreConfig
from sync.weights.snapshots import checkpoint
from sync.wire.peers import Role, wrong_among
from teacher_service.router import Router

logger = logging.getLogger(__name__)


class Checked(NamedTuple):
    """A configuration that can run."""

    config: RunConfig
    """With what the file left open filled in."""
    split: PromptSplit
    """Its prompts, read once."""
    lines: list[str]
    """What was chosen and computed, in words."""


def check(config: RunConfig, where: Where | None = None) -> Checked:
    """Check everything that can be known beforehand. Raises ConfigError or DataError.

    `where`: the GPUs of processes that are started elsewhere; None: all are started on this machine.
    """
    use_folder(config.run.code_folder)
    _find_own_code(config)
    if not config.student.urls:
        check_processor("student")
    check_model(config.student, "student")
    for name, teacher in config.teachers.items():
        if not teacher.urls:
            check_model(teacher, f"teachers.{name}", runs_vllm(teacher))
    templated = {name: shares_template(config, name) for name in config.teachers}
    config, tokenizer, differences = vocabulary.resolve(config, templated)
    config, lines = objective.resolve(config)
    config, rendering = check_rendering(config, tokenizer)
    lines += [*differences, *rendering]
    deepspeed_config(config.trainer)
    check_secrets(config)
    rules(config)
    sections = environments.problems(config)
    model = [*_packing(config), *experts.problems(config)]
    refuse([*_teachers(config), *_reach(config), *sections, *_others(config), *model])
    refuse(wrong_among(_peers(config)))
    _warn_of_temperature(config)
    router = Router(config.teachers)
    vocab_size = tokenizers.vocab_size(tokenizer, config.student.known_ids)
    refuse([*_topk(config, vocab_size), *objective.heads(config, vocab_size)])
    lines += check_devices(config, where)
    split = open_prompts(config, tokenizer)._replace(vocab_size=vocab_size)
    router.check(data_sources(split))
    refuse([*_unrouted(config, split, router), *_rewards(config, split)])
    if config.evaluation is not None:
        check_rewards(open_sets(config, split, tokenizer))
    return Checked(config, split, [*lines, *split.notes, *first_prompts(config, split, tokenizer)])


def _find_own_code(config: RunConfig) -> None:
    """Raise ConfigError for code of the user's that only processes started later import, and cannot find."""
    if isinstance(config.objective, Own):
        check_module(config.objective.name, "objective.type")
        objective.try_own(config.objective)
    if isinstance(config.weights.store, OwnStoreConfig):
        check_module(config.weights.store.name, "weights.store.type")
    for name, teacher in config.teachers.items():
        if is_own(teacher.engine) and not teacher.urls:
            check_module(teacher.engine, f"teachers.{name}.engine")


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with a line for each problem; nothing when there is none."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def check_model(source: ModelSource, section: str, runs_vllm: bool = False) -> None:
    """Raise ConfigError for a folder without a model, or a processor that cannot run vLLM.

    Whether the Hub has what may be an id of it is found out by what loads it.
    """
    path = Path(source.path)
    hub_id = source.path.count("/") == 1 and not source.path.startswith((".", "~", "/"))
    if path.is_dir():
        check_folder(path, f"{section}.path")
    if not path.is_dir() and "/" in source.path and not hub_id:
        raise ConfigError(
            f"{section}.path {path} does not exist: name a model folder, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    if runs_vllm:
        check_processor(section)


def check_folder(path: Path, key: str) -> None:
    """Raise ConfigError for what is no model folder, and where loaders would read different weights."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {path} holds no config.json: name a folder that save_pretrained wrote")
    try:
        if unread := checkpoint.check_weights(path):
            logger.warning("%s %s", key, unread)
    except SnapshotError as error:
        raise ConfigError(f"{key} {error}") from None


def check_secrets(config: RunConfig) -> None:
    """Raise ConfigError for secrets where a command line or an engine's own log would show them."""
    places = [place.split("/")[1:] for place in secrets.found(config.model_dump(mode="json"))]
    refuse(
        f"{'.'.join(parts)} holds a secret, which a command line or the engine's log would show: set it "
        "in the environment, such as [student.env] (HF_TOKEN, …), and leave it out"
        for parts in places
        if "engine_args" in parts or "launcher_args" in parts
    )


def check_following(config: RunConfig, name: str) -> None:
    """Raise ConfigError when teacher `name` is to follow the student and this run gives it nothing to."""
    transport, rules = config.weights.transport, config.teachers[name]
    reasons = {
        f'weights.transport is "{transport}", and it reads the store': transport != "snapshot",
        "trainer.lora is set, and adapters alone are no model": config.trainer.lora is not None,
        "trust_remote_code too, and no code comes from a store": rules.trust_remote_code,
        f'objective "{config.objective.type}" keeps its head, which would go out of date': needs(
            config.objective
        ).hidden,
    }
    refuse(
        f"teachers.{name}.follow_student_every is set and {reason}: change that, or leave it out"
        for reason, broken in reasons.items()
        if broken and rules.follow_student_every is not None
    )


def must_differ(config: RunConfig, teacher: str) -> bool:
    """Whether the student learns nothing from a teacher that equals it at the start of the run."""
    settings, learned = config.teachers[teacher], config.objective
    learns_otherwise = learned.task is not None or learned.type == "sft"
    shown_otherwise = settings.prompt_transform or is_own(settings.engine)
    return not (settings.follow_student_every or shown_otherwise or learns_otherwise)


def shares_template(config: RunConfig, teacher: str) -> bool:
    """Whether prompts go through the student's chat template and that teacher sees them as they are."""
    prompts = config.prompts
    parts = prompts.parts.values() if isinstance(prompts, MixturePrompts) else [prompts]
    templated = any(
        isinstance(part, EnvironmentPrompts) or (isinstance(part, RowPrompts) and part.template == "chat")
        for part in parts
    )
    return templated and config.teachers[teacher].prompt_transform is None


# --- the sections against each other


def _reach(config: RunConfig) -> Iterator[str]:
    """Teachers whose kept scores a trainer on other machines could not fetch."""
    controller, hostfile = config.controller, config.trainer.hostfile
    place = urlsplit(controller.url).hostname if controller.url else controller.host
    external = controller.trainer == "external" and not is_loopback(place or "")
    elsewhere = external or config.trainer.nodes > 1 or (hostfile is not None and names_others(hostfile))
    if not elsewhere or not config.buffer.by_reference(bulk_bytes(config)):
        return
    for name, teacher in config.teachers.items():
        if not teacher.urls and config.cluster.type != "local":
            continue  # it registers where others reach it
        hosts = [urlsplit(url).hostname or "" for url in teacher.urls] or [teacher.host]
        for host in (host for host in hosts if is_loopback(host) or host in ("0.0.0.0", "::")):
            yield (
                f"teacher {name!r} keeps scores at {host}, where a trainer on other machines cannot fetch "
                f"them: set teachers.{name}.{'urls' if teacher.urls else 'host'} to an address that they "
                'reach, or buffer.scores = "inline"'
            )


def _peers(config: RunConfig) -> Iterator[tuple[str, str, Role]]:
    """Key, URL and role of every server that runs already."""
    roles = {
        "student": Role.STUDENT,
        "evaluation.replica": Role.STUDENT,
        "evaluation.placement": Role.EVALUATOR,
    }
    for section, place in config.places().items():
        kind = Role.TEACHER if section.startswith("teachers.") else Role.ENVIRONMENT
        for url in place.urls:
            yield f"{section}.urls", url, roles.get(section, kind)
    for name, teacher in config.teachers.items():
        for key in ("engine_url", "generate_url"):
            if not teacher.urls and (url := getattr(teacher, key)) is not None:
                yield f"teachers.{name}.{key}", url, Role.VLLM


def _others(config: RunConfig) -> Iterator[str]:
    rollout, chosen = config.rollout, config.objective
    if (rollout.top_p < 1 or rollout.min_p > 0) and not rollout.top_k:
        name, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("min_p", rollout.min_p)
        yield (
            f"rollout.{name} is {value:g} and rollout.top_k is 0: the ids that a token was sampled from are "
            "sent with it, and top_k bounds their number; set it, say to 20"
        )
    if rollout.top_k and (why := _unmasked(chosen)):
        yield f"rollout.top_k is {rollout.top_k} and {why}: leave one of the two out"
    kept = getattr(config.objective, "drop_rho_outside", None)
    if kept is not None and config.objective.type != "sft" and not kept[0] <= 1 <= kept[1]:
        yield f"objective.drop_rho_outside {kept} drops every token of age 0: give an interval around 1"
    for name, teacher in config.teachers.items():
        same = (teacher.path, teacher.revision) == (config.student.path, config.student.revision)
        if same and config.evaluation is not None and must_differ(config, name):
            yield f"teachers.{name}.path is the student, which teaches it nothing: name another model"
    if config.tracking.wandb != "disabled" and importlib.util.find_spec("wandb") is None:
        yield 'tracking.wandb needs the wandb package: install it, or set it to "disabled"'
    if config.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield (
            "tracking.tensorboard is true and the package tensorboard is not installed: pip install "
            "'onpolicy-distill[tensorboard]', or set it to false"
        )


def _unmasked(objective: ObjectiveConfig) -> str | None:
    """What of an objective does not go together with sampling masks (docs/objectives.md)."""
    if getattr(objective, "discount", 0.0):
        return "objective.discount credits later tokens, whose teacher's mass within their masks is not known"
    if isinstance(objective, TopK) and objective.drop_rho_outside is not None:
        return "objective.drop_rho_outside would judge p/μ of the whole vocabulary, below 1 within masks"
    if isinstance(objective, Own):
        return "an objective of your own is given the whole vocabulary, and μ is of the mask"
    return None


def _packing(config: RunConfig) -> Iterator[str]:
    if config.trainer.packing == "varlen" and (kinds := unpackable(text_config(config.student))):
        yield (
            f"student.path {config.student.path} has layers of the kind {', '.join(kinds)}, through which "
            'rows laid end to end would see each other: set trainer.packing = "padded"'
        )
    if config.trainer.sequence_parallel > 1:
        ranks = experts.trainer_ranks(config)
        yield from row_problems(config.trainer, text_config(config.student), ranks)


def _teachers(config: RunConfig) -> Iterator[str]:
    yield from objective.unserved(config)
    for name, teacher in config.teachers.items():
        check_following(config, name)
        if config.evaluation is not None and teacher.prompt_transform is not None:
            yield (
                f"teachers.{name}.prompt_transform is set and evaluation shows both models the same prompt: "
                "set evaluation = false"
            )
    if unknown := config.objective.teacher_coefficients.keys() - config.teachers.keys():
        yield (
            f"objective.teacher_coefficients names {', '.join(sorted(unknown))}, the teachers are "
            f"{', '.join(config.teachers)}: use their names"
        )


# --- what the files hold


def _warn_of_temperature(config: RunConfig) -> None:
    rollouts = config.rollout.temperature
    if teacher_temperature(config.objective, rollouts) != rollouts:
        logger.warning(
            "rollout.temperature is %g and the teacher's is 1, where evaluation is too: at its optimum the "
            "student sampled at %g equals the teacher at 1; to match the teacher at every temperature set "
            'objective.teacher_temperature = "rollout"',
            rollouts,
            rollouts,
        )


def _topk(config: RunConfig, vocab: int) -> Iterator[str]:
    k = max(needs(config.objective).topk, student_topk(config.objective))
    if k > vocab:
        yield (
            f"objective.k is {k} and the student's tokenizer has {vocab} ids: set objective.k = {vocab} or "
            'less, or objective.type = "full"'
        )


def _unrouted(config: RunConfig, split: PromptSplit, router: Router) -> Iterator[str]:
    """Teachers that would be idle, where the data sources of all prompts are known."""
    sources = data_sources(split)
    taught = {router.route(source) for source in sources}
    for name in config.teachers if all_known(split) else ():
        if name not in taught:
            yield (
                f"teachers.{name} would have nothing to score, the prompts' data sources are "
                f"{', '.join(sorted(sources))}: change its route, prompts.source_field or the prompts, or "
                "leave it out"
            )


def _rewards(config: RunConfig, split: PromptSplit) -> Iterator[str]:
    evaluation, kind = config.evaluation, config.prompts.type
    if config.objective.task is not None and not split.rewarded:
        yield (
            f'objective.task is set and prompts of type "{kind}" have no reward: '
            "set prompts.reward_fn, take prompts of a task, or leave objective.task out"
        )
    if config.objective.task is not None and config.objective.on_policy == 0:
        yield (
            "objective.task rewards the student's completions and objective.on_policy is 0, so there are "
            "none: raise on_policy, or leave objective.task out"
        )
    if evaluation is not None and evaluation.metric != "reverse_kl" and not split.rewarded:
        yield (
            f'evaluation.metric is "{evaluation.metric}" and prompts of type "{kind}" have no reward: '
            'set prompts.reward_fn, or evaluation.metric = "reverse_kl"'
        )
