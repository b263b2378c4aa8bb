"""A run on Kubernetes: its configuration as one YAML file, from templates/jobset.yaml.jinja.

controller ◀── registers ── student, teacher-NAME, environment-NAME, evaluator     (pods answer /health)
    ▲───────────────────── trainer, a pod for each machine

A Job gives a pod that dies another one, `run.restarts` times a role; the run ends with the controller's Job.
What a pod keeps for itself lies in a folder of its node. The run's folder is on a volume, for the roles that
leave something there: controller, trainer and evaluator, and those that read weights from a folder.

Of what the configuration names on this machine and pods must find, small files travel:

DeepSpeed's JSON, chat templates, JSONL prompts, a module of one file   →  beside the configuration
below the run's volume; absolute, and not on this machine               →  in the pods: left as it is
a model or dataset in a folder of this machine                          →  refused
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePath, PurePosixPath
from secrets import token_urlsafe
from typing import Any, Final, NamedTuple

import tomli_w
import yaml

from distill.config import RunConfig
from distill.config.loading import located, merge, paths, read, validate
from distill.launch.templates import filled
from distill.preflight_checks.checks import check_keys
from distill.preflight_checks.placement import needs
from distill.topology import CONTROLLER, TRAINER, command
from sync.base import secrets
from sync.base.address import TOKEN_FILE_VARIABLE, token_from_environment
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.wire.peers import Role as PeerRole

CONFIG_FOLDER: Final = "/config"
"""Where pods find the configuration and the files that travel with it."""
PORT: Final = 8000
"""Of every server: each pod has an address of its own."""
REMOTE: Final = ("bucket", "object")
LONGEST: Final = 63
"""Characters of a name in DNS."""
INDEX: Final = "$(JOB_COMPLETION_INDEX)"
"""Which pod of its Job this is; Kubernetes puts the number there."""
_FILE: Final = f"{CONFIG_FOLDER}/run.toml"


@dataclass(frozen=True)
class Target:
    """Where a run goes."""

    image: str
    """Has this project installed, and `distill` on its path."""
    namespace: str = ""
    """Empty: kubectl's."""
    volume: str = ""
    """A claim that exists; empty: one is made, `storage` large."""
    keeps: bool = True
    """False: no volume at all; what a pod wrote ends with it."""
    storage: str = "500Gi"
    gpus: bool = True
    """False: no pod asks for any."""
    secret: str = ""
    """A Secret that exists, whose keys become variables of every pod, such as HF_TOKEN; empty: none."""


class Role(NamedTuple):
    """The pods of one Job."""

    name: str
    words: list[str]
    """Of `distill`."""
    pods: int
    deaths: int
    """Pods that may die, evicted ones left out."""
    gpus: int
    serves: bool
    """At PORT."""
    claims: bool
    """The volume is mounted where the run's folder lies."""
    node: str | None
    """Folder of its node's disk, for what it alone reads and writes."""
    shares_memory: bool


def render(path: Path, overrides: Sequence[str], target: Target, shown: str = "FILE") -> str:
    """The YAML of the run that a configuration file describes; `shown`: the file that it is written to.

    Raises ConfigError, naming all that cannot go to Kubernetes.
    """
    raw = read(path, overrides)
    config = located(raw, path)
    name, folder = label(config.run.name), PurePosixPath(str(raw["run"].get("folder", "")))
    if not folder.is_absolute():  # where the volume is mounted
        folder = PurePosixPath("/runs")
    within, files, problems = carried(raw, config, folder)
    if problems := [*_refusals(config, target, folder), *problems]:
        raise ConfigError("\n".join([f"{path} cannot run on Kubernetes as it is:", *problems]))
    check_keys(config)
    url = f"http://{name}-{CONTROLLER}-0-0.{name}:{PORT}"
    ours = {"host": "0.0.0.0", "port": PORT, "url": url, "trainer": "launch"}
    within = merge(within, {"run": {"folder": str(folder), "precision": "as_set"}, "controller": ours})
    specs = roles(validate(within, str(path)), target, url)
    _check_names(name, specs)
    return filled(
        "jobset.yaml.jinja",
        name=name,
        config=config,
        target=target,
        shown=shown,
        roles=specs,
        gpus=sum(role.pods * role.gpus for role in specs),
        folder=str(folder),
        run_dir=str(folder / config.run.name),
        config_folder=CONFIG_FOLDER,
        port=PORT,
        token_variable=TOKEN_FILE_VARIABLE,
        token=token_from_environment() or token_urlsafe(32),
        files=yaml.safe_dump(
            {"run.toml": tomli_w.dumps(within), **files},
            default_style="|",  # texts as they are
            sort_keys=False,
            width=110,
            allow_unicode=True,
        ).rstrip(),
    )


def label(name: str) -> str:
    """A name as Kubernetes takes it: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _refusals(config: RunConfig, target: Target, folder: PurePosixPath) -> Iterator[str]:
    store = config.weights.store
    if config.cluster.type not in ("local", "external"):
        yield f'cluster.type is "{config.cluster.type}": leave [cluster] out, Kubernetes starts the processes'
    if config.trainer.hostfile is not None:
        yield "trainer.hostfile is for machines that are reached by ssh: set trainer.nodes instead"
    if config.run.max_loaded_teachers is not None:
        yield "run.max_loaded_teachers is for teachers that share a machine: every pod has GPUs of its own"
    if config.run.share_gpus:
        yield "run.share_gpus: a GPU belongs to one pod: leave it out"
    by_key: dict[str, object] = {key: place.devices for key, place in config.places().items()}
    by_key[TRAINER] = config.trainer.devices
    if keys := [key for key, devices in by_key.items() if devices]:
        yield (
            f"{', '.join(f'{key}.devices' for key in keys)}: a pod sees its own GPUs alone: leave them out, "
            "and set gpus where a process takes more than it would by itself (the trainer takes its ranks)"
        )
    if not target.keeps and reads_volume(config):
        yield (
            f'--volume none: replicas would not see the versions of weights.store.type = "{store.type}": '
            f"name a volume, or set the type to one of {', '.join(REMOTE)}"
        )
    if not target.keeps and (there := _below(folder, config.model_dump(mode="json", exclude={"run"}))):
        yield f"--volume none, and {', '.join(there)} would be on it: name a volume"


def _check_names(name: str, specs: Sequence[Role]) -> None:
    """Raise ConfigError for names that are none in DNS, or that two roles would have."""
    if not re.match(r"[a-z]", name):
        raise ConfigError(
            f"run.name becomes the name {name!r} on Kubernetes, which must begin with a letter: choose "
            "another (--set run.name=…)"
        )
    names = [role.name for role in specs]
    if twice := sorted({pod for pod in names if names.count(pod) > 1}):
        raise ConfigError(f"two sections would be called {', '.join(twice)} on Kubernetes: rename one")
    for role in specs:
        longest = f"{name}-{role.name}-0-{role.pods - 1}-abcde"
        if len(longest) > LONGEST:
            raise ConfigError(
                f"pods of {role.name} would have names of {len(longest)} characters ({longest}), and DNS "
                f"takes {LONGEST}: choose a shorter run.name (--set run.name=…) or section"
            )


# --- roles


def roles(config: RunConfig, target: Target, url: str) -> list[Role]:
    """Every role of a run, with its pods; `config`: as they read it, `url`: the controller's."""
    restarts, run_dir = config.run.restarts, PurePosixPath(config.run_dir)
    mirrors = config.student.mirror_folder or run_dir / "mirrors"
    deaths = restarts if target.keeps else 0  # else its record is lost with its pod
    node = None if target.keeps else str(config.run.folder)
    words = ["control", _FILE]
    specs = [Role(CONTROLLER, words, 1, deaths, 0, True, target.keeps, node, shares_memory=False)]
    for section, group in groupby(needs(config, target.gpus), key=lambda process: process.section):
        process, *others = group
        name, *options = command(section, INDEX)
        serves, pods = process.role is not None, (1 + len(others)) * process.nodes
        keeps = process.role in (None, PeerRole.EVALUATOR)
        alone = isinstance(process.place, ModelSource)
        sections = [process.place] if alone else [config.student, process.place]
        tables = [section.model_dump(mode="json") for section in sections if section is not None]
        reads = serves and bool(_below(config.run.folder, tables))
        claims = target.keeps and (keeps or reads or (process.follows and reads_volume(config)))
        beside = mirrors if process.follows else None if keeps else run_dir
        place = beside if claims else config.run.folder
        specs.append(
            Role(
                label(process.label),
                [name, _FILE, "--controller", url, *options]
                + (["--port", str(PORT)] if serves else ["--node", INDEX]),
                pods,
                restarts * (1 if serves else pods),  # a machine that is lost ends the ranks of the others
                process.gpus,
                serves,
                claims,
                None if place is None else str(place),
                shares_memory=process.gpus > 0 or section == TRAINER,
            )
        )
    return specs


def reads_volume(config: RunConfig) -> bool:
    """Whether published weights lie in the run's folder."""
    return config.uses_store and config.weights.store.type not in REMOTE


def _below(folder: PurePath, tree: Any) -> list[str]:
    """What tables name below the folder where the volume is mounted."""
    return [text for text in texts(tree) if text.startswith(f"{folder}/")]


# --- what goes there

MOST_BYTES: Final = 1_000_000
"""A ConfigMap holds 1 MiB."""
_OWN: Final = re.compile(r"(?P<package>[A-Za-z_]\w*)[\w.]*:[A-Za-z_]\w*")
_MOVE: Final = "put it on the run's volume, or into the image, and give its path there"


def carried(
    raw: Mapping[str, Any], config: RunConfig, folder: PurePosixPath
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """A configuration with the paths that pods see; name → text of what lies in CONFIG_FOLDER; problems.

    `config`: what `raw` says, with absolute paths; `folder`: the run's volume in the pods.
    """
    within, files = copy.deepcopy(dict(raw)), dict[str, str]()
    problems = [
        f"{place.strip('/').replace('/', '.')} holds a secret, and a ConfigMap lies open: leave it out, and "
        "give its client's variable (AWS_SECRET_ACCESS_KEY, HF_TOKEN, …) by --secret"
        for place in secrets.found(raw)
    ]
    for place, holds, _ in paths(config):
        if place[0] == "run" or place == ("trainer", "hostfile"):
            continue
        kind = holds or ("store" if place == ("weights", "store", "path") else "folder")
        table: Any = within
        for key in place[:-1]:
            table = table.get(key, {})
        if (value := table.get(place[-1])) is None:
            continue
        key, path = ".".join(place), Path(value)
        if path.is_absolute() and PurePosixPath(value).is_relative_to(folder):
            continue
        if kind == "file" and path.is_file():
            name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{key}{path.suffix}")
            problems += _carry(path, key, name, files)
            table[place[-1]] = f"{CONFIG_FOLDER}/{name}"
        elif problem := _problem(value, path, kind, folder):
            problems.append(f"{key} = {value!r} {problem}")
    problems += _modules(within, config, files)
    size = sum(len(text.encode()) for text in files.values())
    if size > MOST_BYTES:
        problems.append(
            f"{', '.join(files)} have {size:,} bytes together, and a ConfigMap takes {MOST_BYTES:,}: put the "
            f"largest on the run's volume, such as {folder}/data, and give its path there"
        )
    return within, files, problems


def _problem(text: str, path: Path, kind: str, folder: PurePosixPath) -> str | None:
    """What keeps pods from finding it; None: nothing that is known here."""
    if kind == "store":
        return f"is shared by trainer and replicas: leave it out, or name a folder below {folder}"
    if kind == "model" and path.exists():
        return f"is a folder of this machine: {_MOVE} (or a Hub id)"
    if kind == "model" and not path.is_absolute() and text[0] != ".":
        return None  # a Hub id
    if not path.is_absolute():
        return "is not on this machine: correct it" if kind == "file" else f"is relative: {_MOVE}"
    return None


def _carry(path: Path, key: str, name: str, files: dict[str, str]) -> Iterator[str]:
    """Add a file to `files`; yields what keeps it from travelling."""
    try:
        files[name] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"{key} = '{path}' cannot be read as text ({error}): {_MOVE}"
        return
    if secrets.redact(files[name]) != files[name]:
        yield f"{key} = '{path}' holds a secret, and would lie open in a ConfigMap: take it out"


def _modules(within: dict[str, Any], config: RunConfig, files: dict[str, str]) -> Iterator[str]:
    """Modules of the user's that lie in run.code_folder: those of one file travel."""
    folder = config.run.code_folder
    if folder is None or not folder.is_dir():
        return
    within["run"].pop("code_folder", None)
    for name in sorted({match["package"] for text in texts(within) if (match := _OWN.fullmatch(text))}):
        if (folder / name).is_dir():
            yield f"{folder / name} is a package that the configuration names: install it in the image"
        elif (path := folder / f"{name}.py").is_file():
            yield from _carry(path, f"module {name}", path.name, files)


def texts(tree: Any) -> Iterator[str]:
    """Every string in tables and lists, keys left out."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from texts(item)
