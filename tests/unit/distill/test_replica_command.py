"""The command line and the environment of a student replica."""

import json
from pathlib import Path

import pytest

from distill.config import StudentConfig
from distill.launch import replica_command
from distill.launch.replica_command import command
from sync.base.address import TOKEN_VARIABLE
from sync.base.errors import ConfigError
from sync.base.settings import REPLICA_VARIABLE, ReplicaConfig

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
REPLICA = ReplicaConfig(run="r", store_path=Path("store"), mirror=Path("mirrors/0"))


@pytest.fixture(params=[True, False], ids=["cpu", "cuda"])
def cpu(request, monkeypatch):
    monkeypatch.setattr(replica_command, "runs_on_cpu", lambda: request.param)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return request.param


def built(index=0, host="127.0.0.1", replica=REPLICA, **config) -> tuple[list[str], dict[str, str]]:
    return command(StudentConfig(path="m", **config), replica, index, host, 8000)


def test_the_line_holds_what_correctness_needs_and_what_the_user_adds(cpu):
    args = {"tensor_parallel_size": 2, "--enforce-eager": True, "seed": 9, "allowed-origins": ["a", "b"]}
    line, _ = built(3, engine_args=args)
    assert line[1:3] == ["-m", "sync.vllm.plugin"]
    ours = (
        "--model=m --dtype=bfloat16 --host=127.0.0.1 --port=8000 --logprobs-mode=processed_logprobs "
        "--no-enable-prefix-caching --middleware=sync.vllm.middleware.ReplicaMiddleware "
        "--worker-extension-cls=sync.vllm.engine.WorkerExtension"
    )
    for word in (*ours.split(), "--tensor-parallel-size=2", "--enforce-eager", "--seed=9"):
        assert line.count(word) == 1
    assert line[(at := line.index("--allowed-origins")) : at + 3] == ["--allowed-origins", "a", "b"]
    assert json.loads(line[line.index("--weight-transfer-config") + 1]) == {"backend": "distill"}
    assert json.loads(line[line.index("--hf-overrides") + 1]) == ({} if cpu else {"head_dtype": "float32"})
    assert not any(word.startswith("--distributed-executor-backend") for word in line)


def test_logits_are_fp32_on_gpus_unless_the_users_overrides_say_otherwise(cpu):
    ours = {} if cpu else {"head_dtype": "float32"}
    for given in ({"rope_theta": 1.0}, {"head_dtype": "model"}):
        line, _ = built(engine_args={"hf_overrides": given})
        assert line.count("--hf-overrides") == 1
        assert json.loads(line[line.index("--hf-overrides") + 1]) == ours | given


def test_only_the_cpu_build_gets_the_settings_of_the_cpu(cpu):
    line, environment = built()
    assert ("--distributed-executor-backend=uni" in line) == cpu
    assert ("--gpu-memory-utilization=0.2" in line) == cpu
    assert ("--enforce-eager" in line) == cpu, "compiling takes minutes and gains nothing there"
    assert (f"--kv-cache-memory-bytes={1 << 30}" in line) == cpu
    assert "--kv-cache-memory-bytes=9" in built(engine_args={"kv-cache-memory-bytes": 9})[0]
    assert RUNNER not in environment, "the model runner that vLLM prefers"
    assert not any("routed-experts" in word for word in line)
    assert ("TORCHDYNAMO_DISABLE" in environment) == cpu, "vLLM would compile its sampler's helpers"
    assert "TORCHDYNAMO_DISABLE" not in built(engine_args={"enforce-eager": False})[1]
    assert "--gpu-memory-utilization=0.5" in built(engine_args={"gpu-memory-utilization": 0.5})[0]


def test_the_environment_is_quiet_safe_and_the_users_last_and_replicas_sample_differently(cpu):
    words, environment = built(1, env={"OMP_NUM_THREADS": "7", "MINE": "x"})
    assert (environment["OMP_NUM_THREADS"], environment["MINE"]) == ("7", "x")
    assert (environment["PYTHONSAFEPATH"], environment["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert "--seed=1" in words
    assert "--seed=0" in built(0)[0]


def test_the_token_is_inherited_and_written_nowhere(cpu, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    line, environment = built(host="0.0.0.0")
    assert "sesame" not in " ".join(line) + str(environment)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"engine_args": {"host": "0.0.0.0"}}, r"student\.host"),
        ({"engine_args": {"trust_remote_code": True}}, r"student\.trust_remote_code"),
        ({"engine_args": {"logprobs-mode": "raw_logprobs"}}, "processed_logprobs"),
        ({"engine_args": {"data_parallel_size": 2}}, r"data-parallel-size' makes.*set student\.replicas"),
        ({"engine_args": {"api-server-count": 2}}, "api-server-count"),
        ({"engine_args": {"hf-overrides": '{"a": 1}'}}, '"hf-overrides" must be one table'),
        ({"engine_args": {"hf-overrides.a": 1}}, '"hf-overrides" must be one table'),
        ({"engine_args": {"disable_log_stats": True}}, r"disable-log-stats.*stall_timeout.*leave it out"),
        ({"host": "0.0.0.0"}, TOKEN_VARIABLE),
    ],
)
def test_what_would_be_wrong_is_refused_with_its_remedy(cpu, config, says):
    with pytest.raises(ConfigError, match=says):
        built(**config)


def test_revision_and_remote_code_are_passed_when_set(cpu):
    line, _ = built(revision="abc", trust_remote_code=True)
    assert {"--revision=abc", "--tokenizer-revision=abc", "--trust-remote-code"} <= set(line)
    assert not any("revision" in word or "trust" in word for word in built()[0])


def test_a_missing_or_malformed_configuration_is_named(monkeypatch):
    monkeypatch.delenv(REPLICA_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="not set"):
        ReplicaConfig.from_environment()
    monkeypatch.setenv(REPLICA_VARIABLE, '{"run": 1}')
    with pytest.raises(ConfigError, match="mirror"):
        ReplicaConfig.from_environment()


def test_a_replica_of_a_lora_run_takes_one_adapter_of_the_next_rank_that_vllm_has(cpu):
    line, environment = built(replica=REPLICA.model_copy(update={"lora_rank": 20}))
    words = [word for word in line if "lora" in word]
    assert words == ["--enable-lora", "--max-loras=1", "--max-lora-rank=32"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment
    assert not [word for word in built()[0] if "lora" in word]


def test_a_rank_beyond_the_engines_is_refused_and_the_flags_are_not_the_users(cpu):
    with pytest.raises(ConfigError, match=r"rank is 513.*512"):
        built(replica=REPLICA.model_copy(update={"lora_rank": 513}))
    with pytest.raises(ConfigError, match="must stay 8"):
        built(replica=REPLICA.model_copy(update={"lora_rank": 8}), engine_args={"max-lora-rank": 64})


@pytest.mark.parametrize("key", ["enable-return-routed-experts", "enable_return_routed_experts"])
def test_routes_of_experts_are_refused_where_no_model_runner_returns_them(cpu, key):
    if cpu:
        with pytest.raises(ConfigError, match=r"routed-experts'.* without Triton do: leave it out"):
            built(engine_args={key: True})
    else:
        assert "--enable-return-routed-experts" in built(engine_args={key: True})[0]
    assert "--no-enable-return-routed-experts" in built(engine_args={key: False})[0]


@pytest.mark.parametrize(
    ("env", "keeps_cache", "native"),
    [({}, False, None), ({}, True, False), ({RUNNER: "1"}, False, True), ({RUNNER: "0"}, False, False)],
)
def test_routes_are_recorded_by_the_engine_where_its_second_runner_runs_and_no_cache_outlives_a_swap(
    cpu, env, keeps_cache, native
):
    native = not cpu if native is None else native
    replica = REPLICA.model_copy(update={"routes": True, "keeps_cache": keeps_cache})
    words, environment = built(replica=replica, env=env)
    if native:
        assert {"--enable-return-routed-experts", "--enable-prefix-caching"} <= {*words}
        assert ("--enforce-eager" in words) == cpu
        assert environment.get(RUNNER) == env.get(RUNNER)
    else:
        assert {"--enforce-eager", "--no-enable-prefix-caching"} <= {*words}
        assert "--enable-return-routed-experts" not in words
        assert environment[RUNNER] == "0"
    fixed = (
        {"enable-prefix-caching": True} if native else {"enable-prefix-caching": False, "enforce-eager": True}
    )
    for name, value in fixed.items():
        with pytest.raises(ConfigError, match=f"'{name}' must stay {value}"):
            built(replica=replica, env=env, engine_args={name: not value})
