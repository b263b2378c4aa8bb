"""A whole LoRA run with real engines, and a replica that follows adapters: in flight, digests, equality."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import vllm_replica
from flat_tensors import digests
from huggingface_hub import ModelCard
from run_on_words import prepare
from safetensors.torch import load_file, save_file
from tiny_models import save_adapter
from vllm_replica import Server, Versions, broadcast, distance, generate, prompt_logprobs, update
from whole_run import called, ended_well, over

from distill.evaluation.models import load_model, merged
from sync.base.errors import RemoteError
from sync.base.settings import ModelSource
from sync.base.tokenizers import fingerprint, load_tokenizer
from sync.wire import ReplicaState, Version, VersionSpan

pytestmark = [pytest.mark.engine, pytest.mark.run, pytest.mark.filterwarnings("ignore")]
RANK, STEPS, TOLERANCE = 4, 5, 0.12
SEQUENCES = [np.random.default_rng(i).integers(2, 64, 30).tolist() for i in range(16)]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """(base folder, adapter folders of steps 1 to 3, a server that follows, a fresh one that will)"""
    work = tmp_path_factory.mktemp("lora")
    base, adapters = work / "base", [work / "one", work / "two", work / "altered"]
    vllm_replica.save_model("Qwen3", 0, base)
    for seed, folder in enumerate(adapters[:2]):
        save_adapter(base, folder, seed, RANK)
    shutil.copytree(adapters[1], adapters[2])
    tensors = load_file(adapters[2] / "adapter_model.safetensors")
    tensors[sorted(tensors)[0]] *= 1.5
    save_file(tensors, adapters[2] / "adapter_model.safetensors", {"format": "pt"})
    with Server(base, work, 0, lora_rank=RANK) as server, Server(base, work, 1, lora_rank=RANK) as fresh:
        Versions(work / "store", adapters, "lora")
        server.wait()
        fresh.wait()
        yield base, adapters, server, fresh


def error(base: Path, adapter: Path | None, prompt: list[int], answer, start: int = 0) -> float:
    """`distance` to the merged model."""
    source = ModelSource(path=str(base))
    model = merged(source, adapter, torch.float32) if adapter else load_model(source, device="cpu")
    return distance(model, prompt, answer, start)


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

        prompts, updates = [[5, 6, 7], [8, 9]], [partial(updated, step) for step in (1, 2)]
        answers = await vllm_replica.generate_across(peer, prompts, updates, max_tokens=400)
        assert min(first_read.values()) > 0
        (after,) = await generate(peer, [[5, 6, 7]], max_tokens=24)
    for prompt, answer in zip(prompts, answers, strict=True):
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


STOCK = """
import sys, vllm
options = {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}
llm = vllm.LLM(sys.argv[1], dtype="float32", **options)  # bf16 dies by SIGILL on processors with AMX
print("said", llm.generate({"prompt_token_ids": [5, 6]})[0].outputs[0].text)
"""


def stock_completion(folder: Path) -> str:
    """What vLLM, without anything of ours in it, generates with the model in `folder`."""
    own = {"VLLM_PLUGINS": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    line, env = [sys.executable, "-c", STOCK, str(folder)], os.environ | own | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.partition("said ")[2].strip()


def trained(folder: Path, stored: int, *settings: str) -> Path:
    """Folder of a run of two ranks that evaluated, with so many versions in its store."""
    trainer = {"ranks": 2, "lora": {"rank": RANK, "alpha": 8}}
    config = prepare(folder, "lora", STEPS, trainer=trainer, evaluation={"prompts": 16})
    called("run", str(config), *over("trainer.lr=2e-2", *settings))
    run = folder / "runs/lora"
    summary = ended_well(run, STEPS)
    assert summary["evaluations"][-1]["reverse_kl"] < summary["evaluations"][0]["reverse_kl"]
    listing = called("sync", "ls", str(run)).splitlines()
    assert [line.split()[1] for line in listing] == ["lora"] * stored
    assert "whole" in called("sync", "verify", str(run))
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

    called("export", str(run), str(tmp_path / "merged"))
    assert ModelCard.load(tmp_path / "merged/README.md").data.library_name == "transformers"
    assert stock_completion(tmp_path / "merged")
    expected = merged(ModelSource(path=str(tmp_path / "student")), run / "final").state_dict()
    found = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in found)
    start = load_file(tmp_path / "student/model.safetensors")
    assert found.keys() == start.keys()
    assert any(not torch.equal(found[name], start[name]) for name in start)
    called("export", str(run), str(tmp_path / "adapter"), "--adapter")
    assert digests(tmp_path / "adapter") == digests(run / "final")
