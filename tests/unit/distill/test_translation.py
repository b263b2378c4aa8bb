"""A teacher with a tokenizer of its own: segments, their scores, and the gradient that they give."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.prompts.stream import Prompt
from distill.translation import TextTeacher, Translation, read, token_bytes
from student_trainer.objectives.divergences import Discount, Targets, at, future_credit, sampled
from sync.base.errors import DataError
from sync.wire import Scored, ScoreRefused, ScoreSequence, Segment, Want, pack, unpack
from teacher_service.client import Reply

END = "<end>"


def words(*vocabulary: str, end: str = END) -> Any:
    """Tokens that are texts; text is cut into its characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: id_ for id_, word in enumerate([*vocabulary, end])}
    core = Tokenizer(models.WordLevel(ids, vocabulary[0]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)


def pieces(merges: list[tuple[str, str]]) -> Any:
    """Byte-level BPE with these merges; its last token ends a completion."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    core = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


ENGLISH = pieces([("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("Ġ", "the")])
FRENCH = pieces([("h", "e"), ("n", "g"), ("l", "e"), ("Ġ", "t"), ("Ã", "©")])


def translation(student: Any, teacher: Any) -> Translation:
    return Translation(student, teacher, [student.eos_token_id])


def ids_of(tokenizer: Any, text: str, ended: bool = True) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if ended else ids


# --- segments


def test_segments_are_the_shortest_runs_that_cover_the_same_bytes() -> None:
    """the|ing|end beside  t|he|i|ng|end: no place within " the" is an end to both."""
    aligned = translation(ENGLISH, FRENCH).completion(ids_of(ENGLISH, " theing"))
    assert FRENCH.convert_ids_to_tokens(aligned.token_ids.tolist()) == ["Ġt", "he", "i", "ng", END]
    assert aligned.segment.tolist() == [Segment.BEGINS] * 3
    assert aligned.ends.tolist() == [2, 4, 5]
    assert aligned.scores(np.array([-1, -2, -4, -8, -16.0])).tolist() == [-3, -12, -16]


def test_the_score_of_a_segment_stands_at_its_last_token() -> None:
    aligned = translation(FRENCH, ENGLISH).completion(ids_of(FRENCH, " theing"))
    begins, goes_on = Segment.BEGINS, Segment.GOES_ON
    assert aligned.segment.tolist() == [begins, goes_on, begins, goes_on, begins]
    assert aligned.scores(np.array([-1, -2, -4.0])).tolist() == [0, -1, 0, -2, -4]
    assert aligned.alone().tolist() == [4]


def test_the_last_segment_of_a_completion_that_was_cut_off_is_not_scored() -> None:
    """The teacher's next token might have been one that begins within it."""
    aligned = translation(FRENCH, ENGLISH).completion(ids_of(FRENCH, " the in", ended=False))
    assert ENGLISH.convert_ids_to_tokens(aligned.token_ids.tolist()) == ["Ġthe", "Ġ"]
    *scored, unscored = [*itertools.groupby(aligned.segment.tolist())]
    assert [value for value, _ in scored] == [Segment.BEGINS, Segment.GOES_ON, Segment.BEGINS]
    assert unscored[0] == Segment.UNSCORED


@given(st.lists(st.integers(0, 260), max_size=12), st.booleans())
def test_any_tokens_are_cut_into_segments_that_lose_nothing(sampled_ids: list[int], ended: bool) -> None:
    """Bytes that are no UTF-8 too: the teacher reads replacement characters there."""
    ids = [*sampled_ids, ENGLISH.eos_token_id] if ended else sampled_ids
    aligned = translation(ENGLISH, FRENCH).completion(ids)
    assert len(aligned.segment) == len(ids)
    text = ENGLISH.decode(sampled_ids, clean_up_tokenization_spaces=False)
    read_back = b"".join(token_bytes(FRENCH)[id_] for id_ in aligned.token_ids)
    assert read_back == (text + END).encode() if ended else text.encode().startswith(read_back)
    assert (np.diff(aligned.ends, prepend=0) > 0).all()
    logprob = -np.arange(1.0, 1 + len(aligned.token_ids))
    assert aligned.scores(logprob).sum() == pytest.approx(logprob.sum())
    assert not ids or bool((aligned.segment != Segment.UNSCORED).all()) == ended


def test_places_between_bytes_are_those_of_characters_where_bytes_are_no_text() -> None:
    data = "é".encode() + b"\xff" + b"a" + "🙂".encode()[:2]
    text, places = read(data)
    assert text == "é\ufffda\ufffd"
    assert places.tolist() == [0, 1, 2, -1, -1, 3, 4, -1, -1, 6]


def test_special_tokens_stand_for_themselves_and_ends_for_the_teachers_end() -> None:
    """A name that the teacher has no token for is text, and text that looks like a token stays text."""
    student, teacher = byte_tokenizer(), byte_tokenizer(end="<|endoftext|>")
    ids = ids_of(student, "a")
    aligned = translation(student, teacher).completion(ids)
    assert aligned.token_ids.tolist()[-1] == teacher.convert_tokens_to_ids("<|im_end|>")  # ends its turn
    aligned = translation(student, FRENCH).completion([student.convert_tokens_to_ids("<|im_start|>"), *ids])
    assert FRENCH.decode(aligned.token_ids.tolist()) == f"<|im_start|>a{END}"
    assert len(aligned.ends) == 3
    aligned = translation(FRENCH, student).completion(ids_of(FRENCH, "<|im_end|>"))
    assert len(aligned.token_ids) == len("<|im_end|>") + 1


def test_a_prompt_is_rendered_by_the_teachers_own_template() -> None:
    teacher = byte_tokenizer(template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}>")
    both = translation(byte_tokenizer(), teacher)
    chat = Prompt("0", [5, 6], messages=json.dumps([[{"role": "user", "content": "Hi"}], {}]))
    assert teacher.decode(both.prompt(chat)) == "[Hi]>"
    assert teacher.decode(both.prompt(Prompt("0", [5], text="plain"))) == "plain"


def test_tokenizers_that_change_text_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"changes text: 'x' is 'a' to it"):
        translation(FRENCH, words("a", "b")).completion(ids_of(FRENCH, "x"))
    from tokenizers import decoders

    wordpiece = words("a")
    wordpiece.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match="decodes by WordPiece"):
        translation(FRENCH, wordpiece)


# --- the teacher's client


class Given(TextTeacher):
    """Scores of the teacher's ids are -1, -2, …"""

    async def score_ids(self, sequences: Any, want: Want = Want(), limit: Any = None) -> Any:
        self.sequences = sequences
        results = [
            Scored(asked.id, pack(-np.arange(1, 1 + asked.token_ids.shape[0] - asked.start, dtype="f4")))
            for asked in sequences
        ]
        return Reply(results, "here")


async def test_a_teacher_is_sent_its_own_ids_behind_the_prompt_that_it_sees() -> None:
    client = Given(translation(FRENCH, ENGLISH), "teacher", ["http://127.0.0.1:1"])
    completions = {"good": ids_of(FRENCH, " the"), "cut": ids_of(FRENCH, "a", ended=False)}
    asked = [
        ScoreSequence.of(id_, pack(np.array([7, 8], "i4")), pack(np.array(ids, "i4")))
        for id_, ids in completions.items()
    ]
    (good, cut), _ = await client.score(asked, Want(entropy=True))
    (sent,) = client.sequences  # of "cut" nothing is left to ask about
    assert ENGLISH.decode(unpack(sent.token_ids)[2:].tolist()) == f" the{END}"
    assert unpack(good.logprob).tolist() == [0, -1, -2]
    assert unpack(cut.segment).tolist() == [Segment.UNSCORED]


async def test_text_that_the_teacher_cannot_have_is_refused_alone() -> None:
    client = Given(translation(FRENCH, words("a")), "teacher", ["http://127.0.0.1:1"])
    asked = [
        ScoreSequence.of(text, pack(np.array([7], "i4")), pack(np.array(ids_of(FRENCH, text), "i4")))
        for text in "xa"
    ]
    (refused, good), _ = await client.score(asked)
    assert isinstance(refused, ScoreRefused)
    assert isinstance(good, Scored)


# --- the gradient


STUDENT, LONGEST = words("a", "b", "ab"), 3
"""It can write "ab" in two ways."""


def completions() -> list[tuple[int, ...]]:
    """Every completion: up to LONGEST tokens and the end."""
    return [(*ids, 3) for length in range(LONGEST + 1) for ids in itertools.product(range(3), repeat=length)]


def policy(seed: int, prefixes: int, tokens: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(prefixes, tokens, generator=random, dtype=torch.float64)


def test_segments_give_the_gradient_of_the_divergence_between_texts() -> None:
    """Against autograd through Σ p(y)·(log p(y) − log q(text of y)), all completions enumerated, of a teacher
    that writes every text in one way. With the entropy of the student's ways it is the KL of texts."""
    prefixes = sorted({ids[:i] for ids in completions() for i in range(len(ids))})
    live = policy(1, len(prefixes), 4).requires_grad_()
    last = torch.tensor([len(prefix) == LONGEST for prefix in prefixes])
    only_end = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 0.0], dtype=torch.float64)
    logp = torch.where(last[:, None], only_end, live.log_softmax(1))
    teacher_end, theirs = policy(2, 7, 3).log_softmax(1), translation(STUDENT, words("b", "a"))
    objective, losses, chances, texts = [], [], [], {}
    for ids in completions():
        states = torch.tensor([prefixes.index(ids[:i]) for i in range(len(ids))])
        token_C = torch.tensor(ids)
        aligned = theirs.completion(ids)
        logq_M = np.array([float(teacher_end[i, id_]) for i, id_ in enumerate(aligned.token_ids)])
        teacher_C = torch.tensor(aligned.scores(logq_M), dtype=torch.float64)
        own_C = at(logp[states], token_C)
        chance = own_C.sum().exp()
        objective.append(chance * (own_C.sum() - logq_M.sum()))
        goal = Targets(token_C, own_C.detach(), teacher_C, torch.ones(len(ids), dtype=torch.bool))
        goes_on_C = torch.tensor(aligned.segment == Segment.GOES_ON)
        goal = Targets(**{**vars(goal), "goes_on_N": goes_on_C})
        factor_C = Discount(1.0, None, None).factor(own_C.detach(), goal)
        row_C = torch.zeros(len(ids), dtype=torch.int64)
        future_C = future_credit(own_C.detach() - teacher_C, factor_C, row_C)
        loss_C, _ = sampled(logp[states], Targets(**{**vars(goal), "future_N": future_C}), None, None)
        losses.append(chance.detach() * loss_C.sum())
        chances.append(float(chance.detach()))
        text = STUDENT.decode(ids)
        texts.setdefault(text, []).append((chances[-1], logq_M.sum()))
    (exact,) = torch.autograd.grad(torch.stack(objective).sum(), live, retain_graph=True)
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), live)
    assert float((gradient - exact).abs().max()) < 1e-6  # scores are fp32
    assert sum(chances) == pytest.approx(1)
    kl, entropy = 0.0, 0.0
    for ways in texts.values():
        p = sum(chance for chance, _ in ways)
        kl += p * (np.log(p) - ways[0][1])
        entropy -= sum(chance * np.log(chance / p) for chance, _ in ways if chance)
    assert float(torch.stack(objective).sum().detach()) == pytest.approx(kl - entropy, abs=1e-9)
    assert entropy > 0.05


def test_without_a_discount_a_token_is_credited_with_its_own_segment_alone() -> None:
    """d = 1, 2 | 4, 8 | 16 with γ = 0: 1 + 2, 2 | 4 + 8, 8 | 16."""
    goes_on_C = torch.tensor([False, True, False, True, False])
    zero_C = torch.zeros(5)
    goal = Targets(zero_C.long(), zero_C, zero_C, goes_on_C, goes_on_N=goes_on_C)
    factor_C = Discount(0.0, None, None).factor(zero_C, goal)
    d_C = torch.tensor([1.0, 2, 4, 8, 16])
    future_C = future_credit(d_C, factor_C, zero_C.long())
    assert (d_C + future_C).tolist() == [3, 2, 12, 8, 16]


def test_a_teacher_that_is_the_student_with_other_ids_gives_no_loss() -> None:
    random = np.random.default_rng(0)
    letters = list("abcdefgh")
    student, teacher = words(*letters), words(*random.permutation(letters))
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = [*random.integers(0, 8, 20).tolist(), student.eos_token_id]
    aligned = translation(student, teacher).completion(ids)
    other = {student.convert_ids_to_tokens(id_): logit for id_, logit in enumerate(logits.tolist())}
    theirs = torch.tensor(
        [other[teacher.convert_ids_to_tokens(id_)] for id_ in range(9)], dtype=torch.float64
    )
    scores = aligned.scores(theirs.log_softmax(0).numpy()[aligned.token_ids])
    assert np.abs(scores - logits.log_softmax(0).numpy()[ids]).max() < 1e-6
