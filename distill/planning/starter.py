"""`distill init`: a configuration for two models, prompts and GPUs, of which no two roles share one.

teacher     the fewest GPUs, a power of two, that hold it with one sequence
evaluator   one GPU where one is left, else the CPU
trainer     half of the rest, or as many as it needs; the replicas have the others
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from distill.config.loading import validate
from distill.config.prompts import DatasetPrompts
from distill.preflight_checks.devices import check_devices, engine_memory
from distill.preflight_checks.machine import GIB
from distill.preflight_checks.objective import with_objective
from distill.prompts.rows import dataset_rows, jsonl_rows
from distill.prompts.sources import positions
from sync.base.errors import ConfigError
from sync.base.messages import listed
from sync.base.settings import ModelSource

ROOT: Final = Path(__file__).parents[2]
LENGTH: Final = 4096
"""Tokens of prompt and completion together, half for each, where both models take as many."""
TABLES: Final = (".csv", ".tsv", ".parquet")
DATA: Final = (*TABLES, ".json", ".jsonl", ".arrow")
"""Suffixes of files that are read as a dataset."""
FIELDS: Final = (
    *("prompt", "messages", "conversations", "question", "problem", "instruction", "query"),
    *("input", "text"),
)
"""Names under which rows hold prompts, the likeliest first."""
SHARE: Final = 0.9
"""gpu-memory-utilization of replicas and teacher."""


class Wanted(NamedTuple):
    """What a starter is made from."""

    teacher: str
    student: str
    prompts: str
    """A JSONL, CSV or Parquet file, a dataset's folder or its Hub id."""
    gpus: int
    """0: every role on cores."""
    gib: float
    """Of each GPU."""


class Split(NamedTuple):
    """GPUs of each role, as CUDA_VISIBLE_DEVICES names them."""

    replicas: list[str]
    """An entry each."""
    teacher: str
    trainer: str
    evaluator: str | None


def check_free(path: Path) -> None:
    """Raise ConfigError for a file that exists."""
    if path.exists():
        raise ConfigError(f"{path} exists, and is not overwritten: name another FILE, or remove it")


def write(path: Path, request: Wanted) -> list[str]:
    """Write the configuration; returns what the preflight computes of its memory.

    Raises ConfigError for a file that exists, models whose config cannot be read, prompts that are none, and
    GPUs that do not suffice.
    """
    check_free(path)
    text, computed = text_and_memory(request, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(text)
    return computed


def text_and_memory(request: Wanted, path: Path) -> tuple[str, list[str]]:
    """The file's text, which loads and fits, and a line for each process on GPUs."""
    models = [ModelSource(path=name) for name in (request.student, request.teacher)]
    length = min(positions(model, "max_position_embeddings", LENGTH) for model in models)
    if not request.gpus:
        text = _text(request, None, length, path)
        validate(tomllib.loads(text), str(path))
        return text, []
    student, teacher = (_tensor(model, request, length) for model in models)
    rest = request.gpus - teacher
    if rest < student + 1:
        raise ConfigError(
            f"--gpus {request.gpus} of {request.gib:g} GiB: the teacher needs {teacher}, a replica {student} "
            f"and the trainer 1 of their own: give {teacher + student + 1} or more, choose smaller models, "
            "or let roles share GPUs, with run.share_gpus as in configs/user_run.toml"
        )
    spare = rest > student + 1
    problem: ConfigError | None = None
    for ranks in range(max(1, (rest - spare) // 2), rest - spare - student + 1):
        text = _text(request, _split(request.gpus, teacher, student, ranks, spare), length, path)
        try:
            config = with_objective(validate(tomllib.loads(text), str(path))).config
            return text, check_devices(config)
        except ConfigError as error:
            problem = error
    assert problem is not None, "one number of ranks at least was tried"
    raise problem


def _tensor(model: ModelSource, request: Wanted, length: int) -> int:
    """The fewest GPUs that hold an engine. Raises ConfigError when all of them do not."""
    names = [str(index) for index in range(request.gpus)]
    for count in takewhile(lambda size: size <= request.gpus, (1 << power for power in range(16))):
        terms, _, _ = engine_memory(model, "bfloat16", {"tensor-parallel-size": count}, length, names)
        if sum(terms.values()) <= SHARE * request.gib * GIB:
            return count
    needed = sum(terms.values()) / GIB
    raise ConfigError(
        f"{model.path} needs {needed:.1f} GiB on each of {count} GPUs, and {SHARE:g} of {request.gib:g} GiB "
        "are there: give more or larger GPUs (--gpus, --gpu-gib), or choose a smaller model"
    )


def _split(gpus: int, teacher: int, student: int, ranks: int, spare: bool) -> Split:
    """Teacher first, then trainer and evaluator, then as many whole replicas as are left."""
    names = [str(index) for index in range(gpus)]
    used, rest = names[:teacher], names[teacher:]
    trainer, rest = rest[:ranks], rest[ranks:]
    evaluator, rest = (rest[0], rest[1:]) if spare else (None, rest)
    whole = range(0, len(rest) - student + 1, student)
    replicas = [",".join(rest[start : start + student]) for start in whole]
    return Split(replicas, ",".join(used), ",".join(trainer), evaluator)


# --- the text


def _text(request: Wanted, split: Split | None, length: int, path: Path) -> str:
    place, kind, trainer = "the cores of one machine", "cpu", "ranks = 1\n"
    student, teacher = f"[student.engine_args]\nmax-model-len = {length}\n", f"max_length = {length}\n"
    evaluator = preflight = ""
    precision = 'precision = "fastest"             # float32 where these cores compute it faster\n'
    if split is not None:
        place, kind, precision = f"{request.gpus} GPUs of {request.gib:g} GiB", "gpu", ""
        tensor, parts = (gpus.count(",") + 1 for gpus in (split.replicas[0], split.teacher))
        student = (
            f"replicas = {len(split.replicas)}\n"
            f"devices = {json.dumps(split.replicas)}        # an entry for each\n"
            f"{student}gpu-memory-utilization = {SHARE:g}\n"
        ) + f"tensor-parallel-size = {tensor}\n" * (tensor > 1)
        teacher = (
            f'engine = "vllm"\ndtype = "bfloat16"\ndevices = ["{split.teacher}"]\n{teacher}'
            f"[teachers.teacher.engine_args]\ngpu_memory_utilization = {SHARE:g}\n"
        ) + f"tensor_parallel_size = {parts}\n" * (parts > 1)
        ranks = split.trainer.count(",") + 1
        trainer = f'ranks = {ranks}\ndevices = "{split.trainer}"\nactivation_checkpointing = true\n'
        evaluator = f'[evaluation.placement]\ndevices = ["{split.evaluator}"]\n'
        if split.evaluator is None:
            evaluator = 'device = "cpu"                    # no GPU is left\n'
        preflight = f"\n[preflight]\ngpu_gib = {request.gib:g}\n"
    return f"""\
# distill preflight {path.name}        check models, prompts, memory, ports and disk
# distill plan {path.name}             seconds of each stage, bottleneck, hours
# distill run {path.name}
#
# Written by `distill init` for {place}. `make docs` makes a page of every key.

[run]
name = {_quoted(_name(request))}
steps = 1000                      # optimizer steps
{precision}
[student]
path = {_quoted(request.student)}
{student}
[teachers.teacher]
path = {_quoted(request.teacher)}
{teacher}
[prompts]
{prompt_lines(request.prompts)}
max_prompt_tokens = {length // 2}          # longer prompts are dropped

[rollout]
batch = 256                       # rollouts of a step
max_tokens = {length - length // 2}                 # of a completion

[trainer]
lr = 3e-6
warmup_steps = 20
deepspeed = {_quoted(_deepspeed(f"zero3_{kind}.json"))}
{trainer}
[evaluation]
every = 100                       # steps; also before and after the run
prompts = 128
{evaluator}{preflight}"""


def prompt_lines(text: str) -> str:
    """Lines of [prompts] for a file, folder or Hub id, with the field that its first row has.

    Raises ConfigError for what is none of these, and for rows without a field that can be a prompt; DataError
    for a file that cannot be read. The folder of a table is read as one dataset.
    """
    path = Path(text)
    if path.suffix == ".jsonl" and path.is_file():
        row = next(jsonl_rows(path), None)
        lines = _field(text, row and row.fields)
        return "\n".join(['type = "jsonl"', f"path = {_quoted(text)}", *lines])
    if path.suffix in TABLES and path.is_file():
        files = sorted(file.name for file in path.parent.iterdir() if file.suffix in DATA and file != path)
        if files:
            raise ConfigError(
                f"--prompts {path}: its folder is read as one dataset and holds {', '.join(files[:3])} too: "
                "move the file to a folder of its own"
            )
        path = path.parent
    if path.is_dir():
        row = next(dataset_rows(DatasetPrompts(type="dataset", path=str(path))), None)
        lines = _field(text, row and row.fields)
        return "\n".join(['type = "dataset"', f"path = {_quoted(str(path))}", *lines])
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and path.suffix not in {".jsonl", *TABLES}:
        return f'type = "dataset"\npath = {_quoted(text)}\nfield = "prompt"                  # its column'
    raise ConfigError(
        f"--prompts {text} is no file: name a .jsonl file with one object a line, a .csv or .parquet file, a "
        "dataset's folder, or its Hub id such as openai/gsm8k"
    )


def _field(name: str, row: Mapping[str, Any] | None) -> list[str]:
    """The lines that name the prompt's field of rows like this one."""
    if row is None:
        raise ConfigError(f"--prompts {name} has no rows: give at least one")
    usable = [field for field, value in row.items() if value and isinstance(value, str | list)]
    named = [field for field in FIELDS if field in usable] or (usable if len(usable) == 1 else [])
    if not named:
        raise ConfigError(
            f"--prompts {name}: its rows have {', '.join(row) or 'no fields'}, and none of them is called "
            f"{', '.join(FIELDS)}: rename the one that holds the prompt"
        )
    messages = listed(row[named[0]])
    last = messages[-1] if isinstance(messages, list) else None
    speaker = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
    answered = speaker in ("assistant", "gpt")
    lines = [f"field = {_quoted(named[0])}"]
    return [*lines, "drop_answer = true                # the rows end with the answer"] if answered else lines


def _deepspeed(name: str) -> str:
    relative = Path("configs/deepspeed") / name
    if relative.is_file():
        return str(relative)
    if (ROOT / relative).is_file():
        return str(ROOT / relative)
    raise ConfigError(f"{relative} is not here: copy it from the source tree, as the wheel holds no configs/")


def _name(request: Wanted) -> str:
    models = request.student, request.teacher
    words = [re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-.") for model in models]
    return "-from-".join(word or "model" for word in words)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
