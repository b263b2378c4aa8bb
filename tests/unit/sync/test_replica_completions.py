"""Engine outputs become wire messages; prompts that cannot be completed are named."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from sync.base.errors import DataError, WireError
from sync.vllm.completions import Completion, generated, prompt_problem, ranks
from sync.wire import (
    GeneratePrompt,
    GenerateRequest,
    Sampling,
    Version,
    VersionSpan,
    checks,
    decode,
    encode,
    unpack,
)

VOCABULARY, CONTEXT = 10, 5


def completion(length: int, k: int, reason: str | None = "length", versions=None) -> Completion:
    columns = np.arange(length * (1 + k)).reshape(length, 1 + k)
    return Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprob=-columns.astype(np.float32),
        ids=columns.astype(np.int32),
        versions=[("default", 0, length)] if versions is None else versions,
        finish_reason=reason,
    )


def topk(k: int) -> Sampling:
    return Sampling(max_tokens=5, student_topk=k)


def masked(chances: list[list[float]]) -> Completion:
    """Tokens sampled from the ids of ranks 1 …, by their probabilities; the first of them was."""
    with np.errstate(divide="ignore"):
        ranked = np.log(np.array(chances, np.float32))
    found = completion(len(chances), len(chances[0]))
    return found._replace(logprob=np.concatenate([ranked[:, :1], ranked], 1), token_ids=found.ids[:, 1])


def test_labels_of_versions_become_spans_and_the_engines_own_label_is_step_zero():
    labels = [("default", 0, 3), ("L002-v00000007", 3, 3), ("L002-v00000008", 3, 5)]
    spans = generated("a", completion(5, 0, versions=labels), topk(0)).spans
    assert spans == [VersionSpan(Version(0, 0), 0, 3), VersionSpan(Version(2, 8), 3, 5)]
    with pytest.raises(WireError, match="'new' is not a version"):
        generated("a", completion(5, 0, versions=[("new", 0, 5)]), topk(0))


@pytest.mark.parametrize(
    "labels",
    [[], [("default", 0, 4)], [("default", 1, 5)], [("default", 0, 2), ("default", 3, 5)]],
)
def test_spans_that_do_not_cover_every_token_once_are_told_and_refused(labels):
    answer = generated("a", completion(5, 0, versions=labels), topk(0))
    assert "contiguous from 0 to 5" in str(checks.generated(answer, topk(0), 10))


@pytest.mark.parametrize(
    ("tokens", "routes_from", "says"),
    [([], 0, "no tokens"), ([10], 0, "10"), ([3, -1], 0, "-1"), ([1] * 5, 0, "5 tokens")]
    + [([1, 2], first, f"routes_from is {first} and the prompt has 2 tokens") for first in (-1, 2)]
    + [([0, 9, 1, 2], first, None) for first in (0, 3)],
)
def test_prompts_that_cannot_be_completed_are_named(tokens, routes_from, says):
    problem = prompt_problem(GeneratePrompt("a", tokens, routes_from=routes_from), VOCABULARY, CONTEXT)
    assert problem is None if says is None else says in problem


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (Sampling(max_tokens=0), r"`int` >= 1 - at `\$\.sampling\.max_tokens`, which is 0"),
        (Sampling(max_tokens=1, temperature=0.0), r"`float` > 0\.0 - at `\$\.sampling\.temperature`"),
        (Sampling(max_tokens=1, temperature=math.nan), r"sampling\.temperature`, which is nan"),
        (Sampling(max_tokens=1, top_p=1.5), r"`float` <= 1\.0 - at `\$\.sampling\.top_p`, which is 1\.5"),
        (Sampling(max_tokens=1, student_topk=-1), r"sampling\.student_topk`, which is -1"),
        (Sampling(max_tokens=1, top_k=-1), r"sampling\.top_k`, which is -1"),
        (Sampling(max_tokens=1, min_p=1.5), r"sampling\.min_p`, which is 1\.5"),
        (Sampling(max_tokens=1, max_seconds=0.0), r"sampling\.max_seconds`, which is 0"),
    ],
)
def test_impossible_sampling_is_named(sampling, says):
    with pytest.raises(WireError, match=says):
        decode(encode(GenerateRequest(sampling=sampling, prompts=[])), GenerateRequest)


def test_the_first_column_is_the_sampled_token_and_the_others_are_the_topk():
    answer = generated("a", completion(3, 2), topk(2))
    assert unpack(answer.logprob).tolist() == [0, -3, -6]
    assert unpack(answer.topk_ids).tolist() == [[1, 2], [4, 5], [7, 8]]
    assert generated("a", completion(3, 0), topk(0)).topk_ids is None


def test_ids_without_probability_and_columns_beyond_the_vocabulary_are_minus_one():
    found = completion(2, 2)
    found.logprob[1, 2] = -np.inf
    answer = generated("a", found, topk(4))
    assert unpack(answer.topk_ids).tolist() == [[1, 2, -1, -1], [4, -1, -1, -1]]


def test_a_mask_holds_the_ids_that_were_left_most_likely_first():
    found, sampling = masked([[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0]]), Sampling(5, top_k=3, mask=True)
    answer = generated("a", found, sampling)
    assert unpack(answer.mask.sizes).tolist() == [3, 1]
    assert unpack(answer.mask.ids).tolist() == [1, 2, 3, 6]
    assert generated("a", found, replace(sampling, student_topk=2)).topk_ids.shape == (2, 2)
    empty = generated("a", completion(0, 4, "abort", []), sampling)
    assert empty.mask.sizes.shape == empty.mask.ids.shape == (0,)


def test_a_mask_that_is_not_complete_is_refused():
    with pytest.raises(DataError, match=r"hold 0\.9500 of what it was sampled from"):
        generated("a", masked([[0.5, 0.3, 0.15, 0.0]]), Sampling(5, top_k=3, mask=True))


def test_ties_at_the_least_logit_of_a_mask_are_asked_for():
    with pytest.raises(ValueError, match="top_k is 0: set it, for it bounds the mask"):
        Sampling(5, mask=True)
    assert ranks(Sampling(5, top_k=20, mask=True), 1000) > 20
    assert ranks(Sampling(5, top_k=20, mask=True), 24) == 24
    assert ranks(Sampling(5, top_k=20), 1000) == 0
    assert ranks(Sampling(5, top_k=2, mask=True, student_topk=64), 1000) == 64


def test_an_aborted_completion_may_be_empty_and_nothing_else_may():
    assert generated("a", completion(2, 0, "time"), topk(0)).finish_reason == "time"
    assert generated("a", completion(0, 0, "time", []), topk(0)).token_ids.shape == (0,)
    assert unpack(generated("a", completion(0, 2, "abort", []), topk(2)).topk_ids).shape == (0, 2)
    with pytest.raises(DataError, match="after 0 tokens: 'stop'"):
        generated("a", completion(0, 0, "stop", []), topk(0))


@pytest.mark.parametrize("reason", [None, "error", "repetition"])
def test_an_end_that_is_no_completion_is_a_failure_with_its_reason(reason):
    with pytest.raises(DataError, match=repr(reason)):
        generated("a", completion(3, 0, reason), topk(0))
