"""Which prompts the teacher completes; the rest of their path is in test_controller."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distill.record.record import is_teacher_turn
from distill.scoring import seed_of


@given(seed=st.integers(0, 9), batch=st.integers(1, 40), on_policy=st.floats(0, 1))
def test_of_every_batch_of_numbers_the_teacher_has_its_share(seed: int, batch: int, on_policy: float) -> None:
    chosen = [is_teacher_turn(number, seed, batch, on_policy) for number in range(20 * batch)]
    expected = (1 - on_policy) * batch
    for block in range(20):
        assert abs(sum(chosen[block * batch : (block + 1) * batch]) - expected) < 1 + 1e-6
    assert abs(sum(chosen) - 20 * expected) < 1 + 1e-6


def test_the_choice_and_the_completions_depend_on_the_seed() -> None:
    one, other = ([is_teacher_turn(number, seed, 64, 0.5) for number in range(640)] for seed in (0, 1))
    assert one != other
    assert len({seed_of(seed, number) for seed in (0, 1) for number in range(500)}) == 1000
