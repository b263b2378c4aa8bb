"""What keeps a real student ending as its teacher does: rate, objective, share of the teacher's completions.

    python -m tests.benchmarks.remedies FOLDER

FOLDER is .cache/real after `make real`. A loop around our objectives in one process: sample, score, one step
of AdamW on fp32 weights whose bf16 copy samples and trains; no engine, no staleness. A line per evaluation
goes to FOLDER/remedies.jsonl; what is there already is not done again.

    reverse_kl, end, teacher_end   on the student's own completions of held-out prompts: KL(p‖q), and the mean
                                   probability of the end, the student's and the teacher's
    forward_kl, kept_end           on the teacher's: KL(q‖p), and the student's end over the teacher's
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from distill.evaluation.completions import Completion, Tokens, behaviour
from student_trainer.objectives.config import JSD, Full, Sampled
from student_trainer.objectives.divergences import Targets, build
from sync.base.errors import ConfigError
from sync.base.settings import ModelSource
from sync.base.tokenizers import load_tokenizer
from tests.benchmarks.figures import Figures, command, markdown

BATCH: Final = 12
TOKENS: Final = 48
HELD_OUT: Final = 48
LONGEST: Final = 160  # characters of a prompt
EVERY: Final = 15  # steps between evaluations
WARMUP: Final = 5
VARIANTS: Final[dict[str, tuple[Any, float]]] = {
    **{f"full {rate}": (Full(), float(rate)) for rate in ("3e-6", "1e-5", "3e-5", "1e-4")},
    **{f"full+1.0 {rate}": (Full(forward=1.0), float(rate)) for rate in ("1e-5", "3e-5", "1e-4")},
    "full+0.1 3e-5": (Full(forward=0.1), 3e-5),
    "full, share .75 3e-5": (Full(on_policy=0.75), 3e-5),
    "full, share .5 3e-5": (Full(on_policy=0.5), 3e-5),
    "jsd .5 3e-5": (JSD(beta=0.5), 3e-5),
    "sampled 1e-5": (Sampled(), 1e-5),
}
"""Name → objective and learning rate."""


def cut(rows: Sequence[Any]) -> Iterator[Any]:
    return (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


@torch.no_grad()
def complete(model: Any, prompts: Sequence[list[int]], end: int, seed: int) -> list[Completion]:
    """Completions sampled at temperature 1."""
    torch.manual_seed(seed)
    width = max(map(len, prompts))
    ids_BP = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    mask_BP = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": TOKENS}
    out_BT = model.generate(ids_BP, attention_mask=mask_BP, eos_token_id=end, pad_token_id=end, **sampling)
    completions = []
    for index, (prompt, row) in enumerate(zip(prompts, out_BT[:, width:].tolist(), strict=True)):
        ids = row[: row.index(end) + 1] if end in row else row
        tokens = Tokens(prompt, np.array(ids, np.int32), [(0, len(ids))])
        completions.append(Completion(index, [tokens], "stop" if end in row else "length"))
    return completions


def logp(model: Any, completions: Sequence[Completion]) -> Tensor:
    """fp32 [N, V]: of the completions' tokens, one after the other."""
    rows = [completion.sequences[0] for completion in completions]
    texts = [torch.tensor([*row.prompt_ids, *row.token_ids.tolist()]) for row in rows]
    ids_BT = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    hidden_BTH = model.model(ids_BT, use_cache=False).last_hidden_state  # padded right: nothing sees it
    spans = [slice(len(row.prompt_ids) - 1, len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    hidden_NH = torch.cat([hidden_TH[span] for hidden_TH, span in zip(hidden_BTH, spans, strict=True)])
    return (hidden_NH.float() @ model.lm_head.weight.float().T).log_softmax(-1)


@torch.no_grad()
def figures(
    student: Any, teacher: Any, end: int, prompts: Sequence[list[int]], reference: Sequence[Completion]
) -> dict[str, float]:
    """Of the student on the held-out prompts; `reference`: the teacher's completions of them."""
    own, columns = complete(student, prompts, end, seed=1), dict[str, list[Tensor]]()

    def add(**values_N: Tensor) -> None:
        for name, value_N in values_N.items():
            columns.setdefault(name, []).append(value_N)

    for part in cut(own):
        logp_NV, logq_NV = logp(student, part), logp(teacher, part)
        add(end=logp_NV[:, end].exp(), teacher_end=logq_NV[:, end].exp())
        add(reverse_kl=(logp_NV.exp() * (logp_NV - logq_NV)).sum(-1))
        add(entropy=-(logp_NV.exp() * logp_NV).sum(-1), teacher_entropy=-(logq_NV.exp() * logq_NV).sum(-1))
    for part in cut(reference):
        logp_NV, logq_NV = logp(student, part), logp(teacher, part)
        add(kept_end=logp_NV[:, end].exp(), asked_end=logq_NV[:, end].exp())
        add(forward_kl=(logq_NV.exp() * (logq_NV - logp_NV)).sum(-1))
    means = {name: float(torch.cat(values).mean()) for name, values in columns.items()}
    means["kept_end"] /= means.pop("asked_end")
    read = msgspec.structs.asdict(behaviour(own))
    return means | {name: read[name] for name in ("ended", "length_mean", "looping", "distinct")}


def targets_of(logp_NV: Tensor, logq_NV: Tensor, completions: list[Completion], by_student: int) -> Targets:
    token_N = torch.tensor(np.concatenate([row.sequences[0].token_ids for row in completions])).long()
    places = [place for place, row in enumerate(completions) for _ in range(row.tokens)]
    return Targets(
        token_N=token_N,
        behavior_logp_N=logp_NV.detach().gather(1, token_N[:, None])[:, 0],
        teacher_logp_N=logq_NV.gather(1, token_N[:, None])[:, 0],
        fresh_N=torch.ones(len(token_N), dtype=torch.bool),
        teacher_logp_NV=logq_NV,
        by_teacher_N=torch.tensor(places) >= by_student,
    )


def train(
    student: Any, teacher: Any, end: int, name: str, prompts: Sequence[list[int]], seed: int
) -> Iterator[int]:
    """Yields the number of steps done."""
    objective, rate = VARIANTS[name]
    loss, weights = build(objective), list(student.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    for step, batch in enumerate(cut(prompts), 1):
        by_student = round(len(batch) * objective.on_policy)
        seed_of_step = 1000 * seed + step - 1
        completions = complete(student, batch[:by_student], end, seed_of_step)
        if by_student < len(batch):
            completions += complete(teacher, batch[by_student:], end, seed_of_step)
        with torch.no_grad():
            logq_NV = logp(teacher, completions)
        logp_NV = logp(student, completions)
        loss(logp_NV, targets_of(logp_NV, logq_NV, completions, by_student))[0].mean().backward()
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / WARMUP)
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        yield step


def run(
    folder: Annotated[Path, typer.Argument(help="What `make real` made: .cache/real.", exists=True)],
    only: Annotated[str, typer.Option(help="Of these variants, names with semicolons; none: all.")] = "",
    student: Annotated[str, typer.Option(help="Its folder in FOLDER.")] = "student-24",
    steps: Annotated[int, typer.Option(min=EVERY, help="Of each variant.")] = EVERY,
    seed: Annotated[int, typer.Option(min=0, max=3, help="Which quarter of the prompts is first.")] = 0,
) -> Figures:
    """Train a real student by each objective, rate and share of the teacher's completions."""
    names = [name.strip() for name in only.split(";") if name.strip()] or list(VARIANTS)
    if unknown := sorted({*names} - {*VARIANTS}):
        raise ConfigError(f"--only {unknown[0]!r}: there are {'; '.join(VARIANTS)}")
    out = folder / "remedies.jsonl"
    teacher, tokenizer = load(folder / "teacher"), load_tokenizer(ModelSource(path=str(folder / "teacher")))
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    asked = [[{"role": "user", "content": text}] for text in texts if len(text) < LONGEST]
    template = {"add_generation_prompt": True, "return_dict": False}
    rows = [tokenizer.apply_chat_template(messages, **template) for messages in asked]
    end, held_out, prompts = tokenizer.eos_token_id, rows[:HELD_OUT], rows[HELD_OUT:]
    fixed = teacher, end, held_out, complete(teacher, held_out, end, seed=0)

    def write(variant: str, model: Any, **row: float) -> None:
        row |= figures(model, *fixed)
        rounded = {
            n: float(f"{value:.4g}") if isinstance(value, float) else value for n, value in row.items()
        }
        with out.open("a") as lines:
            lines.write(json.dumps({"variant": variant, **rounded}) + "\n")

    def written() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.read_text().splitlines()]

    if not out.exists():
        write("teacher", teacher, step=0)
        write(student, load(folder / student), step=0)
    done = {(row["variant"], row.get("seed"), row["step"]) for row in written()}
    for name in names:
        if (name, seed, steps) in done:
            continue
        model, spent, began = load(folder / student), 0.0, time.monotonic()
        batches = prompts[seed * len(prompts) // 4 :][: steps * BATCH]
        for step in train(model, teacher, end, name, batches, seed):
            if step % EVERY == 0:
                spent += time.monotonic() - began
                write(name, model, seed=seed, step=step, seconds=spent)
                began = time.monotonic()
    return {"rows": written()}


def table(figures: Figures) -> str:
    """A row for each evaluation."""
    names = ("variant", "seed", "step", "reverse_kl", "forward_kl", "end", "teacher_end", "kept_end", "ended")
    return "\n".join(
        markdown(names, ([str(row.get(name, "–")) for name in names] for row in figures["rows"]))
    )


if __name__ == "__main__":
    command(run, table)
