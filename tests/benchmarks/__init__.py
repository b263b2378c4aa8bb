"""Measurements of the whole product; `python -m tests.benchmarks.NAME --help` says what each takes.

    asynchronous   the quickstart one stage after the other, all at once, and the least that a step can take
    chaos          faults of every kind in a real run at random moments, and the audit
    controller     what a controller spends on a token, under load and over a long run
    device         every path of a run on this machine's GPU (`make gpu-check`), or CPU
    head           the loss over a large vocabulary, in chunks, against whole logits
    peers          TRL's DistillationTrainer and GRPOTrainer, and a plain loop, against us
    sync           bytes, speed and pauses of a weight sync, through every store
    teacher        scored tokens per second of the teacher service

Started from the root of a source checkout. Each prints its figures, and writes them to the file of `--json`.
What it leaves lies in `--folder`: finished trials are in its trials.jsonl, and are not repeated.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path.append(str(SUPPORT))  # in-memory roles, faults, servers of stores
