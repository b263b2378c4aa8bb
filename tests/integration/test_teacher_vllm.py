"""vLLM as a teacher, against engine "transformers" on the same checkpoints: started with the teacher, on two
tensor-parallel workers, with experts and on two data-parallel engines, and by URL of stock servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from forked import VLLM, Forked, start
from ports import free_port, healthy
from teacher_completions import check_completions_score_alike
from tiny_models import language_model, save_words
from vllm_replica import AMX
from waiting import until

from sync.base.errors import RemoteError
from sync.vllm.plugin import PLUGIN
from sync.wire import Scored, ScoreSequence, Want, pack, unpack
from teacher_service.batching import split
from teacher_service.client import TeacherClient
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Engine, EngineScores, Item, ScoreOptions
from teacher_service.messages import scored

pytestmark = pytest.mark.engine
VOCAB, PADDED, LONGEST, K = 32, 40, 128, 3
EVERYTHING, TOP2 = ScoreOptions(5, K, True, True, 0.7), ScoreOptions(2, K)
TOLERANCE = 5e-5
"""Nats, and hidden units: fp32 rounding of another order of sums."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": PLUGIN,
}
ENGINE_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_batched_tokens": 64}
"""Steps of 64 tokens: longer sequences are prefilled in parts."""
SERVER_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--kv-cache-memory-bytes=67108864",
)
POOLS = ("--runner=pooling", "--convert=embed", '--pooler-config={"task": "token_embed"}')
Urls = dict[str, str]
MoE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}


def save_model(path: Path, kind: str, **more: Any) -> Path:
    """A random model with rows beyond its tokenizer, which is saved beside it."""
    size = {"vocab_size": PADDED, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
    size |= {"max_position_embeddings": LONGEST, "tie_word_embeddings": False, "initializer_range": 0.2}
    language_model(kind, **size, **more).save_pretrained(path)
    save_words(path, ("<eos>", *(f"t{i}" for i in range(1, VOCAB))), eos_token="<eos>")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher"), "Qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("experts"), "Qwen3Moe", **MoE)


class Processes:
    """Servers, and teacher processes that use them; all are stopped together."""

    def __init__(self, tmp: Path) -> None:
        self._tmp, self._started = tmp, list[tuple[str, Forked | subprocess.Popen[bytes]]]()

    def start(self, *words: str, **environment: str) -> str:
        """URL of a module that is started with the port as its last argument."""
        port, log = free_port(), self._tmp / f"{len(self._started)}.log"
        with log.open("wb") as file:
            line = [sys.executable, "-m", *words, "--port", str(port)]
            process = start(line, os.environ | ENVIRONMENT | environment, file, imports=VLLM)
        self._started.append((f"http://127.0.0.1:{port}", process))
        return self._started[-1][0]

    def server(self, folder: Path, *flags: str) -> str:
        module = "vllm.entrypoints.openai.api_server"
        one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # or vLLM replaces "uni" on CPUs
        return self.start(module, "--model", str(folder), *SERVER_FLAGS, *flags, **one)

    def teacher(self, folder: Path, **config: Any) -> str:
        path = self._tmp / f"{len(self._started)}.json"
        path.write_text(json.dumps({"path": str(folder), "dtype": "float32", "engine": "vllm", **config}))
        return self.start("teacher_service", "--config", str(path), "--name", "v")

    def up(self) -> None:
        for url, process in self._started:
            until(partial(healthy, url), 600, lambda at=url: at, process, 0.1)

    def started_by_first(self) -> list[str]:
        """Names of all processes below the first, multiprocessing's bookkeeper apart."""
        below = psutil.Process(self._started[0][1].pid).children(recursive=True)
        return [one.name() for one in below if "resource_tracker" not in " ".join(one.cmdline())]

    def close(self) -> None:
        alive = [process for _, process in reversed(self._started) if process.poll() is None]
        family = [child for one in alive for child in psutil.Process(one.pid).children(recursive=True)]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        for process in alive:
            try:
                process.wait(600)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for orphan in psutil.wait_procs(family, 10)[1]:
            orphan.kill()


@pytest.fixture(scope="module")
def urls(folder: Path, experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    """Two stock servers, one that generates and one that pools, and two teachers.

    The teacher of two workers completes prompts through the server that generates.
    """
    with closing(Processes(tmp_path_factory.mktemp("processes"))) as processes:
        found = {
            "generates": processes.server(folder, "--no-enable-chunked-prefill"),
            "pools": processes.server(folder, "--max-num-batched-tokens=64", "--max-num-seqs=32", *POOLS),
            "experts": processes.teacher(experts, engine_args=ENGINE_ARGS),
        }
        processes.up()
        found["workers"] = processes.teacher(
            folder, engine_args=ENGINE_ARGS | {"tensor-parallel-size": 2}, generate_url=found["generates"]
        )
        processes.up()
        yield found


def sequences() -> tuple[list[ScoreSequence], list[Item]]:
    """Of all lengths up to the longest, with K ids to gather at each position, some of them -1."""
    rng = np.random.default_rng(0)
    wire, items = [], []
    for length in (LONGEST, *rng.integers(3, LONGEST, 15)):
        first, ids = int(rng.integers(1, length)), rng.integers(0, VOCAB, length).astype(np.int32)
        gather = rng.integers(-1, VOCAB, (length - first, K)).astype(np.int32)
        items.append(Item(ids, first, gather))
        wire.append(ScoreSequence(str(len(wire)), pack(ids), first, pack(gather)))
    return wire, items


def check(results: list[Any], engine: Engine, items: list[Item], options: ScoreOptions) -> None:
    """Within TOLERANCE of that engine, and for top-k and gathered ones in the half precision of the wire."""
    expected = split(engine.score(items, options), [item.positions for item in items])
    for result, scores in zip(results, expected, strict=True):
        assert isinstance(result, Scored)
        truth = scored(result.id, scores, "f4")
        for name in ("logprob", "topk_ids", "topk_logprob", "gathered", "entropy", "hidden"):
            got, want = getattr(result, name), getattr(truth, name)
            assert (got is None) == (want is None), name
            if got is not None:
                bounds = {"rtol": 1e-3 if got.dtype == "f2" else 0, "atol": TOLERANCE}
                np.testing.assert_allclose(unpack(got), unpack(want), **bounds, err_msg=name)


@pytest.fixture(scope="module")
def plain(folder: Path, experts: Path) -> dict[str, Engine]:
    """Engine "transformers" by the URL whose teacher has the same model."""
    dense, mixture = (build(TeacherConfig(path=str(path)), VOCAB) for path in (folder, experts))
    return {"workers": dense, "pools": dense, "experts": mixture}


@pytest.mark.parametrize("where", ["workers", "experts"])
async def test_scores_of_two_workers_and_of_experts_equal_those_of_transformers(
    urls: Urls, plain: dict[str, Engine], where: str
) -> None:
    (wire, items), truth = sequences(), plain[where]
    want = Want(topk=5, entropy=True, hidden=True, temperature=0.7)
    async with TeacherClient("v", [urls[where]]) as client:
        check((await client.score(wire, want)).results, truth, items, EVERYTHING)
        head = await client.head()
    np.testing.assert_array_equal(unpack(head.weight), unpack(truth.head().weight))


async def test_requests_that_overlap_get_their_own_scores(urls: Urls, plain: dict[str, Engine]) -> None:
    wire, items = sequences()
    async with TeacherClient("v", [urls["workers"]]) as client:
        answers = await asyncio.gather(*(client.score([one], Want(topk=2)) for one in wire * 4))
    check([result for (result,), _ in answers], plain["workers"], items * 4, TOP2)


async def test_data_parallel_engines_share_the_sequences_of_a_batch(
    folder: Path, plain: dict[str, Engine], tmp_path: Path
) -> None:
    with closing(Processes(tmp_path)) as processes:
        url = processes.teacher(folder, engine_args=ENGINE_ARGS | {"data_parallel_size": 2})
        processes.up()
        computing = ["VLLM::DPCoordinator", "VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1"]
        assert sorted(processes.started_by_first()) == computing, "none has workers apart"
        wire, items = sequences()
        async with TeacherClient("v", [url]) as client:
            check((await client.score(wire, Want(topk=2))).results, plain["workers"], items, TOP2)


def test_scores_of_a_stock_server_by_url_equal_those_of_transformers(
    urls: Urls, plain: dict[str, Engine], folder: Path
) -> None:
    config = TeacherConfig(path=str(folder), dtype="float32", engine="vllm", engine_url=urls["pools"])
    teacher = build(config, VOCAB)
    assert teacher.engine_info.max_length == LONGEST
    _, items = sequences()
    got, expected = (engine.score(items, EVERYTHING) for engine in (teacher, plain["pools"]))
    for name in EngineScores.__slots__:
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=TOLERANCE, err_msg=name)
    teacher.close()


async def test_completions_of_the_generating_server_have_the_scores_of_the_teacher(urls: Urls) -> None:
    async with TeacherClient("v", [urls["workers"]]) as client:
        await check_completions_score_alike(client, VOCAB)
    async with TeacherClient("v", [urls["experts"]]) as client:
        with pytest.raises(RemoteError, match="cannot give 'generate'"):
            await check_completions_score_alike(client, VOCAB)


def test_a_teacher_in_bf16_on_a_processor_with_amx_uses_another_kernel(folder: Path) -> None:
    """AMX is simulated (tests/support/amx): without the mend SIGILL ends this where there is none."""
    program = f"""
import os, numpy as np
from teacher_service.config import TeacherConfig
from teacher_service.engines import build
from teacher_service.engines.base import Item, ScoreOptions
args = {{"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}}
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
