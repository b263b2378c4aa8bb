"""vLLM as a teacher: a stock server by URL, and inside the teacher process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ports import free_port
from teacher_completions import END, MAX_TOKENS, STOP, check_completions_score_alike
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vllm_replica import AMX

from distill.bench import teacher as bench
from sync.client import Peer
from sync.errors import RemoteError
from sync.replica.plugin import PLUGIN
from sync.wire import Scored, ScoreRefused, ScoreSequence, Want, pack, unpack
from teacher_service.batching import split
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import (
    EnginePrompt,
    GenerationParams,
    Item,
    ScoreOptions,
)
from teacher_service.messages import scored

pytestmark = pytest.mark.engine
VOCAB = 32
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": PLUGIN,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 and its tokenizer."""
    path = tmp_path_factory.mktemp("teacher")
    ids = {f"t{i}" if i else "<eos>": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments], env=os.environ | ENVIRONMENT, stdout=file, stderr=file
        )


async def up(url: str, process: subprocess.Popen[bytes]) -> None:
    async with Peer(url) as peer:
        async with asyncio.timeout(300):
            while not await peer.alive():
                assert process.poll() is None
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def urls(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A stock vLLM server, and a teacher process with vLLM inside."""
    tmp, ports = tmp_path_factory.mktemp("logs"), (free_port(), free_port())
    found = (f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    args = {"enforce_eager": True, "gpu_memory_utilization": 0.2, "distributed_executor_backend": "uni"}
    config = tmp / "teacher.json"
    config.write_text(
        json.dumps({"path": str(folder), "dtype": "float32", "engine": "vllm", "engine_args": args})
    )
    flags = "--dtype float32 --enforce-eager --distributed-executor-backend uni --gpu-memory-utilization 0.2"
    server = ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(ports[0])]
    teacher = ["teacher_service", "--config", str(config), "--name", "v", "--port", str(ports[1])]
    processes = [start(tmp / "server.log", *server, *flags.split()), start(tmp / "teacher.log", *teacher)]
    try:
        for url, process in zip(found, processes, strict=True):
            asyncio.run(up(url, process))
        yield found
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[ScoreSequence], list[np.ndarray]]:
    """Sequences, and float64 [T, V] log-probabilities of each by a plain forward pass."""
    rng = np.random.default_rng(0)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options, truth = [], []
    for i in range(8):
        ids = rng.integers(0, VOCAB, int(rng.integers(5, 40))).astype(np.int32)
        options.append(ScoreSequence(str(i), pack(ids), 3))
        with torch.inference_mode():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 2:-1]
        truth.append(logits.double().log_softmax(-1).numpy())
    return options, truth


def check(
    expected: tuple[list[ScoreSequence], list[np.ndarray]], k: int, results: list[Scored | ScoreRefused]
) -> None:
    for sequence, logp, result in zip(*expected, results, strict=True):
        assert isinstance(result, Scored)
        ids = unpack(sequence.token_ids)
        np.testing.assert_allclose(unpack(result.logprob), logp[np.arange(len(ids) - 3), ids[3:]], atol=1e-4)
        if k:
            assert result.topk_ids is not None
            np.testing.assert_array_equal(unpack(result.topk_ids), np.argsort(-logp, axis=1)[:, :k])


async def test_vllm_inside_the_process_equals_a_plain_forward_pass(
    urls: tuple[str, str], expected: tuple[list[ScoreSequence], list[np.ndarray]]
) -> None:
    async with TeacherClient("v", [urls[1]]) as client:
        check(expected, 5, await client.score(expected[0], Want(topk=5)))
        if "gather" not in (await client.info()).can:
            gather = ScoreSequence("a", pack(np.zeros(3, np.int32)), 2, pack(np.zeros((1, 2), np.int32)))
            with pytest.raises(RemoteError, match="cannot give 'gather'"):
                await client.score([gather])


async def test_vllm_inside_the_process_generates_what_it_then_scores_alike(urls: tuple[str, str]) -> None:
    async with TeacherClient("v", [urls[1]]) as client:
        await check_completions_score_alike(client, VOCAB)


def test_a_stock_server_by_url_generates_with_the_log_probabilities_that_it_scores(
    urls: tuple[str, str],
) -> None:
    config = TeacherConfig.model_validate({"path": "toy", "engine": "vllm", "engine_url": urls[0]})
    teacher = build(config, VOCAB)
    engine_prompts = [EnginePrompt(np.array([5 + i, 6], np.int32), seed=i) for i in range(6)]
    *_, texts = teacher.generate(engine_prompts, GenerationParams(MAX_TOKENS, 1.0, (STOP,)))
    items = [
        Item(np.concatenate([engine_prompt.token_ids_P, text.token_ids_T]), 2)
        for engine_prompt, text in zip(engine_prompts, texts, strict=True)
    ]
    scores = teacher.score(items, ScoreOptions())
    np.testing.assert_allclose(
        np.concatenate([text.logprob_T for text in texts]), scores.logprob_C, atol=1e-4
    )
    assert [text.ended for text in texts] == [text.token_ids_T[-1] in (END, STOP) for text in texts]
    teacher.close()


def test_a_stock_server_by_url_equals_a_plain_forward_pass(
    urls: tuple[str, str], expected: tuple[list[ScoreSequence], list[np.ndarray]]
) -> None:
    config = TeacherConfig.model_validate({"path": "toy", "engine": "vllm", "engine_url": urls[0]})
    teacher = build(config, VOCAB)
    assert "topk" in teacher.engine_info.can
    items = [Item(unpack(sequence.token_ids), sequence.start) for sequence in expected[0]]
    outcomes = split(teacher.score(items, ScoreOptions(topk=5)), [item.positions for item in items])
    check(expected, 5, [scored(str(i), outcome, "f4") for i, outcome in enumerate(outcomes)])
    teacher.close()


def test_a_teacher_in_bf16_on_a_processor_with_amx_uses_another_kernel(folder: Path) -> None:
    """AMX is simulated (tests/support/amx): without the mend SIGILL ends this where there is none."""
    program = f"""
import os, numpy as np
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Item, ScoreOptions
args = {{"enforce_eager": True, "gpu_memory_utilization": 0.2, "distributed_executor_backend": "uni"}}
config = TeacherConfig(path={str(folder)!r}, dtype="bfloat16", engine="vllm", engine_args=args)
teacher = build(config, {VOCAB})
print(teacher.score([Item(np.arange(40, dtype=np.int32) % {VOCAB}, 1)], ScoreOptions()).logprob_C.shape)
teacher.close()
os._exit(0)
"""
    environment = os.environ | ENVIRONMENT | {"VLLM_PLUGINS": "", "PYTHONPATH": AMX}
    ended = subprocess.run(
        [sys.executable, "-u", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "(39,)" in ended.stdout
    assert "attention uses the kernel vec" in ended.stderr


def test_the_bench_measures_the_service_and_sends_it_nonsense(folder: Path) -> None:
    found = bench.run(
        str(folder), rollouts=4, completion=16, topk=4, repeats=1, malformed=200, flood_factor=0, vllm=False
    )
    assert {"plain forward", "service topk 4"} <= found["figures"].keys()
    assert all(figure["positions_per_second"] > 0 for figure in found["figures"].values())
    assert found["malformed"]["clean"]
    assert found["malformed_to_write"]["clean"]
