"""Figures of how completions read, against numbers counted by hand."""

import numpy as np
import pytest

from distill.evaluation.completions import Completion, Tokens, behaviour, loops


def completion(token_ids: list[int], finish_reason: str) -> Completion:
    tokens = Tokens([1], np.array(token_ids, np.int32), [(0, len(token_ids))])
    return Completion(0, [tokens], finish_reason)


def test_behaviour_is_counted_over_completions_and_their_runs_of_four_tokens() -> None:
    """Lengths 5, 12, 0, 3; of two runs, nine runs of which one differs, none and none."""
    figures = behaviour(
        [
            completion([1, 2, 3, 4, 5], "stop"),
            completion([7] * 12, "length"),
            completion([], "stop"),
            completion([1, 2, 3], "failed"),
        ]
    )
    assert figures.ended == 0.5
    assert figures.length_mean == 5.0
    assert figures.length_p90 == pytest.approx(5 + 0.7 * 7)  # between the third and the last of 0, 3, 5, 12
    assert figures.looping == 0.25
    assert figures.distinct == pytest.approx((2 + 1) / (2 + 9))


def test_only_what_the_student_sampled_counts() -> None:
    tokens = Tokens([1], np.array([1, 2, 9, 9, 9, 3], np.int32), [(0, 2), (5, 6)])
    figures = behaviour([Completion(0, [tokens], "stop")])
    assert (figures.length_mean, figures.distinct) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("token_ids", "is_loop"),
    [
        ([1] * 12, True),
        ([1] * 11, False),
        ([0, 0, *[1, 2, 3, 4] * 3], True),
        ([*[1, 2, 3, 4] * 3, 0], False),
        ([*range(32)] * 3, True),
        ([*range(33)] * 3, False),
        ([*range(40)] * 2, False),
        ([], False),
    ],
)
def test_a_loop_is_the_same_tokens_three_times_at_the_end(token_ids: list[int], is_loop: bool) -> None:
    assert loops(token_ids) == is_loop
