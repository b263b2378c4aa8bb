"""README.md of a model folder that a run leaves: a model card for people and for the Hugging Face Hub.

    configuration, summary.json, the student's own card ─▶ write_card ─▶ front matter, figures, use, origin

Secrets are hidden, and of what names this machine (paths, addresses, devices) only the names of folders stay.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import yaml
from huggingface_hub import metadata_load

from distill.config import RunConfig
from distill.config.prompts import DatasetPrompts, sources_of
from distill.evaluation.report import Z
from distill.metrics.names import HELD_OUT, SETS
from distill.metrics.summary import clock, versions
from student_trainer.objectives.config import Own
from sync.base import secrets
from sync.base.hub import optional_file
from sync.base.settings import ModelSource

log = logging.getLogger(__name__)
CARD: Final = "README.md"
FOLDER: Final = "path/to/this/folder"
"""What the card calls the model until it has a name on the Hub."""
_FROM_STUDENT: Final = ("base_model", "license", "license_name", "license_link", "language")
_OPERATIONAL: Final = frozenset(
    {"code_folder", "devices", "engine_url", "env", "folder", "generate_url", "host", "hostfile"}
    | {"keep_folder", "launcher_args", "port", "store", "url", "urls"}
)
_TAUGHT: Final = (
    "distilled on-policy: the student generates completions, the teacher ({teachers}) scores every token,\n"
    "and the student is trained on its own samples."
)
_REWARDED: Final = "trained on its own samples by their rewards."
_TEXT: Final = Template(
    """---
$matter
---

# $title

$student $trained Objective `$objective`. $meaning

| held-out prompts | before | after |
| --- | --- | --- |
$figures

$coverage

## Use

$use

## Training

| | |
| --- | --- |
$facts

Made with $packages.

<details><summary>Configuration</summary>

```json
$configuration
```

</details>
"""
)


def write_card(
    folder: Path, config: RunConfig, summary: Mapping[str, Any], version: str | None, name: str = FOLDER
) -> None:
    """Write README.md into a model folder that holds `version`; warn of fields that are left to fill in.

    `summary`: as summary.json holds it, or empty before the run has ended. `name`: of the repository on the
    Hub that the folder goes to.
    """
    adapter = (folder / "adapter_config.json").is_file()
    matter = front_matter(config, adapter)
    missing = [field for field in ("base_model", "license") if field not in matter]
    if missing:
        what = "%s leaves %s to fill in: the student's own card does not give it"
        log.warning(what, folder / CARD, " and ".join(missing))
    evaluations = {report["version"]: report for report in summary.get("evaluations") or []}
    before, after = _figures(summary.get("before")), _figures(evaluations.get(version))
    rows = [(what, before.get(what, "–"), after.get(what, "–")) for what in {**before, **after}]
    coverage = "The run had not ended, or had no evaluation, when this card was written."
    if evaluations:
        coverage = (
            f"After: version `{version}`. Completions at temperature 1 unless the configuration says "
            "otherwise; in brackets, or behind ±, 95 % intervals. A reverse KL without one is exact for its "
            "completions."
        )
    meaning = "A function of the run's own code."
    if not isinstance(config.objective, Own):
        meaning = " ".join((type(config.objective).__doc__ or "").partition("\n\n")[0].split())
    teachers = ", ".join(_shown(teacher.path) for teacher in config.teachers.values())
    text = _TEXT.substitute(
        matter=yaml.safe_dump(matter, sort_keys=False, allow_unicode=True).strip()
        + "".join(f"\n# {field}: fill in" for field in missing),
        title=name if name != FOLDER else config.run.name,
        student=_shown(config.student.path),
        trained=_TAUGHT.format(teachers=teachers) if teachers else _REWARDED,
        objective=getattr(config.objective, "name", config.objective.type),
        meaning=meaning,
        figures=_rows(rows) or "| not evaluated | – | – |",
        coverage=coverage,
        use=_use(config, name, adapter),
        facts=_rows(facts(config, summary, version)),
        packages=", ".join(f"{k} {v}" for k, v in (summary.get("versions") or versions()).items()),
        configuration=json.dumps(_public(config), indent=1, ensure_ascii=False),
    )
    (folder / CARD).write_text(secrets.redact(text))


def front_matter(config: RunConfig, adapter: bool) -> dict[str, Any]:
    """Fields for the Hub; without `base_model` or `license` where nothing says what they are."""
    known = _student_card(config.student)
    if not Path(config.student.path).is_absolute():
        known["base_model"] = config.student.path
    fields = {field: known[field] for field in _FROM_STUDENT if known.get(field)}
    if "base_model" in fields:
        fields["base_model_relation"] = "adapter" if adapter else "finetune"
    sources = sources_of(config.prompts).values()
    names = {source.path for source in sources if isinstance(source, DatasetPrompts)}
    datasets = sorted(name for name in names if not Path(name).exists())
    taught = ["distillation", "on-policy-distillation"]
    methods = taught if config.teachers else ["reinforcement-learning"]
    return {
        **fields,
        **({"datasets": datasets} if datasets else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [*methods, "onpolicy-distill", *(["lora"] * adapter)],
    }


def _student_card(student: ModelSource) -> dict[str, Any]:
    """Front matter of the student's own model card, over its config.json; empty where there is neither.

    A card on the Hub is read from the local cache or asked for once.
    """
    card: dict[str, Any] = {}
    for name in ("config.json", CARD):
        path: Path | None = Path(student.path) / name
        try:
            if not Path(student.path).is_dir():
                path = optional_file(student.path, student.revision, name)
            if path is not None:
                card |= (metadata_load(path) if name == CARD else json.loads(path.read_bytes())) or {}
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            log.debug("%s of %s is not read: %s", name, student.path, error)
    return card


def facts(config: RunConfig, summary: Mapping[str, Any], version: str | None) -> Iterator[tuple[str, str]]:
    """What the model was made of, how long it took and the main settings; nothing of this machine."""
    trainer = config.trainer
    yield "student", _shown(config.student.path)
    for name, teacher in config.teachers.items():
        yield f"teacher {name}", f"{_shown(teacher.path)}, {teacher.dtype}, engine {teacher.engine}"
    prompts = []
    for source in sources_of(config.prompts).values():
        name = next(getattr(source, key) for key in ("path", "task", "environment") if hasattr(source, key))
        prompts.append(f"{source.type} {_shown(str(name))}")
    yield "prompts", ", ".join(prompts)
    yield "version", f"{version}, of {config.run.steps} steps"
    yield "rollouts", f"{config.rollout.batch} per step, up to {config.rollout.max_tokens} tokens each"
    if summary:
        trained, generated = summary["train"]["tokens_total"], summary["rollout"]["tokens_total"]
        yield "tokens", f"{trained:,} trained on, of {generated:,} generated"
        yield "time, all starts", f"{clock(summary['seconds']['distill'])} hours"
    yield "staleness", f"at most {config.buffer.max_staleness} versions"
    rate = f"{trainer.lr:g}, {trainer.lr_schedule}, {trainer.warmup_steps} steps of warm-up"
    yield "learning rate", rate + (f"; LoRA of rank {trainer.lora.rank}" if trainer.lora else "")


# --- pieces of the text -----------------------------------------------------------------------------------


def _figures(report: Mapping[str, Any] | None) -> dict[str, str]:
    """Figures of an evaluation, with 95 % intervals where they are estimates; empty without one."""
    if report is None:
        return {}
    error = report.get("reverse_kl_error")
    margin = "" if error is None else f" ± {Z * error:.3f}"
    (reverse_kl, _, _), (pass_rate, _, _), _ = HELD_OUT
    value = report.get("reverse_kl")
    figures = {} if value is None else {reverse_kl: f"{value:.3f}{margin}"}
    if (rate := report.get("pass_rate")) is not None:
        figures[pass_rate] = _interval(rate, *(report.get("pass_rate_interval") or ()))
    if (reward := report.get("reward")) not in (None, rate):
        figures["mean reward"] = f"{reward:.3f}"
    for name, of_set in (report.get("sets") or {}).items():
        figures |= {f"{name}, {title}": _interval(**of_set[key]) for title, key, _ in SETS if of_set.get(key)}
    return figures


def _interval(value: float, low: float | None = None, high: float | None = None) -> str:
    return f"{value:.3f}" if low is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _use(config: RunConfig, name: str, adapter: bool) -> str:
    """How Transformers and vLLM load the folder."""
    student, lora = _shown(config.student.path), config.trainer.lora
    trusted = config.student.trust_remote_code
    kind, tokens = "AutoModelForCausalLM", name
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    served = f"vllm serve {name}" + " --trust-remote-code" * trusted
    if adapter:
        kind, tokens = "AutoPeftModelForCausalLM", student
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
        if lora is not None:
            rank = max(8, 1 << (lora.rank - 1).bit_length())  # vLLM takes powers of two
            served = (
                f"vllm serve {student}{' --trust-remote-code' * trusted} --enable-lora "
                f"--max-lora-rank {rank} --lora-modules distilled={name}"
            )
    trust = ", trust_remote_code=True" * trusted
    return (
        f"```python\n{imports}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{tokens}"{trust})\n'
        f'model = {kind}.from_pretrained("{name}", dtype="auto"{trust})\n'
        f"```\n\n```\n{served}\n```"
    )


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _shown(path: str) -> str:
    """A Hub id, or a text such as "/no_think", as it is; a path of this machine by its last name."""
    return Path(path).name if Path(path).is_absolute() and len(Path(path).parts) > 2 else path


def _public(config: RunConfig) -> Any:
    """What decides the result, without secrets and without what names this machine."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            left = {key: item for key, item in value.items() if key not in _OPERATIONAL and item is not None}
            return {key: kept(item) for key, item in left.items()}
        if isinstance(value, list):
            return [kept(item) for item in value]
        return _shown(value) if isinstance(value, str) else value

    machine = {"cluster", "controller", "preflight", "tracking"}
    return kept(secrets.hide(config.model_dump(mode="json", exclude=machine)))
