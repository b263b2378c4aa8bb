"""A whole LoRA run with real engines, and a replica that follows adapters: in flight, digests, equality."""

import contextlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from flat_tensors import digests
from forked import output_of
from huggingface_hub import ModelCard
from ports import free_port
from run_on_words import ROOT, over, prepare
from safetensors.torch import load_file, save_file
from vllm_replica import (
    Server,
    broadcast,
    generate,
    generate_across,
    prompt_logprobs,
    save_model,
    update,
)

from distill.evaluation.models import merged
from sync.base.errors import RemoteError
from sync.base.settings import DirectoryStoreConfig, ModelSource
from sync.base.tokenizers import fingerprint, load_tokenizer
from sync.weights.publish import Publisher, Slice
from sync.weights.snapshots import checkpoint
from sync.weights.stores import open_store
from sync.wire import ReplicaState, RunIdentity, Version, VersionSpan, unpack

pytestmark = [
    pytest.mark.engine,
    pytest.mark.run,
    pytest.mark.filterwarnings("ignore"),
]
RANK, STEPS, TOLERANCE = 4, 5, 0.12
SEQUENCES = [np.random.default_rng(i).integers(2, 64, 30).tolist() for i in range(16)]


def save_adapter(base: Path, seed: int, folder: Path) -> None:
    """A random adapter of all linear layers, as peft saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    settings = LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(folder)


def publish(store: Path, adapters: list[Path]) -> None:
    """Steps 1, 2, … of lineage 1; each is an adapter."""
    places = checkpoint.tensors(adapters[0])
    slices = [Slice(n, at.shape, at.kind, 0, int(np.prod(at.shape))) for n, at in places.items()]
    publisher = Publisher(
        open_store(DirectoryStoreConfig(), store),
        RunIdentity("tests", model=checkpoint.fingerprint(adapters[0])),
        slices,
    )
    for step, folder in enumerate(adapters, 1):
        bits = checkpoint.bits(checkpoint.tensors(folder))
        publisher.anchor(Version(1, step), None, folder, bits, "lora")


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """(base folder, adapter folders of steps 1 to 3, a server that follows, a fresh one that will)"""
    work = tmp_path_factory.mktemp("lora")
    base, adapters = work / "base", [work / "one", work / "two", work / "altered"]
    save_model("Qwen3", 0, base)
    for seed, folder in enumerate(adapters[:2]):
        save_adapter(base, seed, folder)
    subprocess.run(["cp", "-r", adapters[1], adapters[2]], check=True)
    tensors = load_file(adapters[2] / "adapter_model.safetensors")
    tensors[sorted(tensors)[0]] *= 1.5
    save_file(tensors, adapters[2] / "adapter_model.safetensors", {"format": "pt"})
    servers = [Server(base, work, index, lora_rank=RANK) for index in range(2)]
    try:
        publish(work / "store", adapters)
        for server in servers:
            server.wait()
        yield base, adapters, *servers
    finally:
        for server in servers:
            server.stop()


def error(base: Path, adapter: Path | None, prompt: list[int], answer, start: int = 0) -> float:
    """Largest distance in nats between the engine's log-probabilities and the merged model's."""
    from transformers import AutoModelForCausalLM

    if adapter is None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    else:
        model = merged(ModelSource(path=str(base)), adapter, torch.float32)
    tokens = unpack(answer.token_ids).astype(np.int64)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + tokens.tolist()])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1][torch.arange(len(tokens)), tokens]
    return float(np.abs(unpack(answer.logprob) - expected.numpy())[start:].max())


async def test_a_replica_follows_adapters_while_it_generates(setup):
    base, adapters, server, _ = setup
    async with server.peer() as peer:
        (before,) = await generate(peer, [[5, 6, 7]], max_tokens=24)
        assert before.spans == [VersionSpan(Version(0, 0), 0, 24)]
        assert error(base, None, [5, 6, 7], before) < TOLERANCE

        first_read: dict[int, int] = {}

        async def updated(step: int) -> None:
            reply = await update(peer, step, kv_on_swap="recompute")
            assert reply.version == Version(1, step)
            first_read.setdefault(step, reply.bytes_read)

        updates = [partial(updated, step) for step in (1, 2)]
        answers = await generate_across(peer, [[5, 6, 7], [8, 9]], updates, max_tokens=400)
        assert min(first_read.values()) > 0
        (after,) = await generate(peer, [[5, 6, 7]], max_tokens=24)
    for prompt, answer in zip([[5, 6, 7], [8, 9]], answers, strict=True):
        assert [span.version for span in answer.spans][-2:] == [Version(1, 1), Version(1, 2)]
        assert (answer.spans[0].start, answer.spans[-1].end) == (0, 400)
        assert error(base, adapters[1], prompt, answer, answer.spans[-1].start) < TOLERANCE
    assert error(base, adapters[1], [5, 6, 7], after) < TOLERANCE
    assert error(base, adapters[0], [5, 6, 7], after) > 5 * TOLERANCE


async def test_both_proofs_hold_for_adapters_and_fail_on_a_planted_difference(setup):
    _, adapters, server, fresh = setup
    async with server.peer() as peer, fresh.peer() as late:
        await update(peer, 1)
        await update(peer, 2)
        await update(late, 2)
        states = [await one.call("/distill/v1/state?digests=1", None, ReplicaState) for one in (peer, late)]
        assert states[0].digests == states[1].digests == digests(adapters[1])
        scores = [await prompt_logprobs(one, SEQUENCES, "student") for one in (server, fresh)]
        assert scores[0] == scores[1]
        assert scores[0][0] != (await prompt_logprobs(server, SEQUENCES[:1]))[0], "the base alone"
        await update(late, 3)
        state = await late.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert state.digests != states[0].digests
        assert await prompt_logprobs(fresh, SEQUENCES, "student") != scores[0]


async def test_an_adapter_by_broadcast_is_the_one_from_the_store_and_a_whole_checkpoint_is_refused(setup):
    base, adapters, server, fresh = setup
    async with server.peer() as peer, fresh.peer() as late:
        await update(peer, 2)
        assert (await broadcast(late, adapters[1], 50)).version == Version(1, 50)
        with pytest.raises(RemoteError, match=r"409.* a whole checkpoint and this replica .* an adapter"):
            await broadcast(late, base, 51)
        state = await late.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert (state.version, state.digests) == (Version(1, 50), digests(adapters[1]))
        scores = [await prompt_logprobs(one, SEQUENCES, "student") for one in (server, fresh)]
        assert scores[0] == scores[1]
        await update(late, 1)
        (answer,) = await generate(late, [[5, 6, 7]], max_tokens=24)
        assert error(base, adapters[0], [5, 6, 7], answer) < TOLERANCE


async def test_an_altered_adapter_keeps_the_old_one(setup):
    base, adapters, server, _ = setup
    (file,) = server.store.glob("tests/*00000003/model/adapter_model.safetensors")
    good = file.read_bytes()
    async with server.peer() as peer:
        await update(peer, 1)
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(RemoteError, match="409"):
            await update(peer, 3)
        file.write_bytes(good)
        (answer,) = await generate(peer, [[5, 6, 7]], max_tokens=24)
        assert answer.spans == [VersionSpan(Version(1, 1), 0, 24)]
        assert error(base, adapters[0], [5, 6, 7], answer) < TOLERANCE


MORE = f"""
[trainer.lora]
rank = {RANK}
alpha = 8
[evaluation]
prompts = 16
threads = 1
"""


def stock_completion(folder: Path, log: Path) -> str:
    """What vLLM's server, without anything of ours in it, generates with the model in `folder`."""
    port = free_port()
    words = [
        "--model",
        str(folder),
        "--enforce-eager",
        "--max-model-len=64",
        "--dtype=float32",  # in bf16 vLLM 0.32 dies by SIGILL on processors with AMX
        "--kv-cache-memory-bytes=67108864",
        f"--port={port}",
    ]
    environment = {"VLLM_PLUGINS": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *words],
            env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").is_success:
                        break
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
            answer = client.post("/v1/completions", json={"prompt": [5, 6], "model": str(folder)})
            return str(answer.raise_for_status().json()["choices"][0]["text"])
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(600)
        assert not psutil.wait_procs(family, 60)[1]


def call(*words: str) -> str:
    """What `distill WORDS` prints."""
    line = [sys.executable, "-P", "-m", "distill.cli.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return output_of(line, environment)


def trained(folder: Path, stored: int, *settings: str) -> Path:
    """Folder of a run of two ranks that evaluated, with so many versions in its store."""
    config = prepare(folder, "lora", STEPS, ranks=2, more=MORE)
    call("run", str(config), *over("trainer.lr=2e-2", *settings))
    run = folder / "runs/lora"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["completed"], summary["weights_identical"]) == (True, True)
    assert summary["evaluations"][-1]["reverse_kl"] < summary["evaluations"][0]["reverse_kl"]
    listing = call("sync", "ls", str(run)).splitlines()
    assert [line.split()[1] for line in listing] == ["lora"] * stored
    assert "whole" in call("sync", "verify", str(run))
    return run


def test_a_whole_run_broadcasts_adapters_and_stores_those_that_it_evaluates(tmp_path):
    run = trained(tmp_path, 2, "weights.transport=broadcast")
    said = (run / "logs/trainer.log").read_text()
    assert all(f"L000-v{step:08} went to 1 workers" in said for step in range(STEPS + 1))


def test_a_whole_run_trains_publishes_swaps_evaluates_and_merges_adapters(tmp_path):
    run = trained(tmp_path, STEPS + 1)
    assert (run / "final/adapter_model.safetensors").is_file()
    sources = (ModelSource(path=str(folder)) for folder in (run / "final", tmp_path / "student"))
    ours, theirs = map(load_tokenizer, sources)
    assert fingerprint(ours) == fingerprint(theirs)

    assert "AutoPeftModelForCausalLM" in ModelCard.load(run / "final/README.md").text

    call("export", str(run), str(tmp_path / "merged"))
    assert ModelCard.load(tmp_path / "merged/README.md").data.library_name == "transformers"
    assert stock_completion(tmp_path / "merged", tmp_path / "stock.log")
    expected = merged(ModelSource(path=str(tmp_path / "student")), run / "final").state_dict()
    found = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found)
    start = load_file(tmp_path / "student/model.safetensors")
    assert found.keys() == start.keys()
    assert any(not torch.equal(found[name], start[name]) for name in start)
    call("export", str(run), str(tmp_path / "adapter"), "--adapter")
    assert digests(tmp_path / "adapter") == digests(run / "final")
