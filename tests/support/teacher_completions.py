"""Completions that a teacher generates, compared with its own scores of them."""

from __future__ import annotations

import numpy as np

from sync.wire import Scored, ScoreSequence, TeacherCompletion, TeacherPrompt, Want, pack, unpack
from teacher_service.client import TeacherClient

END, STOP, PROMPTS, MAX_TOKENS = 0, 3, 6, 8


async def check_completions_score_alike(client: TeacherClient, vocab: int) -> None:
    """Log-probabilities are those of scoring, the seed alone decides, an end is the last id and no other."""
    rng = np.random.default_rng(5)
    prompts = [
        TeacherPrompt(str(i), pack(rng.integers(1, vocab, 2 + i).astype(np.int32)), 10 + i)
        for i in range(PROMPTS)
    ]
    results, _ = await client.generate(prompts, MAX_TOKENS, [STOP])
    texts = [one for one in results if isinstance(one, TeacherCompletion)]
    assert [text.id for text in texts] == [prompt.id for prompt in prompts]
    ((alone,), _) = await client.generate(prompts[4:5], MAX_TOKENS, [STOP])
    assert isinstance(alone, TeacherCompletion)
    assert alone.token_ids == texts[4].token_ids
    wholes = [
        ScoreSequence(
            prompt.id, pack(np.concatenate([unpack(prompt.token_ids), unpack(text.token_ids)])), 2 + i
        )
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    for text, mark in zip(texts, (await client.score(wholes, Want())).results, strict=True):
        assert isinstance(mark, Scored)
        np.testing.assert_allclose(unpack(text.logprob), unpack(mark.logprob), atol=1e-4)
        ids = unpack(text.token_ids).tolist()
        assert (text.finish_reason == "stop") == (ids[-1] in (END, STOP))
        assert not {END, STOP} & set(ids[:-1])
