"""Real vLLM servers on tiny random models: log-probabilities, updates in flight, refusals, both proofs."""

import asyncio
import contextlib
import shutil
import signal
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
import vllm_replica
from flat_tensors import digests
from safetensors.torch import load_file, save_file
from tiny_models import model_of
from vllm_replica import TOKEN, VOCABULARY, Server, broadcast, generate, logp_TV, prompt_logprobs, update

from distill.launch.supervise import first_error
from student_trainer.objectives.divergences import mask_log_mass
from sync import wire
from sync.base.errors import ConfigError, RemoteError
from sync.wire import Generated, GenerateFailed, ReplicaState, Sampling, Version, VersionSpan, unpack

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 0.12
"""Nats between vLLM's bf16 and transformers' fp32 forward of the same bf16 weights; seen: 0.05."""
PROMPTS = [[2 + i, 3, 4 + 3 * i] for i in range(12)]


def scale_projection(source: Path, target: Path, factor: float) -> None:
    """A checkpoint that differs from `source` in one projection only."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= factor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """(server, versions, fresh server on the weights of version 3)"""
    work = tmp_path_factory.mktemp("replica")
    folders = [work / name for name in ("zero", "one", "two", "scaled")]
    for seed, folder in enumerate(folders[:3]):
        vllm_replica.save_model("Qwen3", seed, folder)
    scale_projection(folders[2], folders[3], 1.5)
    development = {"VLLM_SERVER_DEV_MODE": "1"}
    with Server(folders[2], work, 1, env=development) as spare, Server(folders[0], work, 0) as server:
        versions = vllm_replica.Versions(work / "store", folders)
        server.wait()
        spare.wait()
        yield server, versions, spare


@pytest.fixture
def server(setup):
    return setup[0]


@pytest.fixture
def folders(setup):
    return setup[1].folders


def error(folder: Path, *of, **more) -> float:
    """`distance` to the model of a folder."""
    return vllm_replica.distance(model_of(folder), *of, **more)


async def test_log_probabilities_are_those_of_transformers_before_and_after_updates(server, folders):
    """The server finds AMX (tests/support/amx): with vLLM's own choice of a kernel it dies by SIGILL on a
    processor that has none."""
    async with server.peer() as peer:
        before = await generate(peer, PROMPTS, max_tokens=24)
        assert "attention uses the kernel vec" in server.log.read_text()
        for prompt, answer in zip(PROMPTS, before, strict=True):
            assert error(folders[0], prompt, answer) < TOLERANCE
            assert answer.spans == [VersionSpan(Version(0, 0), 0, 24)]
            assert answer.finish_reason == "length"
        for step in (1, 2, 3):
            reply = await update(peer, step)
            assert (reply.version, reply.bytes_read > 0) == (Version(1, step), True)
            after = await generate(peer, PROMPTS[:4], max_tokens=24, temperature=0.7)
            for prompt, answer in zip(PROMPTS, after, strict=False):
                assert error(folders[step - 1], prompt, answer, temperature=0.7) < TOLERANCE
                assert error(folders[step % 3], prompt, answer, temperature=0.7) > 5 * TOLERANCE
                assert answer.spans == [VersionSpan(Version(1, step), 0, 24)]
        assert await update(peer, 3) == wire.UpdateReply(Version(1, 3), 0, 0, 0, 0), "nothing is read again"


def test_another_version_of_vllm_is_refused_by_name_on_a_processor_with_amx(monkeypatch):
    from sync.vllm import vllm_compat

    monkeypatch.setattr("vllm.__version__", "0.33.0")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    vllm_compat.avoid_amx_attention()
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.0 was not tried on processors with AMX"):
        vllm_compat.avoid_amx_attention()


def test_the_forked_engine_does_not_hold_the_servers_port(server):
    api = psutil.Process(server.process.pid)
    port, engines = int(server.url.rsplit(":", 1)[1]), api.children(recursive=True)

    def listens(process: psutil.Process) -> bool:
        at = [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        return port in at

    assert listens(api)
    assert any("EngineCore" in " ".join(one.cmdline()) or "EngineCore" in one.name() for one in engines)
    assert not any(listens(one) for one in engines)


async def test_what_the_time_limit_ends_comes_back_as_far_as_it_was_written(server, folders):
    async with server.peer() as peer:
        await update(peer, 3)
        await generate(peer, PROMPTS[:1], max_tokens=4)
        for seconds in (0.1, 0.3, 1.0, 4.0, 16.0, 64.0):  # a busy machine may write nothing in a short time
            (answer,) = await generate(peer, PROMPTS[:1], max_tokens=480, max_seconds=seconds)
            if answer.token_ids.shape[0]:
                break
        state = await peer.call("/distill/v1/state", None, ReplicaState)
    length = answer.token_ids.shape[0]
    assert answer.finish_reason == "time"
    assert 0 < length < 480
    assert answer.logprob.shape == (length,)
    assert (answer.spans[0].start, answer.spans[-1].end) == (0, length)
    assert error(folders[2], PROMPTS[0], answer) < TOLERANCE
    assert state.requests == 0


async def test_a_swapped_replica_scores_like_a_fresh_engine_and_one_scaled_projection_does_not(setup):
    server, _, fresh = setup
    generator = np.random.default_rng(0)
    sequences = [generator.integers(2, VOCABULARY, 30).tolist() for _ in range(64)]
    async with server.peer() as peer:
        await update(peer, 3)
        expected = await prompt_logprobs(fresh, sequences)
        assert await prompt_logprobs(server, sequences) == expected
        await update(peer, 4)
        assert await prompt_logprobs(server, sequences[:1]) != expected[:1]


async def test_requests_in_flight_go_on_across_updates(server, folders):
    async with server.peer() as peer:
        version = (await peer.call("/distill/v1/state", None, ReplicaState)).version
        first = 1 if version is None else version.step % 2 + 1
        steps = {"keep": first, "recompute": 3 - first}
        updates = [partial(update, peer, step, kv_on_swap=kept) for kept, step in steps.items()]
        answers = await vllm_replica.generate_across(peer, PROMPTS[:4], updates, max_tokens=500)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        steps = [span.version.step for span in answer.spans]
        assert steps[-2:] == [first, 3 - first]
        assert (answer.spans[0].start, answer.spans[-1].end) == (0, 500)
        start = answer.spans[-1].start
        assert 0 < start < 500
        assert error(folders[2 - first], prompt, answer, start) < TOLERANCE


async def test_bad_prompts_fail_alone(server):
    prompts = [[5, 6], [], [VOCABULARY], [-1], [3] * vllm_replica.CONTEXT, [7, 8]]
    async with server.peer() as peer:
        answers = await generate(peer, prompts, max_tokens=4)
        assert [type(answer) for answer in answers] == [Generated, *[GenerateFailed] * 4, Generated]
        with pytest.raises(RemoteError, match=r"400.*max_tokens"):
            await generate(peer, [[5]], max_tokens=0)


async def test_the_students_own_topk_holds_the_most_likely_ids_whatever_was_sampled(server, folders):
    async with server.peer() as peer:
        state = await peer.call("/distill/v1/state", None, ReplicaState)
        answers = await generate(peer, PROMPTS[:6], max_tokens=24, student_topk=4)
        narrow = await generate(peer, [[5, 6]], max_tokens=24, student_topk=VOCABULARY + 2, top_p=0.2)
    model, outside = model_of(folders[state.version.step - 1]), 0
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        token_ids = unpack(answer.token_ids).tolist()
        expected_TV = logp_TV(model, prompt, token_ids)
        ids_TK = torch.from_numpy(unpack(answer.topk_ids).astype(np.int64))
        kth_T1 = expected_TV.topk(4).values[:, -1:]
        assert bool((expected_TV.gather(1, ids_TK) > kth_T1 - TOLERANCE).all())
        assert all(len(set(row)) == 4 for row in ids_TK.tolist())
        outside += sum(token not in row for token, row in zip(token_ids, ids_TK.tolist(), strict=True))
    assert outside, "the sampled token is sometimes outside the set"
    ids_TK = unpack(narrow[0].topk_ids)
    assert ids_TK.shape == (24, VOCABULARY + 2)
    assert (ids_TK[:, 0] >= 0).all()
    assert (ids_TK[:, -3:] == -1).all()


@pytest.mark.parametrize(
    "cut", [{"top_k": 8, "top_p": 0.8}, {"top_k": 16, "min_p": 0.2}, {"top_k": 4}], ids=str
)
async def test_every_token_comes_with_the_ids_that_it_was_sampled_from(server, folders, cut):
    """ρ of the student that sampled is 1 within the masks, and far below without them."""
    sampling = {"max_tokens": 24, "temperature": 0.7, **cut}
    async with server.peer() as peer:
        state = await peer.call("/distill/v1/state", None, ReplicaState)
        answers = await generate(peer, PROMPTS[:6], **sampling, mask=True)
    folder = folders[0 if state.version is None else state.version.step - 1]
    ratios, blind = [], []
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert wire.checks.generated(answer, Sampling(**sampling, mask=True), VOCABULARY) is None
        token_ids = unpack(answer.token_ids)
        expected_TV = logp_TV(model_of(folder), prompt, token_ids.tolist(), 0.7)
        ids_TK = torch.from_numpy(answer.mask.padded())
        for row_V, ids_K in zip(expected_TV, ids_TK, strict=True):
            left = ids_K[ids_K >= 0]  # more than top_k are ties of the last of them
            least = row_V.topk(min(len(left), cut["top_k"])).values[-1]
            assert bool((row_V[left] > least - TOLERANCE / 0.7).all())
        logp_T = expected_TV.gather(1, torch.tensor(token_ids, dtype=torch.int64)[:, None])[:, 0]
        behavior_T = torch.tensor(unpack(answer.logprob))
        ratios.append((logp_T - mask_log_mass(expected_TV, ids_TK) - behavior_T).exp())
        blind.append((logp_T - behavior_T).exp())
    assert abs(float(torch.cat(ratios).mean()) - 1) < 0.02, "bf16 rounds by 0.05 nats"
    assert float(torch.cat(blind).mean()) < 0.95


async def test_seeds_repeat_and_stop_ids_end_a_completion(server):
    prompts = [wire.GeneratePrompt(i, [5, 6], seed=7) for i in "ab"]
    request = wire.GenerateRequest(Sampling(max_tokens=30), prompts)
    async with server.peer() as peer:
        a, b = [g async for g in peer.stream("/distill/v1/generate", request, Generated | GenerateFailed)]
        assert a.token_ids == b.token_ids
        (stopped,) = await generate(peer, [[5, 6]], max_tokens=500, stop_token_ids=list(range(0, 64, 4)))
    assert stopped.finish_reason == "stop"
    assert unpack(stopped.token_ids)[-1] % 4 == 0


async def test_an_altered_snapshot_keeps_the_old_version(setup):
    server, versions, _ = setup
    (delta,) = (versions.store_path / "tests").glob("*00000004/delta-00000.bin")
    good = delta.read_bytes()
    async with server.peer() as peer:
        await update(peer, 1)
        old = await update(peer, 2)  # neither folder of its mirror holds step 4
        delta.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        try:
            with pytest.raises(RemoteError, match="409"):
                await update(peer, 4)
        finally:
            delta.write_bytes(good)
        with pytest.raises(RemoteError, match=r"409.*never published"):
            await update(peer, 99)
        state = await peer.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert state.version == old.version
        assert state.digests == digests(versions.folders[1])
        assert (await generate(peer, [[5]], max_tokens=4))[0].spans == [VersionSpan(old.version, 0, 4)]


async def test_a_broadcast_reaches_the_engine_and_a_failed_one_keeps_the_old_version(
    server, folders, tmp_path
):
    adapter = shutil.copytree(folders[1], tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text("{}")
    async with server.peer() as peer:
        await update(peer, 1)
        assert (await broadcast(peer, folders[1], 50)).version == Version(1, 50)
        state = await peer.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert state.digests == digests(folders[1])
        assert error(folders[1], [5, 6], (await generate(peer, [[5, 6]], max_tokens=24))[0]) < TOLERANCE

        with pytest.raises(RemoteError, match=r"409.*the old version goes on: .*publish a whole checkpoint"):
            await broadcast(peer, folders[1], 51, keep=lambda name: "layers.1" not in name)
        with pytest.raises(RemoteError, match=r"is an adapter and this replica .* for a whole checkpoint"):
            await broadcast(peer, adapter, 52)
        state = await peer.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert (state.version, state.digests) == (Version(1, 50), digests(folders[1]))
        (answer,) = await generate(peer, [[5, 6]], max_tokens=24)
        assert answer.spans == [VersionSpan(Version(1, 50), 0, 24)]
        assert error(folders[1], [5, 6], answer) < TOLERANCE

        assert (await update(peer, 1)).bytes_read == 0, "the mirror holds step 1 still"
        state = await peer.call("/distill/v1/state?digests=1", None, ReplicaState)
        assert (state.version, state.digests) == (Version(1, 1), digests(folders[0]))


async def test_only_the_token_opens_a_route_and_health_is_open(server):
    admitted = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as client:
        for path in ("/distill/v1/state", "/v1/models", "/metrics"):
            for headers, status in (({}, 401), ({"authorization": "Bearer x"}, 401), (admitted, 200)):
                assert (await client.get(path, headers=headers)).status_code == status
        state = wire.decode((await client.get("/distill/v1/state", headers=admitted)).content, ReplicaState)
        metrics = (await client.get("/metrics", headers=admitted)).text
        assert "vllm:num_requests_running{" in metrics
        step = state.version.step if state.version else 0
        assert f"distill_replica_version_step {float(step)}\n" in metrics
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/pause")).status_code == 401


async def test_a_client_that_leaves_aborts_its_completions(server):
    async with server.peer() as peer:
        flight = asyncio.create_task(generate(peer, PROMPTS * 4, max_tokens=500))
        while (await peer.call("/distill/v1/state", None, ReplicaState)).requests == 0:
            if flight.done():  # before this process came to look
                flight = asyncio.create_task(generate(peer, PROMPTS * 4, max_tokens=500))
        flight.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flight
        await vllm_replica.until(peer, lambda state: state.requests == 0)


async def test_a_revert_brings_the_old_weights_back(setup):
    _, versions, spare = setup
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with spare.peer() as peer, httpx.AsyncClient(headers=headers, trust_env=False) as client:
        for step, folder in ((None, versions.folders[2]), (2, versions.folders[1])):
            if step is not None:
                await update(peer, step)
            call = {"method": "distill_revert"}
            (await client.post(f"{spare.url}/collective_rpc", json=call, timeout=120)).raise_for_status()
            (answer,) = await generate(peer, [[5, 6]], max_tokens=24)
            assert error(folder, [5, 6], answer) < TOLERANCE


async def test_two_workers_with_an_untied_head_biases_and_rows_without_a_token_take_new_weights(tmp_path):
    """From the store, then by broadcast. Half of what this Llama would sample is padding."""
    folders = [tmp_path / name for name in ("zero", "one")]
    for seed, folder in enumerate(folders):
        vllm_replica.save_model("Llama", seed, folder, padding=VOCABULARY, attention_bias=True)
    with Server(folders[0], tmp_path, 0, engine_args={"tensor-parallel-size": 2}) as server:
        server.wait()
        vllm_replica.Versions(tmp_path / "store", folders)
        async with server.peer() as peer:
            for folder, step in ((folders[0], None), (folders[1], 2), (folders[0], 3)):
                if step == 2:
                    await update(peer, 2)
                elif step == 3:
                    await broadcast(peer, folder, 3, workers=2)
                answers = await generate(peer, PROMPTS, max_tokens=24, student_topk=80)
                for prompt, answer in zip(PROMPTS, answers, strict=True):
                    tokens = torch.from_numpy(unpack(answer.token_ids).astype(np.int64))
                    assert int(tokens.max()) < VOCABULARY
                    assert int(unpack(answer.topk_ids).max()) < VOCABULARY
                    whole = logp_TV(model_of(folder), prompt, tokens.tolist())[:, :VOCABULARY].log_softmax(-1)
                    expected = whole[torch.arange(len(tokens)), tokens].numpy()
                    assert float(np.abs(unpack(answer.logprob) - expected).max()) < TOLERANCE
            state = await peer.call("/distill/v1/state?digests=1", None, ReplicaState)
            assert (state.digests, state.workers) == (digests(folders[0]), 2)
        (core,) = (p for p in psutil.Process(server.process.pid).children() if "EngineCore" in p.name())
        core.send_signal(signal.SIGILL)
        await asyncio.to_thread(server.process.wait, 600)
        assert "was ended by SIGILL (illegal instruction)" in str(first_error(server.log, 0))
