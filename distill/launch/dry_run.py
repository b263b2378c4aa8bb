"""`distill run --dry-run`: what a run would be, and every command that it would start; starts nothing.

On a cluster the commands are those that its engine is given, for the machines that `distill plan` names.
Ports that are chosen at the start are 0 here. Secrets, and whatever looks like one, are hidden.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from distill.config import RunConfig
from distill.launch.roles import Ports, plan_servers, role_words, temporary, token_of, trainer_child, url_of
from distill.launch.run_folder import check_holds_run
from distill.launch.supervise import ChildSpec
from distill.planning.threads import decide_threads
from distill.preflight_checks.checks import check, check_keys
from distill.preflight_checks.machine import decide_precision
from distill.preflight_checks.objective import resolve
from distill.preflight_checks.placement import needs
from distill.prompts.stream import PromptStream
from distill.record import resume as record
from sync.base import secrets

_ANY: Final = 65535
"""Stands for the controller's port in the file of a trainer that is not started."""


class _FreePorts(Ports):
    """Takes no port: 0 stays 0."""

    def take(self, host: str, port: int, key: str) -> int:
        return port


def dry_run(config: RunConfig) -> dict[str, Any]:
    """{"config": the configuration with nothing left open, "commands": [{name, env, argv}, …]}.

    Where a choice depends on them, reads the models' configs and, for their lengths, the first prompts of a
    local file; no weights. Raises ConfigError or DataError.
    """
    check_keys(config)
    if config.run.precision == "fastest":
        config, _ = decide_precision(config)
    config, _ = decide_threads(resolve(config).config)
    shown = secrets.hide(config.model_dump(mode="json"))
    if config.cluster.type != "local":
        commands = [
            {"name": role.name, "env": {}, "argv": ["distill", *role_words(config, role.section, role.index)]}
            for role in needs(config, gpus=False)
        ]
        return {"config": shown, "commands": commands}
    token, place = token_of(config), config.controller
    with temporary(config) as moved, _FreePorts() as ports:
        children = plan_servers(moved, token, ports).children
        if place.trainer == "launch":
            url = place.url or url_of(place.host, place.port or _ANY)
            children.append(trainer_child(moved, url, token))
        folder = str(moved.run.folder)
        commands = [_shown(child, folder, str(config.run.folder)) for child in children]
    return {"config": shown, "commands": commands}


def resume_lines(config: RunConfig) -> Iterator[str]:
    """What `distill run --resume` would go on from; reads models' configs, prompts and the run's folder.

    Raises ConfigError or DataError where it would be refused.
    """
    check_holds_run(config.run_dir)
    checked, split, *_ = check(config)
    config, _ = decide_threads(checked)
    prompts = PromptStream(split.train, config.run.seed, config.rollout.per_prompt)
    return record.lines(record.resume(config.run_dir, record.Start.of(config, prompts, split)))


def _shown(child: ChildSpec, written: str, real: str) -> dict[str, Any]:
    """`written`: the folder that stood in for the run's, `real`."""
    env = {
        name: _masked(name, value).replace(written, real)
        for name, value in child.env.items()
        if os.environ.get(name) != value
    }
    argv = [secrets.redact(word).replace(written, real) for word in secrets.hide([*child.argv])]
    return {"name": child.name, "env": env, "argv": argv}


def _masked(name: str, value: str) -> str:
    if name == secrets.VARIABLE:
        return secrets.HIDDEN
    if value.startswith("{"):  # settings as JSON, or the user's own
        with suppress(ValueError):
            value = json.dumps(secrets.hide(json.loads(value)))
    return secrets.redact(str(secrets.hide(value, name)))


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The configuration as JSON, then a line of shell per process."""
    yield json.dumps(figures["config"], indent=2)
    for command in figures["commands"]:
        env = [f"{name}={shlex.quote(value)}" for name, value in command["env"].items()]
        yield f"\n# {command['name']}"
        yield " ".join([*env, shlex.join(command["argv"])])
