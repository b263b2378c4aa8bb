"""Command line of a student replica: vLLM's server with our plugin, guard and routes in it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

from distill.config import StudentConfig
from distill.preflight_checks.machine import runs_on_cpu
from sync.base.address import is_loopback, token_from_environment
from sync.base.errors import ConfigError
from sync.base.memory import THREADS, sharing
from sync.base.settings import ReplicaConfig
from sync.weights.snapshots.checkpoint import vllm_formats
from sync.wire.server import ON_LOOPBACK, check_bind

_OURS: Final[dict[str, Any]] = {
    "middleware": "sync.vllm.middleware.ReplicaMiddleware",
    "worker-extension-cls": "sync.vllm.engine.WorkerExtension",
    "weight-transfer-config": {"backend": "distill"},
    "logprobs-mode": "processed_logprobs",
}
"""Flags that correctness depends on; users cannot change them."""
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for max-lora-rank."""
_FIELDS: Final = {
    "model": "path",
    **{key.replace("_", "-"): key for key in ("revision", "trust_remote_code", "dtype", "host", "port")},
}
"""Flags with a field of their own in [student]."""
_HARMFUL: Final = {
    "api-server-count": "makes servers with a state of their own behind one address: leave it out",
    "disable-log-stats": "takes vLLM's count of tokens from rollout.stall_timeout_seconds: leave it out",
}
_DATA_PARALLEL: Final = (
    "makes engines of which one alone reports whether it loaded a version: set student.replicas instead, "
    "with an entry of student.devices for each"
)
_SECOND_RUNNER_ALONE: Final = {
    "enable-return-routed-experts": "needs vLLM's second model runner, and this replica runs the first, as "
    "all without Triton do: leave it out"
}
_DEFAULTS: Final[dict[str, Any]] = {
    "max-logprobs": -1,
    "enable-prefix-caching": False,
    "disable-uvicorn-access-log": True,
}
_CPU_DEFAULTS: Final[dict[str, Any]] = {
    "gpu-memory-utilization": 0.2,
    "enforce-eager": True,
    "kv-cache-memory-bytes": 1 << 30,
}
_OVERRIDES: Final = "hf-overrides"
_FP32_LOGITS: Final = {"head_dtype": "float32"}
"""Of `_OVERRIDES` on GPUs, unless the user sets it: the trainer's logits are fp32, those of vLLM rounded to
bf16. On CPUs both are rounded, and vLLM would convert the head at every decode step."""
_PARALLEL: Final = {"tensor-parallel-size", "pipeline-parallel-size", "distributed-executor-backend"}
_ENVIRONMENT: Final = {
    "PYTHONSAFEPATH": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
_CPU_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_NATIVE_ROUTES: Final[dict[str, Any]] = {"enable-return-routed-experts": True, "enable-prefix-caching": True}
"""Flags of a replica whose engine records routes itself. It needs a prefix cache, which requests that ask for
routes do not read."""
_OWN_ROUTES: Final[dict[str, Any]] = {"enforce-eager": True, "enable-prefix-caching": False}
"""Flags of a replica whose routes we record: a compiled pass tells nobody what it chose, and what is read
from the cache is not routed again."""
_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable of vLLM: "0" is its first model runner, whose routes we can record, "1" its second, which records
them itself. vLLM prefers the second where Triton is."""
_EAGER: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it vLLM compiles helpers of its sampler even with --enforce-eager: 6 s of each start on a CPU."""


def command(
    config: StudentConfig, replica: ReplicaConfig, index: int, host: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """Command line of replica `index`, and the variables to add to this process's environment.

    The child inherits the bearer token. Raises ConfigError for a reserved engine argument, and when `host`
    needs a token.
    """
    check_bind(host, token_from_environment())
    cpu, user = runs_on_cpu(), config.flags()
    second = config.env.get(_RUNNER, "0" if cpu else "1") != "0"
    routes, runner = dict[str, Any](), dict[str, str]()
    if replica.routes:
        native = second and not replica.keeps_cache
        routes, runner = (_NATIVE_ROUTES, {}) if native else (_OWN_ROUTES, {_RUNNER: "0"})
    ours = _OURS | _adapters(replica.lora_rank) | routes
    _refuse_reserved(user, ours, {} if second else _SECOND_RUNNER_ALONE)
    arguments: dict[str, Any] = {
        "model": config.path,
        "dtype": config.dtype,
        "host": host,
        "port": port,
        "seed": index,
        **_DEFAULTS,
        **(_CPU_DEFAULTS if cpu else {}),
        **vllm_formats(config.path),
        **user,
        _OVERRIDES: _overrides(user, cpu),
        **ours,
    }
    if config.revision is not None:
        for name in ("revision", "tokenizer-revision", "code-revision"):
            arguments.setdefault(name, config.revision)
    if config.trust_remote_code:
        arguments["trust-remote-code"] = True
    if cpu and not _PARALLEL & user.keys():
        arguments["distributed-executor-backend"] = "uni"
    words = [word for name, value in arguments.items() for word in flags(name, value)]
    return [sys.executable, "-m", "sync.vllm.plugin", *words], {
        **(ON_LOOPBACK if is_loopback(host) else {}),
        **_ENVIRONMENT,
        **(_CPU_ENVIRONMENT | {THREADS: os.environ.get(THREADS) or "1"} if cpu else {}),
        **sharing(config.threads),
        **(_EAGER if cpu and arguments["enforce-eager"] is True else {}),
        **runner,
        **replica.environment(),
        **config.env,
    }


def flags(name: str, value: Any) -> list[str]:
    """Words of an engine argument: true → bare flag, false → --no-flag, list → a word each, table → JSON."""
    match value:
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case list():
            return [f"--{name}", *map(str, value)]
        case dict():
            return [f"--{name}", json.dumps(value)]
    return [f"--{name}={value}"]


def _adapters(rank: int | None) -> dict[str, Any]:
    """Flags of a replica that serves adapters of `rank`: one at a time, through our update route alone."""
    if rank is None:
        return {}
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(f"trainer.lora.rank is {rank}: vLLM serves adapters up to rank {_LORA_RANKS[-1]}")
    return {
        "enable-lora": True,
        "max-loras": 1,
        "max-lora-rank": next(bound for bound in _LORA_RANKS if bound >= rank),
    }


def _overrides(user: dict[str, Any], cpu: bool) -> dict[str, Any]:
    """The user's changes of the model's configuration, and ours."""
    overrides = user.get(_OVERRIDES, {})
    if not isinstance(overrides, dict) or any(name.startswith(f"{_OVERRIDES}.") for name in user):
        raise ConfigError(
            'student.engine_args: "hf-overrides" must be one table, since head_dtype = "float32" joins it: '
            'write "hf-overrides" = {name = value}'
        )
    return overrides if cpu else _FP32_LOGITS | overrides


def _refuse_reserved(user: dict[str, Any], ours: dict[str, Any], more: dict[str, str]) -> None:
    """`more`: flags that are harmful besides those of `_HARMFUL`."""
    fixed = {name: f"has a field of its own: set student.{key} instead" for name, key in _FIELDS.items()}
    for name, value in ours.items():
        if user.get(name, value) != value:
            fixed[name] = f"must stay {value!r} for weights and log-probabilities to be right: leave it out"
    harmful = _HARMFUL | more
    for name, value in user.items():
        if name.startswith(("data-parallel", "dp")) and value not in (1, False):
            harmful[name] = _DATA_PARALLEL
        if reason := fixed.get(name) or (value and harmful.get(name)):
            raise ConfigError(f"student.engine_args: {name!r} {reason}")
