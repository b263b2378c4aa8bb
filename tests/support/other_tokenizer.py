"""The same weights, a smaller tokenizer: `python tests/support/other_tokenizer.py MODEL SIZE PROMPTS FOLDER`.

SIZE pieces are trained on the prompts of a JSONL file; as many as there are bytes and special tokens (273 for
SmolLM2) make a student that reads bytes. A piece's embedding is that of the same piece, or the mean of those
that the old tokenizer cuts its text into; a byte that no text has gets the mean of all. For a teacher with
the old tokenizer (docs/objectives.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model_folder: Path, size: int, prompts: Path, folder: Path) -> None:
    """Write the model, with tied embeddings as before, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    old = AutoTokenizer.from_pretrained(model_folder)
    texts = (json.loads(line)["prompt"] for line in prompts.read_text().splitlines())
    new = old.train_new_from_iterator(texts, size)
    table_VH, known = model.get_input_embeddings().weight.data, old.get_vocab()
    rows = []
    for index in range(len(new)):
        piece = new.convert_ids_to_tokens(index)
        ids = [known[piece]] if piece in known else old.encode(new.decode([index]))
        rows.append(table_VH[ids or slice(None)].mean(0))
    model.resize_token_embeddings(len(new))
    model.get_input_embeddings().weight.data.copy_(torch.stack(rows))
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id = new.bos_token_id, new.eos_token_id
        settings.pad_token_id = new.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    new.save_pretrained(folder)


if __name__ == "__main__":
    source, size, prompts, folder = sys.argv[1:]
    main(Path(source), int(size), Path(prompts), Path(folder))
