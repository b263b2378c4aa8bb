"""The limit of a step: its arithmetic, and what is handed from one computation to the next."""

from __future__ import annotations

import numpy as np

from distill.bench import limit


def test_a_step_takes_its_longest_computation_or_all_of_them_over_the_cores() -> None:
    balanced, lopsided = {"a": 100.0, "b": 90.0, "c": 50.0}, {"a": 200.0, "b": 20.0, "c": 20.0}
    assert limit.limit_ms(balanced, 2) == 120.0
    assert limit.limit_ms(balanced, 1) == 240.0
    assert limit.limit_ms(lopsided, 2) == 200.0
    assert limit.limit_ms(lopsided, 8) == 200.0


def test_completions_of_a_batch_lie_behind_their_prompts() -> None:
    prompts = [[5, 6], [7]]
    generated = [[[1, 2], [-0.5, -0.25]], [[3], [-1.0]], [[9, 9], [0.0, 0.0]]]
    made = limit.completions(prompts, generated, k=2)
    assert made.tokens.tolist() == [5, 6, 1, 2, 7, 3]
    assert (made.prompt_B.tolist(), made.completion_B.tolist()) == ([2, 1], [2, 1])
    assert made.logp_C.tolist() == [-0.5, -0.25, -1.0]
    assert made.topk_CK is not None
    assert made.topk_CK.tolist() == [[0, 1]] * 3
    assert made.topk_CK.dtype == np.int32
    assert limit.completions(prompts, generated, k=0).topk_CK is None


def test_the_table_names_every_computation_and_the_limit() -> None:
    costs = {"generate": 200.0, "score": 50.0, "train": 70.0}
    report = {"ms": costs, "cores": 2, "limit_ms": 200.0, "rollouts": 128, "completion_tokens": 1024}
    assert limit.table(report).splitlines()[-5:] == [
        "| vLLM, offline | 200 |",
        "| teacher, forward | 50 |",
        "| student, step | 70 |",
        "| all three | 320 |",
        "| limit of a step on 2 cores | **200** |",
    ]
