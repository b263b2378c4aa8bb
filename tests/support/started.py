"""A record and a controller that go on from what is in their store's folder."""

from __future__ import annotations

from distill.buffer import Rules
from distill.config import RunConfig
from distill.controller import Controller
from distill.interfaces import Components, Hooks
from distill.prompts.stream import PromptStream
from distill.record.record import Record
from distill.record.resume import Start, resume
from distill.record.store import Store


def begun(store: Store, prompts: PromptStream, rules: Rules, run: str = "r", seed: int = 0) -> Record:
    return Record(store, prompts, resume(store.folder, Start(run, seed, rules, prompts), store.connection))


def controlled(
    config: RunConfig, parts: Components, hooks: Hooks = Hooks(), token: str | None = None
) -> Controller:
    start = Start.of(config, parts.prompts)
    goes_on = resume(parts.store.folder, start, parts.store.connection)
    return Controller(config, parts, goes_on, hooks, token)
