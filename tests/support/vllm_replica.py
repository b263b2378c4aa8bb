"""A real vLLM replica for integration tests: its process, tiny models for it, and how to talk to it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import psutil
import torch
import waiting
from flat_tensors import buckets_of, plan_of
from forked import start
from ports import free_port, healthy
from published import publisher_of_folder
from tiny_models import language_model, save_words

from distill.config import StudentConfig
from distill.launch.replica_command import command
from sync import wire
from sync.base.address import TOKEN_VARIABLE
from sync.base.settings import ReplicaConfig
from sync.weights.broadcast import BroadcastSender
from sync.weights.snapshots import checkpoint
from sync.weights.stores.store import DirectoryStore
from sync.wire import Generated, ReplicaState, UpdateReply, Version
from sync.wire.client import Peer

BROADCAST_SECONDS = 60
"""What bounds a wait of a broadcast, on both sides, as in a run."""
AMX = str(Path(__file__).parent / "amx")
"""Folder whose sitecustomize simulates the processor."""
TOKEN, VOCABULARY, CONTEXT = "a token of the tests", 64, 512
EXPERTS, CHOSEN = 16, 4


def save_model(kind: str, seed: int, folder: Path, end: bool = False, padding: int = 0, **more: Any) -> None:
    """About 0.1 M parameters in bf16, and a tokenizer of the words w0, w1, …

    Without `end` it has no end token, so that lengths are known; with it, w1 is. `padding`: rows of the model
    beyond the tokenizer's words. `more`: further fields of its configuration.
    """
    end_ids = {"bos_token_id": None, "eos_token_id": 1 if end else None}
    size = {"vocab_size": VOCABULARY + padding, "max_position_embeddings": CONTEXT, "initializer_range": 0.1}
    model = language_model(kind, seed, **size, **end_ids, tie_word_embeddings=kind != "Llama", **more)
    for name, parameter in model.to(torch.bfloat16).named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    special = {"eos_token": "w1", "pad_token": "w0"} if end else {}
    save_words(folder, (f"w{i}" for i in range(VOCABULARY)), **special)


def save_experts(work: Path, **more: Any) -> list[Path]:
    """Two folders: models of EXPERTS experts, CHOSEN for each token, as `save_model` saves one."""
    more |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
    folders = [work / "first", work / "second"]
    for seed, folder in enumerate(folders):
        save_model("Qwen3Moe", seed, folder, norm_topk_prob=True, **more)
    return folders


class Versions:
    """Steps 1, 2, … of lineage 1 in a directory store; step i holds the weights of folder i - 1."""

    def __init__(self, store: Path, folders: list[Path], kind: Literal["full", "lora"] = "full") -> None:
        """`kind`: of every anchor; adapters are anchors alone."""
        self.folders, self.store_path = folders, store
        publisher = publisher_of_folder(DirectoryStore(store), folders[0])
        for step, folder in enumerate(folders, 1):
            bits = checkpoint.bits(checkpoint.tensors(folder))
            if step == 1 or kind == "lora":
                publisher.anchor(Version(1, step), None, folder, bits, kind)
            else:
                publisher.delta(Version(1, step), bits)


class Server:
    """A vLLM server process whose attention finds a processor with AMX; leaving the context ends it."""

    def __init__(
        self,
        model: Path,
        work: Path,
        index: int,
        lora_rank: int | None = None,
        routes: bool = False,
        engine_args: dict[str, Any] | None = None,
        **student: Any,
    ) -> None:
        """`student`: further fields of its [student]; `engine_args` add to those of all tests."""
        port = free_port()
        own = {"enforce-eager": True, "max-model-len": CONTEXT, "kv-cache-memory-bytes": 1 << 26}
        config = StudentConfig(path=str(model), engine_args=own | (engine_args or {}), **student)
        replica = ReplicaConfig(
            run="tests",
            store_path=work / "store",
            mirror=work / f"mirror-{index}",
            timeout_seconds=BROADCAST_SECONDS,
            lora_rank=lora_rank,
            routes=routes,
        )
        line, environment = command(config, replica, index, "127.0.0.1", port)
        self.mirror, self.store = replica.mirror, replica.store_path
        self.url = f"http://127.0.0.1:{port}"
        self.log = work / f"server-{index}.log"
        environment["PYTHONPATH"] = os.pathsep.join([AMX, os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as log:
            self.process = start(line, os.environ | environment | {TOKEN_VARIABLE: TOKEN}, log)

    def wait(self) -> None:
        waiting.until(
            lambda: healthy(self.url), 1200, lambda: self.log.read_text()[-3000:], self.process, 0.2
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        family = (
            psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        )
        self.process.terminate()
        try:
            self.process.wait(600)
        finally:
            _, alive = psutil.wait_procs(family, 60)
            for orphan in alive:
                orphan.kill()
        assert not alive, "the server left children behind"

    def peer(self) -> Peer:
        return Peer(self.url, TOKEN)


async def generate(peer: Peer, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """Generated or GenerateFailed of every prompt, in their order."""
    request = wire.GenerateRequest(
        sampling=wire.Sampling(**sampling),
        prompts=[wire.GeneratePrompt(str(i), p) for i, p in enumerate(prompts)],
    )
    kind: Any = Generated | wire.GenerateFailed
    answers = [answer async for answer in peer.stream("/distill/v1/generate", request, kind)]
    assert sorted(answer.id for answer in answers) == sorted(str(i) for i in range(len(prompts)))
    return sorted(answers, key=lambda answer: int(answer.id))


async def until(peer: Peer, holds: Callable[[ReplicaState], bool]) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + 600
    while not holds(await peer.call("/distill/v1/state", None, ReplicaState)):
        assert time.monotonic() < deadline, "the replica never came to the state that was waited for"
        await asyncio.sleep(0.01)


async def more_tokens(peer: Peer, flight: asyncio.Task[Any], count: int = 4) -> None:
    """Until the replica has generated so many more, or `flight` has ended."""
    before = (await peer.call("/distill/v1/state", None, ReplicaState)).tokens
    await until(peer, lambda state: flight.done() or (state.tokens or 0) >= before + count)


async def generate_across(
    peer: Peer, prompts: list[list[int]], updates: list[Callable[[], Awaitable[Any]]], **sampling: Any
) -> list[Generated]:
    """What requests that are in flight at each of `updates` are answered, by weights of all of them.

    Where this process has to wait for a processor they may have ended before: then again.
    """
    for _ in range(10):
        flight = asyncio.create_task(generate(peer, prompts, **sampling))
        for one in updates:
            await more_tokens(peer, flight)
            await one()
        answers = await flight
        if all(len(answer.spans) > len(updates) for answer in answers):
            return answers
    raise AssertionError(f"ten times requests ended before {len(updates)} updates: {answers[0].spans}")


async def update(peer: Peer, step: int, **options: Any) -> UpdateReply:
    request = wire.UpdateRequest(version=Version(1, step), **options)
    return await peer.call("/distill/v1/update", request, UpdateReply)


async def broadcast(
    peer: Peer, folder: Path, step: int, workers: int = 1, keep: Callable[[str], bool] = lambda name: True
) -> UpdateReply:
    """Bring a replica to version `step` by a broadcast of those tensors of a folder that are to be kept."""
    weights = {name: tensor for name, tensor in checkpoint.read_folder(folder) if keep(name)}
    settings = folder / "adapter_config.json"
    plan = plan_of(weights, adapter_config=settings.read_text() if settings.is_file() else None)
    sender, group = BroadcastSender("127.0.0.1", timeout=BROADCAST_SECONDS, token=TOKEN), f"group-{step}"
    ticket = wire.BroadcastTicket(sender.address, group, 1, 1 + workers)
    answer = asyncio.create_task(update(peer, step, broadcast=ticket))
    try:
        audience = wire.Audience(group=group, world_size=1 + workers)
        await asyncio.to_thread(sender.send, audience, plan, buckets_of(plan, weights))
        reply = await answer
        assert reply.bytes_read >= workers * sum(tensor.nbytes for tensor in weights.values())
        return reply
    finally:
        sender.close()


async def prompt_logprobs(server: Server, sequences: list[list[int]], model: str | None = None) -> list[Any]:
    """vLLM's own prompt log-probabilities, one sequence at a time; `model` None: the base."""
    out = []
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=120) as client:
        name = model or (await client.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
        for tokens in sequences:
            body = {"model": name, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 3, "seed": 0}
            response = await client.post(f"{server.url}/v1/completions", json=body)
            out.append(response.raise_for_status().json()["choices"][0]["prompt_logprobs"])
    return out


@torch.no_grad()
def logp_TV(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a transformers model at every completion position."""
    logits = model.eval()(torch.tensor([prompt + completion])).logits[0] / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def distance(
    model: Any, prompt: list[int], answer: wire.Generated, start: int = 0, temperature: float = 1.0
) -> float:
    """Largest, in nats, between the engine's log-probabilities and a model's, from `start` on."""
    tokens = wire.unpack(answer.token_ids).astype(np.int64)
    expected = logp_TV(model, prompt, tokens.tolist(), temperature)[torch.arange(len(tokens)), tokens]
    return float(np.abs(wire.unpack(answer.logprob) - expected.numpy())[start:].max())
