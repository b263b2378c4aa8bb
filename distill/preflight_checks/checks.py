"""Checks of a configuration before anything is started; each names the value, the rule and the remedy.

check_keys     what the keys say of each other            every command, wherever it runs
check_parts    what some processes load, on their machine
check          all of it, against each other and against the prompts
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from distill.buffer import rules
from distill.config import RunConfig
from distill.evaluation.sets import PromptSet, check_rewards, open_sets
from distill.model_facts import FAMILIES, NOT_UPDATED, has_experts, misfit, quantization, routing
from distill.preflight_checks import objective, tokens
from distill.preflight_checks.devices import check_devices
from distill.preflight_checks.machine import bulk_bytes, check_processor, decide_precision
from distill.preflight_checks.placement import placed
from distill.preflight_checks.probes import environment_sources
from distill.prompts.sources import PromptSplit, TableSource, data_sources, open_prompts, text_config
from distill.prompts.stream import Mixture
from distill.topology import Process
from student_trainer import parallelism
from student_trainer.deepspeed_json import deepspeed_config
from student_trainer.launch import machines, names_others
from student_trainer.objectives.config import Own, Rewards, TopK, needs, teacher_temperature
from sync.base import secrets, tokenizers
from sync.base.address import WILDCARDS, is_loopback
from sync.base.errors import ConfigError, SnapshotError
from sync.base.own_code import check_module, is_own, use_folder
from sync.base.settings import ModelSource, OwnStoreConfig
from sync.weights.snapshots import checkpoint
from sync.wire.peers import Role, wrong_among
from teacher_service.config import TeacherConfig
from teacher_service.router import Router

logger = logging.getLogger(__name__)


class Checked(NamedTuple):
    """A configuration that can run, with what its file left open, which nothing changes from here on."""

    config: RunConfig
    split: PromptSplit
    lines: list[str]
    """What was chosen and computed, in words."""
    sets: Mapping[str, PromptSet]
    """Those of an evaluation, by name; empty: there is none."""
    machines: list[str]
    """Each machine of a cluster with its processes; from `prepare` the disk too."""


def check(config: RunConfig) -> Checked:
    """Check everything that can be known beforehand. Raises ConfigError or DataError."""
    use_folder(config.run.code_folder)
    where, machine_lines = placed(config)
    check_parts(config, [process.section for process in where if process.url is None])
    if isinstance(config.objective, Own):  # which only a process that is started later imports
        check_module(config.objective.name, "objective.type")
        objective.try_own(config.objective)
    if isinstance(config.weights.store, OwnStoreConfig):
        check_module(config.weights.store.name, "weights.store.type")
    config, tokenizer, meanings = tokens.resolve(config)
    config, precision = decide_precision(config)
    config, lines = objective.resolve(config)
    lines += [*precision, *meanings]
    deepspeed_config(config.trainer)
    check_secrets(config)
    rules(config)
    environments = (check_environment(config, name) for name in config.environments)
    served = [*_teachers(config), *chain.from_iterable(environments)]
    refuse([*served, *key_problems(config), *_packages(config), *model_problems(config)])
    refuse(wrong_among(_peers(config, where)))
    rollouts = config.rollout.temperature
    if teacher_temperature(config.objective, rollouts) != rollouts:
        logger.warning(
            "rollout.temperature is %g and the teacher's is 1, where evaluation is too: at its optimum the "
            "student sampled at %g equals the teacher at 1; to match the teacher at every temperature set "
            'objective.teacher_temperature = "rollout"',
            rollouts,
            rollouts,
        )
    vocab_size = tokenizers.vocab_size(tokenizer, config.student.known_ids)
    refuse(objective.too_large(config, vocab_size))
    refuse(
        f"rollout.stop_token_ids has {id_}, and the student's ids are 0 to {vocab_size - 1}: correct it"
        for id_ in config.rollout.stop_token_ids
        if not 0 <= id_ < vocab_size
    )
    lines += check_devices(config, where)
    split = open_prompts(config, tokenizer)._replace(vocab_size=vocab_size)
    router = Router(config.teachers)
    for source in data_sources(split):
        router.route(source)
    refuse(_prompts(config, split, router))
    sets = open_sets(config, split, tokenizer) if config.evaluation is not None else {}
    check_rewards(sets)
    lines += [*split.notes, *tokens.first_prompts(config, split, tokenizer)]
    return Checked(config, split, lines, sets, machine_lines)


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with a line for each problem; nothing when there is none."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def check_keys(config: RunConfig) -> None:
    """Raise ConfigError for keys that contradict each other: no file is read, no machine asked."""
    check_secrets(config)
    rules(config)
    Router(config.teachers)
    refuse(key_problems(config))


def check_parts(config: RunConfig, sections: Iterable[str]) -> None:
    """Check what the processes of these sections load: model folders, processor, code of the user's.

    Raises ConfigError. Whether the Hub has what may be an id of it is found out by what loads it.
    """
    loads: dict[str, tuple[ModelSource, bool]] = {}
    for section in sections:
        place = config.places().get(section)
        if isinstance(place, TeacherConfig):
            if is_own(place.engine):
                check_module(place.engine, f"{section}.engine")
            loads[section] = place, place.runs_vllm
        else:
            generates = section in ("student", "evaluation.replica")
            loads["student"] = config.student, generates or loads.get("student", (None, False))[1]
    for section, (source, with_vllm) in loads.items():
        path = Path(source.path)
        hub_id = source.path.count("/") == 1 and not source.path.startswith((".", "~", "/"))
        if path.is_dir():
            by_layers = not isinstance(source, TeacherConfig) or source.kind.computes == "layers"
            check_folder(source, f"{section}.path", by_layers)
        elif "/" in source.path and not hub_id:
            raise ConfigError(
                f"{section}.path {path} does not exist: name a model folder, or a Hub id such as "
                "Qwen/Qwen3-0.6B"
            )
        if with_vllm:
            check_processor(section)


def check_folder(source: ModelSource, key: str, loads: bool = True) -> None:
    """Raise ConfigError for what is no model folder, where loaders would read different weights, and where
    those are not of the model in config.json. `loads`: as of `misfit`."""
    path = Path(source.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {path} holds no config.json: name a folder that save_pretrained wrote")
    if source.revision is not None:
        raise ConfigError(
            f"{key} is a folder, and no folder has a revision {source.revision!r}: leave it out"
        )
    try:
        if unread := checkpoint.check_weights(path):
            logger.warning("%s %s", key, unread)
        problem = misfit(source, loads)
    except SnapshotError as error:
        raise ConfigError(f"{key} {error}") from None
    if problem:
        raise ConfigError(f"{key} {path}: {problem}")


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


# --- the sections against each other


def _peers(config: RunConfig, where: Iterable[Process]) -> Iterator[tuple[str, str, Role]]:
    """Key, URL and role of every server that runs already."""
    for process in where:
        if process.url is not None and process.role is not None:
            yield f"{process.section}.urls", process.url, process.role
    for name, teacher in config.teachers.items():
        for key in ("engine_url", "generate_url"):
            if not teacher.urls and (url := getattr(teacher, key)) is not None:
                yield f"teachers.{name}.{key}", url, Role.VLLM


def key_problems(config: RunConfig) -> Iterator[str]:
    """Keys that contradict each other, whatever the files hold that they name."""
    yield from environment_problems(config)
    yield from without_teacher(config)
    rollout, chosen = config.rollout, config.objective
    if (rollout.top_p < 1 or rollout.min_p > 0) and not rollout.top_k:
        name, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("min_p", rollout.min_p)
        yield (
            f"rollout.{name} is {value:g} and rollout.top_k is 0: the ids that a token was sampled from are "
            "sent with it, and top_k bounds their number; set it, say to 20"
        )
    kept, unmasked = getattr(chosen, "drop_rho_outside", None), ""  # with sampling masks, docs/objectives.md
    if getattr(chosen, "discount", 0.0):
        unmasked = (
            "objective.discount credits later tokens, whose teacher's mass within their masks is not known"
        )
    elif isinstance(chosen, TopK) and kept is not None:
        unmasked = "objective.drop_rho_outside would judge p/μ of the whole vocabulary, below 1 within masks"
    elif config.by_text:
        unmasked = "a teacher scores text, whose segments are credited to tokens of several masks"
    elif isinstance(chosen, Own):
        unmasked = "an objective of your own is given the whole vocabulary, and μ is of the mask"
    if rollout.top_k and unmasked:
        yield f"rollout.top_k is {rollout.top_k} and {unmasked}: leave one of the two out"
    if kept is not None and chosen.type != "sft" and not kept[0] <= 1 <= kept[1]:
        yield f"objective.drop_rho_outside {kept} drops every token of age 0: give an interval around 1"
    for name, teacher in config.teachers.items():
        same = (teacher.path, teacher.revision) == (config.student.path, config.student.revision)
        if same and config.evaluation is not None and must_differ(config, name):
            yield f"teachers.{name}.path is the student, which teaches it nothing: name another model"
    for name, teacher in config.teachers.items():
        if teacher.tokenizer == "own" and config.environments:
            yield (
                f"teacher {name!r} has a tokenizer of its own and scores the text of completions, and "
                "episodes of environments are written in the student's chat format: take a teacher that "
                "shares its vocabulary"
            )
        if config.evaluation is not None and teacher.prompt_transform is not None:
            yield (
                f"teachers.{name}.prompt_transform is set and evaluation shows both models the same prompt: "
                "set evaluation = false"
            )
    if unknown := chosen.teacher_coefficients.keys() - config.teachers.keys():
        yield (
            f"objective.teacher_coefficients names {', '.join(sorted(unknown))}, the teachers are "
            f"{', '.join(config.teachers)}: use their names"
        )
    place, nodes = config.controller, config.trainer.nodes
    started_here = config.cluster.type == "local" and place.trainer == "launch"
    if nodes > 1 and started_here and place.url is None and place.host in WILDCARDS:
        yield (
            f"trainer.nodes is {nodes} and controller.host is {place.host}, beside which the "
            "first machine's ranks would wait for the others on loopback: set controller.url to where they "
            "reach it"
        )


def without_teacher(config: RunConfig) -> Iterator[str]:
    """Keys that need a teacher, where there is none, or make no sense beside one."""
    chosen, evaluation, guard = config.objective, config.evaluation, config.guard
    if config.teachers:
        if isinstance(chosen, Rewards):
            yield (
                f'objective.type is "rewards", which learns from no teacher, and [teachers] names '
                f"{', '.join(config.teachers)}: leave them out, or choose a divergence and mix it with "
                "objective.task"
            )
        return
    if not isinstance(chosen, Rewards):
        yield (
            f'objective.type is "{chosen.type}", which learns from a teacher, and there are none: name one '
            'in [teachers], or set objective.type = "rewards"'
        )
    needed = {
        "guard.max_reverse_kl": guard.max_reverse_kl is not None,
        "guard.min_end_share": guard.min_end_share is not None,
        "run.max_loaded_teachers": config.run.max_loaded_teachers is not None,
        'evaluation.metric = "reverse_kl"': evaluation is not None and evaluation.metric == "reverse_kl",
    }
    yield from (f"{key} needs a teacher, and there is none: leave it out" for key in needed if needed[key])


def _packages(config: RunConfig) -> Iterator[str]:
    if config.tracking.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield (
            "tracking.tensorboard is true and the package tensorboard is not installed: pip install "
            "'onpolicy-distill[tensorboard]', or set it to false"
        )


def _teachers(config: RunConfig) -> Iterator[str]:
    yield from objective.unserved(config)
    for name in config.teachers:
        check_following(config, name)
    # kept scores that a trainer on other machines could not fetch
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
        for host in (host for host in hosts if is_loopback(host) or host in WILDCARDS):
            yield (
                f"teacher {name!r} keeps scores at {host}, where a trainer on other machines cannot fetch "
                f"them: set teachers.{name}.{'urls' if teacher.urls else 'host'} to an address that they "
                'reach, or buffer.scores = "inline"'
            )


# --- what the files hold


def _prompts(config: RunConfig, split: PromptSplit, router: Router) -> Iterator[str]:
    """Teachers that would be idle, where all data sources are known, and rewards that are missing."""
    sources, evaluation, kind = data_sources(split), config.evaluation, config.prompts.type
    taught = {router.route(source) for source in sources}
    for name in config.teachers if isinstance(split.train, TableSource | Mixture) else ():
        if name not in taught:
            yield (
                f"teachers.{name} would have nothing to score, the prompts' data sources are "
                f"{', '.join(sorted(sources))}: change its route, prompts.source_field or the prompts, or "
                "leave it out"
            )
    if config.objective.task is not None and not split.rewarded:
        alone = isinstance(config.objective, Rewards)
        learned = 'objective.type is "rewards"' if alone else "objective.task is set"
        yield (
            f'{learned} and prompts of type "{kind}" have no reward: set prompts.reward_fn, take prompts of '
            f"a task, or {'name a teacher in [teachers]' if alone else 'leave objective.task out'}"
        )
    elif evaluation is not None and config.metric != "reverse_kl" and not split.rewarded:
        yield (
            f'evaluation.metric is "{config.metric}" and prompts of type "{kind}" have no reward: '
            'set prompts.reward_fn, or evaluation.metric = "reverse_kl"'
        )
    if config.objective.task is not None and config.objective.on_policy == 0:
        yield (
            "objective.task rewards the student's completions and objective.on_policy is 0, so there are "
            "none: raise on_policy, or leave objective.task out"
        )


# --- environments and experts


def environment_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong between [environments.NAME] and the other sections."""
    sections, used = config.environments, environment_sources(config)
    for key, source in used.items():
        if source.environment not in sections:
            known = ", ".join(sections) or "none"
            rule = f"{key}.environment is {source.environment!r}, the environments are {known}"
            yield f"{rule}: use their names"
    for name in sections.keys() - {entry.environment for entry in used.values()}:
        yield f"environments.{name} is named by no prompts: set prompts.environment, or leave it out"
    if used and config.objective.on_policy < 1:
        yield (
            f"objective.on_policy is {config.objective.on_policy:g}, and a teacher's completion of a prompt "
            "is no episode: set it to 1, or take prompts of another type"
        )
    for name, teacher in config.teachers.items():
        if used and teacher.prompt_transform is not None:
            yield (
                f"teachers.{name}.prompt_transform is set, and prompts of an environment come with its first "
                "turn: leave it out"
            )


def check_environment(config: RunConfig, name: str) -> Iterator[str]:
    """What keeps this environment from being started here; nothing where it is reached by URL."""
    section = config.environments[name]
    if section.urls:
        return
    if section.python is not None and not section.python.is_file():
        remedy = (
            "make one with `make environments`, or" if section.type == "verifiers" else "leave it out, or"
        )
        yield (
            f"environments.{name}.python {section.python} does not exist: {remedy} name the interpreter of a "
            "virtual environment"
        )
    if section.type == "python" and section.python is None:
        try:
            check_module(section.environment, f"environments.{name}.environment")
        except ConfigError as error:
            yield str(error)


def model_problems(config: RunConfig) -> Iterator[str]:
    """Why the student cannot be packed, shared or updated in a replica, or its routing replayed, as asked."""
    trainer, model = config.trainer, text_config(config.student)
    ranks = None  # not known of a trainer that is started by hand
    if (
        max(trainer.sequence_parallel, trainer.expert_parallel) > 1
        and config.controller.trainer != "external"
    ):
        ranks = trainer.ranks * machines(trainer)
    yield from parallelism.problems(trainer, model, ranks)
    if method := quantization(config.student).get("quant_method"):
        yield (
            f"student.path {config.student.path} is quantized ({method}), and such weights cannot be "
            "trained: name the model in full precision"
        )
    if model.model_type in NOT_UPDATED and trainer.lora is None:
        yield (
            f"the student is a {model.model_type}: vLLM loads its experts past the reload of a model that "
            "serves, and replicas could not take new weights; train adapters (trainer.lora), or another "
            "student"
        )
    if not config.rollout.routing_replay:
        return
    asked = "rollout.routing_replay is true and "
    if not has_experts(model):
        yield f"{asked}the student, a {model.model_type}, has no experts: leave it out"
    elif routing(model) is None:
        yield (
            f"{asked}the student is a {model.model_type}: the families that can be replayed are "
            f"{', '.join(FAMILIES)}; leave it out, and watch train/mismatch_kl and train/rho_max"
        )
    if config.student.flags().get("enable-prefix-caching"):
        yield (
            f"{asked}student.engine_args turns on enable-prefix-caching: tokens that are read from the cache "
            "are not routed again, and their routes would be missing; leave one of the two out"
        )
