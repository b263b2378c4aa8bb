"""Evaluations of a real run, and of a folder without a run: vLLM, the teacher service and the evaluator."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_on_letters import NAME, command
from tiny_models import model_of
from whole_run import called, ended_well, over

from distill.evaluation.completions import file_of
from distill.evaluation.report import share
from distill.tasks.sort_letters import VOCABULARY, letter_tokenizer, make
from sync.base.jsonl import read_lines
from sync.wire import Estimate, Version

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
STEPS, PROMPTS, K = 4, 24, 4
AGAIN = f'{{source={{type="task", task="sort_letters"}}, prompts=10, completions={K}, temperature=0.7}}'
EVALUATION = f"{{every=2, prompts={PROMPTS}, sets={{again={AGAIN}}}}}"


@torch.no_grad()
def plain_reverse_kl(student: Path, teacher: Path, rows: list[dict[str, Any]]) -> float:
    """The metric by its definition: both models in fp32, one sequence at a time, the whole vocabulary."""
    models = [model_of(path) for path in (student, teacher)]
    total, tokens = 0.0, 0
    for row in rows:
        prompt = letter_tokenizer().encode(row["prompt"])
        ids = torch.tensor([prompt + row["token_ids"]])
        logits = (model(ids).logits[0, len(prompt) - 1 : -1, : len(VOCABULARY)] for model in models)
        logp, logq = (one.log_softmax(-1) for one in logits)
        total += float((logp.exp() * (logp - logq)).sum())
        tokens += len(row["token_ids"])
    return total / tokens


def test_a_run_is_evaluated_by_its_servers_as_by_plain_models_in_one_process(tmp_path: Path) -> None:
    """Its one replica is held for it; the named set has four completions of each prompt."""
    settings = (f"evaluation={EVALUATION}", 'teachers.only.dtype="float32"')
    called(*command(tmp_path, STEPS, *settings)[3:])
    run = tmp_path / NAME
    summary = ended_well(run, STEPS)
    assert summary["problems"] == []
    found = {one["version"]: one for one in summary["evaluations"]}
    assert set(found) >= {str(Version(0, 0)), str(Version(0, STEPS))}
    for step, student in ((0, tmp_path / "student"), (STEPS, run / "final")):
        report, rows = found[str(Version(0, step))], read_lines(file_of(run, Version(0, step), "held_out"))
        assert len(rows) == report["completions"] == PROMPTS
        plain = plain_reverse_kl(student, tmp_path / "teacher", rows)
        assert report["reverse_kl"] == pytest.approx(plain, rel=1e-4)
        assert report["reverse_kl_error"] is None
        assert report["pass_rate"] == sum(row["reward"] > 0 for row in rows) / PROMPTS
        check_set(report["sets"]["again"], read_lines(file_of(run, Version(0, step), "again")))
    config, final = tmp_path / f"{NAME}.toml", run / "final"
    card = (final / "README.md").read_text()
    before, after = (found[str(Version(0, step))]["reverse_kl"] for step in (0, STEPS))
    assert f"| reverse KL, nats per token | {before:.3f} | {after:.3f} |" in card
    assert "| again, pass@1 | " in card
    (tmp_path / "final").symlink_to(final)
    check_evaluate(tmp_path, [str(config), *over(*settings)], final)


def check_set(report: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Figures of a named set follow from the completions on disk, and those earn their rewards."""
    assert len(rows) == report["completions"] == 10 * K
    task = make()
    passed = []
    for row in rows:
        prompt: Any = type("Prompt", (), {"text": row["prompt"], "answer": None})
        passed.append(task.reward(prompt, row["token_ids"]))
        assert row["reward"] == passed[-1]
    means = torch.tensor(passed, dtype=torch.float64).view(10, K).mean(1).numpy()
    assert Estimate(**report["pass_at_1"]) == share(means, K)


def check_evaluate(tmp_path: Path, words: list[str], final: Path) -> None:
    """`distill evaluate`: a teacher against itself is 0; a student's completions can be read."""
    figures, texts = tmp_path / "figures.json", tmp_path / "texts"
    evaluate = ["evaluate", *words, "--json", str(figures), "--model"]
    called(*evaluate, str(final), "--completions", str(texts))
    report = json.loads(figures.read_text())
    plain = plain_reverse_kl(final, tmp_path / "teacher", read_lines(texts / "held_out.jsonl"))
    assert report["reverse_kl"] == pytest.approx(plain, rel=1e-4)
    assert set(report["sets"]) == {"again"}
    assert (texts / "again.jsonl").is_file()
    called(*evaluate, str(tmp_path / "teacher"))
    assert json.loads(figures.read_text())["reverse_kl"] == pytest.approx(0.0, abs=1e-6)
