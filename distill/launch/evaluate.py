"""`distill evaluate`: a model folder evaluated without a run, by servers of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from distill.config import RunConfig
from distill.config.evaluation import EvaluationConfig
from distill.controller import Controller
from distill.evaluation.sets import open_sets
from distill.launch.preflight import check_here, claim_of, components, connected, prepare
from distill.launch.roles import temporary, token_of
from distill.preflight_checks.checks import check_folder
from distill.prompts.sources import open_prompts
from distill.prompts.stream import PromptStream
from distill.record.resume import Start, resume
from distill.record.store import Store
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer, vocab_size
from sync.wire import EvalReport, Version


def evaluate_folder(
    config: RunConfig, model: Path | None, completions: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """See `distill.api.evaluate`. One replica, the evaluator and teachers without `urls` are started here."""
    if model is not None and (model / "adapter_config.json").is_file():
        raise ConfigError(
            f"--model {model} holds an adapter: distill export {model.parent} FOLDER merges it into its "
            "base, and FOLDER can be evaluated"
        )
    if model is not None:
        check_folder(ModelSource(path=str(model)), "--model")
    if completions is not None and completions.exists():
        raise ConfigError(f"--completions {completions} exists: name a new folder")
    config = config.with_(evaluation=config.evaluation or EvaluationConfig())
    config = config.with_(evaluation={"replica": None, "placement": {"urls": []}})
    check_here(config, "evaluate")
    config = prepare(config, lambda line: None, trains=False).config
    placed = {"replicas": 1, "urls": [], "path": str(model.absolute() if model else config.student.path)}
    here = {"host": "127.0.0.1", "port": 0, "url": None}
    config = config.with_(student=placed, trainer={"lora": None}, controller=here)
    with temporary(config) as moved:
        report = asyncio.run(_evaluated(moved, say))
        if completions is not None:
            shutil.copytree(moved.run_dir / "evaluations" / str(report.version), completions)
    figures = msgspec.to_builtins(report)
    for name in ("schema", "type", "version"):
        figures.pop(name, None)
    return {"model": config.student.path} | figures


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """What people read of them: a line per figure, and one per estimate of a named set."""
    sets = figures["sets"]
    for name, value in figures.items():
        if name != "sets":
            yield f"{name:<20} {value if not isinstance(value, float) else format(value, '.4f')}"
    for name, set_report in sets.items():
        for figure in ("pass_at_1", "average", "majority"):
            if (interval := set_report[figure]) is not None:
                spread = f"{interval['low']:.4f} to {interval['high']:.4f}"
                yield f"{f'{name} {figure}':<20} {interval['value']:.4f}, 95 % interval {spread}"


async def _evaluated(config: RunConfig, say: Callable[[str], None]) -> EvalReport:
    token, claim = token_of(config), claim_of(config)
    async with connected(config, token, claim, say) as servers:
        say("generating completions" + ", and comparing them with the teachers" * bool(config.teachers))
        tokenizer = load_tokenizer(config.student)
        split = open_prompts(config, tokenizer)
        split = split._replace(vocab_size=vocab_size(tokenizer, config.student.known_ids))
        prompts = PromptStream(split.train, config.run.seed, config.rollout.per_prompt)
        store, sets = Store(config.run_dir, "never"), open_sets(config, split, tokenizer)
        parts = components(config, servers, split, claim, prompts=prompts, store=store, sets=sets)
        start = resume(config.run_dir, Start.of(config, prompts), store.connection)
        return await Controller(config, parts, start, token=token).evaluated(Version(0, 0))
