"""A teacher with a tokenizer of its own: segments, their scores, and the gradient that they give."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from distill.prompts.stream import Prompt
from distill.translation import TextTeacher, Translation, read
from student_trainer.objectives.divergences import (
    Discount,
    Objective,
    Targets,
    at,
    future_credit,
    hybrid,
    sampled,
)
from sync import wire
from sync.base.errors import DataError
from sync.base.tokenizers import OTHER, first_bytes, token_bytes
from sync.wire import Scored, ScoreRefused, ScoreSequence, Segment, TeacherCompletion, Want, pack, unpack
from teacher_service.client import Reply

END = "<end>"


def tokenizer_of(model: models.Model, decoder: Any, splits: Any = None) -> Any:
    """It ends at END; `splits`: how text is cut before the model sees it, at no place without."""
    core = Tokenizer(model)
    core.decoder = decoder
    if splits is not None:
        core.pre_tokenizer = splits
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def numbered(*tokens: str) -> dict[str, int]:
    return {token: id_ for id_, token in enumerate(tokens)}


def words(*vocabulary: str) -> Any:
    """Tokens that are texts; text is cut into its characters."""
    model = models.WordLevel(numbered(*vocabulary, END), vocabulary[0])
    return tokenizer_of(model, decoders.Fuse(), pre_tokenizers.Split(Regex("."), "isolated"))


def merged(letters: str, *merges: tuple[str, str]) -> Any:
    """BPE of whole texts."""
    tokens = numbered(*letters, *map("".join, merges), END)
    return tokenizer_of(models.BPE(tokens, [*merges]), decoders.Fuse())


def pieces(merges: list[tuple[str, str]], by_words: bool = False) -> Any:
    """Byte-level BPE with these merges; its last token ends a completion. `by_words`: GPT-2's rules first."""
    tokens = numbered(*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges))
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    return tokenizer_of(models.BPE(tokens, merges), decoders.ByteLevel(), splits)


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
    wordpiece = words("a")
    wordpiece.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match="decodes by WordPiece"):
        translation(FRENCH, wordpiece)


# --- the teacher's most likely tokens


def most_likely(teacher: Any, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log q of each of the teacher's positions [M, K], which follow from the ids before."""
    size = len(token_bytes(teacher))
    rows = [np.random.default_rng([7, *ids[:place]]).normal(size=size) for place in range(len(ids))]
    logq_MV = np.array(rows).reshape(-1, size)
    logq_MV -= np.log(np.exp(logq_MV).sum(1, keepdims=True))
    topk_MK = logq_MV.argsort(axis=1)[:, ::-1][:, :k].astype("i4")
    return topk_MK, np.take_along_axis(logq_MV, topk_MK, 1)


def support(both: Translation, teacher: Any, ids: list[int], k: int) -> tuple[np.ndarray, ...]:
    aligned = both.completion(ids)
    return both.support(ids, aligned, *most_likely(teacher, aligned.sent(Want(topk=1)), k))


def test_the_teachers_ids_become_the_students_of_the_same_text() -> None:
    """ "he" and "the" are no tokens to the other, é is one to the French alone; ends are ends."""
    both = translation(ENGLISH, FRENCH)
    shared = {id_: other for id_, other in enumerate(both.shared.tolist()) if other >= 0}
    assert len(shared) == 256 + 1
    assert shared[FRENCH.eos_token_id] == ENGLISH.eos_token_id
    assert all(token_bytes(FRENCH)[id_] == token_bytes(ENGLISH)[other] for id_, other in shared.items())


def test_s_stands_where_the_teacher_parts_a_text_whatever_follows() -> None:
    """ "le" and " t" are French tokens: an e behind "l" may go on its segment, nothing does behind "x"."""
    student = pieces([])
    both = translation(student, FRENCH)
    ids = ids_of(student, "lx e t", ended=False)
    ids_LK, _, parted_LB = support(both, FRENCH, ids, len(token_bytes(FRENCH)))
    kept = [{*row.tolist()} - {-1} for row in ids_LK]
    (e, x, t), end = ids_of(student, "ext", ended=False), student.eos_token_id
    assert len(kept[0]) == 257  # of all tokens, at the beginning
    assert kept[1] >= {x, t, end}
    assert e not in kept[1]
    assert kept[2] >= {e, x, t, end}
    assert kept[3] == {end}  # behind white space
    assert kept[5] == set(), "within ' t'"
    assert parted_LB.any(1).tolist() == [True, True, True, False, True, False]


@cache
def parting(kind: str) -> tuple[Any, Translation]:
    """A teacher and the translation to it."""
    merges = [("h", "e"), ("l", "e"), ("Ġ", "t"), ("Ġ", "Ġ"), ("Ã", "©"), ("ï", "¿"), ("e", "!")]
    teacher = FRENCH if kind == "plain" else pieces(merges, kind == "by_words")
    return teacher, translation(ENGLISH, teacher)


@given(
    st.lists(st.integers(0, 260), max_size=6),
    st.lists(st.integers(0, 260), max_size=4),
    st.lists(st.integers(0, 260), max_size=4),
    st.sampled_from(["plain", "by_words", "spaces"]),
    st.data(),
)
def test_every_token_in_g_has_the_same_s_whatever_follows(
    before: list[int], one: list[int], other: list[int], kind: str, data: st.DataObject
) -> None:
    """What the gradient's proof rests on."""
    teacher, both = parting(kind)
    ids = [*before, *one, ENGLISH.eos_token_id]
    place, first = len(before), first_bytes(ENGLISH, [ENGLISH.eos_token_id])
    here = [array[place].tolist() for array in support(both, teacher, ids, 80)]
    parted = np.unpackbits(np.array(here[2], "u1"))[first]
    assume(parted[ids[place]])
    chosen = int(data.draw(st.sampled_from(np.flatnonzero(parted))))
    tail = [*other, ENGLISH.eos_token_id][: data.draw(st.integers(0, 5))]
    changed = [*before, chosen, *(tail if chosen != ENGLISH.eos_token_id else [])]
    assert [array[place].tolist() for array in support(both, teacher, changed, 80)] == here
    assert parted[[id_ for id_ in here[0] if id_ >= 0]].all()


# --- the teacher's client


class Given(TextTeacher):
    """Log-probabilities of the teacher's ids are -1, -2, …, of its end -1/2, -1, …; it writes `written`."""

    written: TeacherCompletion

    async def score_ids(self, sequences: Any, want: Want = Want(), limit: Any = None) -> Any:
        self.sequences = sequences
        return Reply([self._scored(asked, want.topk) for asked in sequences], "here")

    async def generate_ids(self, prompts: Any, max_tokens: int, ends: Any = (), **options: Any) -> Any:
        self.ends = ends
        return Reply([self.written], "here")

    def _scored(self, asked: ScoreSequence, k: int) -> Scored:
        count = asked.token_ids.shape[0] - asked.start
        logprob = -np.arange(1, 1 + count, dtype="f4")
        topk = np.full((count, k), self.translation.end, "i4"), np.tile(logprob[:, None] / 2, k)
        return Scored(asked.id, pack(logprob), *(map(pack, topk) if k else ()))


def client_of(student: Any, teacher: Any) -> Given:
    return Given(translation(student, teacher), "teacher", ["http://127.0.0.1:1"])


def asked(name: str, ids: list[int], prompt: list[int]) -> ScoreSequence:
    return ScoreSequence.of(name, pack(np.array(prompt, "i4")), pack(np.array(ids, "i4")))


async def test_a_teacher_is_sent_its_own_ids_behind_the_prompt_that_it_sees() -> None:
    client = client_of(FRENCH, ENGLISH)
    completions = {"good": ids_of(FRENCH, " the"), "cut": ids_of(FRENCH, "a", ended=False)}
    sequences = [asked(name, ids, [7, 8]) for name, ids in completions.items()]
    (good, cut), _ = await client.score(sequences, Want(entropy=True))
    (sent,) = client.sequences  # of "cut" nothing is left to ask about
    assert ENGLISH.decode(unpack(sent.token_ids)[2:].tolist()) == f" the{END}"
    assert unpack(good.logprob).tolist() == [0, -1, -2]
    assert unpack(cut.segment).tolist() == [Segment.UNSCORED]


async def test_of_the_teachers_ids_the_students_come_back_at_each_beginning_of_a_segment() -> None:
    """Of what a limit cut off the distribution is known, not the score."""
    sequence = asked("id", ids_of(FRENCH, "e the", ended=False), [7])
    ((scored,), _) = await client_of(FRENCH, ENGLISH).score([sequence], Want(topk=1))
    assert not wire.checks.scored(scored, 3, 0, Want(topk=1), len(token_bytes(FRENCH)))
    assert unpack(scored.segment).tolist() == [Segment.BEGINS, Segment.UNSCORED, Segment.UNSCORED]
    assert unpack(scored.topk_ids).tolist() == [[FRENCH.eos_token_id], [FRENCH.eos_token_id], [-1]]
    assert unpack(scored.topk_logprob).tolist() == [[-0.5], [-1.0], [0]]
    assert unpack(scored.parted).any(1).tolist() == [True, True, False]


async def completed(student: Any, text: str, limit: int, reason: Any = "stop") -> Any:
    """What becomes of a completion of the English teacher, with log-probabilities -1, -2, …"""
    client = client_of(student, ENGLISH)
    ids = ids_of(ENGLISH, text, ended=reason == "stop")
    logprob = pack(-np.arange(1, 1 + len(ids), dtype="f4"))
    client.written = TeacherCompletion("id", pack(np.array(ids, "i4")), logprob, reason)
    prompt = wire.TeacherPrompt("id", pack(np.array([7], "i4")), 0)
    ((answer,), _) = await client.generate([prompt], limit, [student.eos_token_id])
    return answer, client.ends


async def test_a_completion_of_the_teachers_comes_back_in_the_students_ids() -> None:
    """Ġthe|ing|end is Ġt|he|i|ng|end, the first token as long as two and so the second: -1 | -2 | -3."""
    answer, ends = await completed(FRENCH, " theing", 8)
    assert FRENCH.convert_ids_to_tokens(unpack(answer.token_ids).tolist()) == ["Ġt", "he", "i", "ng", END]
    assert unpack(answer.logprob).tolist() == [0, -1, 0, -2, -3]
    assert (answer.finish_reason, ends) == ("stop", [ENGLISH.eos_token_id])


@pytest.mark.parametrize(("limit", "reason"), [(3, "stop"), (8, "length")])
async def test_of_a_completion_that_is_too_long_whole_segments_come_back(limit: int, reason: str) -> None:
    answer, _ = await completed(FRENCH, " theing", limit, reason)
    assert FRENCH.convert_ids_to_tokens(unpack(answer.token_ids).tolist()) == ["Ġt", "he"]
    assert (unpack(answer.logprob).tolist(), answer.finish_reason) == ([0, -1], "length")


async def test_a_completion_that_the_student_cannot_write_is_refused() -> None:
    answer, _ = await completed(words("a"), "x", 8)
    assert answer.no_text
    assert isinstance((await completed(FRENCH, " the", 1, "length"))[0], ScoreRefused)


async def test_text_that_the_teacher_cannot_have_is_refused_alone() -> None:
    sequences = [asked(text, ids_of(FRENCH, text), [7]) for text in "xa"]
    (refused, good), _ = await client_of(FRENCH, words("a")).score(sequences)
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


UNCAPPED: Any = {"rho_cap": None, "drop_rho_outside": None}
SAMPLED, HYBRID = partial(sampled, **UNCAPPED), partial(hybrid, **UNCAPPED)


def loss_of(divergence: Objective, gamma: float, logp_CV: Tensor, goal: Targets) -> Tensor:
    """Of a completion, whose tokens are credited with what comes later."""
    own_C = at(logp_CV.detach(), goal.token_N)
    factor_C = Discount(gamma, None, None).factor(own_C, goal)
    future_C = future_credit(own_C - goal.teacher_logp_N, factor_C, torch.zeros_like(goal.token_N))
    return divergence(logp_CV, Targets(**{**vars(goal), "future_N": future_C}))[0].sum()


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
        goes_on_C = torch.tensor(aligned.segment == Segment.GOES_ON)
        fresh_C = torch.ones(len(ids), dtype=torch.bool)
        goal = Targets(token_C, own_C.detach(), teacher_C, fresh_C, goes_on_N=goes_on_C)
        losses.append(chance.detach() * loss_of(SAMPLED, 1.0, logp[states], goal))
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


def by_support(scored: tuple[Tensor, ...], support: tuple[Any, ...], first: Any, **more: Tensor) -> Targets:
    """Of fresh y, log μ(y) and log q(y); of the teacher's ids, their log q and the bytes that it parts at."""
    ids_NK, logq_NK, parted_NB = support
    return Targets(
        *scored,
        fresh_N=torch.ones_like(scored[0], dtype=torch.bool),
        support_NK=torch.as_tensor(ids_NK).long(),
        support_logp_NK=torch.as_tensor(logq_NK),
        by_text_N=torch.ones_like(scored[0], dtype=torch.bool),
        parted_NB=torch.as_tensor(parted_NB),
        first_V=torch.as_tensor(first),
        **more,
    )


def gradient(student: Any, teacher: Any, divergence: Objective, gamma: float, stale: bool) -> Tensor:
    """The expected gradient where completions are cut off after LONGEST tokens; all are enumerated."""
    both, last = translation(student, teacher), student.eos_token_id
    first = first_bytes(student, [last])
    texts = [ids for ids in itertools.product(range(last + 1), repeat=LONGEST) if last not in ids[:-1]]
    for size in range(LONGEST - 1):
        texts += [(*ids, last) for ids in itertools.product(range(last), repeat=size)]
    prefixes = {ids[:place]: 0 for ids in texts for place in range(len(ids))}
    prefixes = {prefix: place for place, prefix in enumerate(prefixes)}
    live = policy(1, len(prefixes), last + 1).requires_grad_()
    logmu = policy(2 if stale else 1, len(prefixes), last + 1).log_softmax(1)
    losses = []
    for ids in texts:
        states, token_C = [prefixes[ids[:place]] for place in range(len(ids))], torch.tensor(ids)
        aligned, logp = both.completion(ids), live.log_softmax(1)[states]
        sent = aligned.sent(Want(topk=1))
        topk_MK, logq_MK = most_likely(teacher, sent, len(both.shared))
        logq_M = (logq_MK * (topk_MK == sent[:, None])).sum(1)[: len(aligned.token_ids)]
        behavior_C = at(logmu[states], token_C)
        segment_C = torch.tensor(aligned.segment)
        teacher_C = torch.tensor(aligned.scores(logq_M).astype("f8"))
        ids_CK, logq_CK, bits_CB = both.support(ids, aligned, topk_MK[:, :2], logq_MK[:, :2])
        teacher_C = torch.where(segment_C == Segment.UNSCORED, behavior_C, teacher_C)
        parted_CB = np.unpackbits(bits_CB, axis=1, count=OTHER + 1).astype(bool)
        scored, support = (token_C, behavior_C, teacher_C), (ids_CK, logq_CK, parted_CB)
        goal = by_support(scored, support, first, goes_on_N=segment_C == Segment.GOES_ON)
        losses.append(behavior_C.sum().exp() * loss_of(divergence, gamma, logp, goal))
    (total,) = torch.autograd.grad(torch.stack(losses).sum(), live)
    return total


PAIRS = {
    "the teacher joins letters": (words("a", "b", "c"), merged("cba", ("b", "c"))),
    "each joins others": (words("a", "b", "ba"), merged("ba", ("a", "b"))),
    "both join the same": (words("a", "b", "ab"), merged("ba", ("a", "b"))),
    "the student joins letters": (words("a", "b", "ab"), words("b", "a")),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("gamma", "stale"), [(1.0, False), (0.0, False), (0.5, True)])
def test_the_hybrid_has_the_expected_gradient_of_the_sampled_objective(
    pair: str, gamma: float, stale: bool
) -> None:
    """Which is that of the divergence between texts (γ = 1). So too where completions are cut off."""
    exact, dense = (gradient(*PAIRS[pair], divergence, gamma, stale) for divergence in (SAMPLED, HYBRID))
    assert float((dense - exact).abs().max()) < 1e-12 < float(exact.abs().max())


def test_the_hybrid_gives_no_loss_where_the_teacher_is_the_student_with_other_ids() -> None:
    """Of four tokens in G two are in S; the teacher's third is not of G."""
    logq = policy(1, 1, 5).log_softmax(1)
    support_NK, parted_NB = torch.tensor([[1, 3, -1]]), torch.tensor([[True, True, True, True, False]])
    for y in range(5):
        support = support_NK, logq[:, [1, 3, 4]], parted_NB & (y < 4)
        goal = by_support((torch.tensor([y]), logq[:, y], logq[:, y]), support, torch.arange(5))
        live = policy(1, 1, 5).requires_grad_()
        loss_N, stats = HYBRID(live.log_softmax(1), goal)
        (slope,) = torch.autograd.grad(loss_N.sum(), live)
        values = torch.cat([loss_N.detach(), slope[0], stats["reverse_kl"]])
        assert float(values.abs().max()) < 1e-15


@pytest.mark.parametrize("y", range(5))
def test_a_token_of_a_teacher_with_the_students_ids_has_its_own_loss_in_a_batch_with_text(y: int) -> None:
    """Its sums are over all tokens, with no bytes parted; an id of -1 has no share of q."""
    logmu, logq = (policy(seed, 1, 5).log_softmax(1) for seed in (1, 2))
    support = torch.tensor([[1, 3, -1]]), logq[:, [1, 3, 4]], torch.zeros(1, 5, dtype=torch.bool)
    mixed = by_support((torch.tensor([y]), logmu[:, y], logq[:, y]), support, torch.arange(5))
    mixed = replace(mixed, by_text_N=torch.tensor([False]))
    found = []
    for goal in (mixed, replace(mixed, by_text_N=None, parted_NB=None, first_V=None)):
        live = policy(3, 1, 5).requires_grad_()
        loss_N, stats = HYBRID(live.log_softmax(1), goal)
        (slope,) = torch.autograd.grad(loss_N.sum(), live)
        found.append([*loss_N.tolist(), *slope[0].tolist(), *stats["reverse_kl"].tolist()])
    assert found[0] == found[1]
