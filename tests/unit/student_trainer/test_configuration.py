"""DeepSpeed's JSON with overrides, what ranks can share, the launcher's command line, objectives' needs."""

from __future__ import annotations

import base64
import json
import math
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from student_trainer import launch, parallelism
from student_trainer.config import TrainerConfig
from student_trainer.deepspeed_json import deepspeed_config, in_bf16
from student_trainer.engine import head_shape
from student_trainer.launch import check_reach, read_hosts, write_environment
from student_trainer.objectives import config as objectives
from student_trainer.objectives.config import Full, Sampled, TopK, needs
from student_trainer.objectives.divergences import Discount, build, discount
from sync.base.address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, token_from_environment
from sync.base.errors import ConfigError
from sync.base.own_code import CODE_VARIABLE
from sync.wire import Want

JSONS = sorted((Path(__file__).parents[3] / "configs/deepspeed").glob("*.json"))


AUTO = "auto"


def config(path: Path = JSONS[0], **trainer: Any) -> TrainerConfig:
    settings = {"deepspeed": str(path), **trainer}
    base = {"run": "r", "run_dir": "r", "controller_url": "http://c", "student": {"path": "s"}, "steps": 1}
    return TrainerConfig.model_validate({**base, "trainer": settings})


def merged(path: Path = JSONS[0], **trainer: Any) -> dict[str, Any]:
    return deepspeed_config(config(path, **trainer).trainer)


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_every_deepspeed_json_of_the_project_is_accepted(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    assert DeepSpeedConfig(merged(path)).zero_config.stage == 3


@pytest.mark.parametrize(
    "overrides",
    [{"optimizer.params": {"eps": 0.5}}, {"optimizer.params.eps": 1, "optimizer": {"params.eps": 0.5}}],
)
def test_overrides_reach_any_field_however_its_path_is_written_and_keep_the_rest(
    overrides: dict[str, Any],
) -> None:
    expected = merged()
    expected["optimizer"]["params"] |= {"eps": 0.5, "lr": 0.25}
    expected["activation_checkpointing"] = {"partition_activations": True}
    more = {"activation_checkpointing.partition_activations": True}
    assert merged(overrides=overrides | more, lr=0.25) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"zero_optimization": 3}, "stage is None"),
        ({"zero_optimization.stage": 2}, "stage is 2"),
        ({"fp16.enabled": True}, "fp16 skips steps"),
        ({"bf16.enabled": AUTO, "optimizer.params.betas": AUTO}, r'bf16\.enabled, .*betas is "auto".*write'),
        ({"gradient_accumulation_steps": AUTO}, "steps is 'auto': rollout.batch decides this.* leave"),
        ({"train_batch_size": AUTO, "bf16.enabled": AUTO}, "train_batch_size is 'auto': rollout.batch dec"),
        ({"bf16.enabled": "false"}, r"bf16\.enabled is 'false': write true or false"),
        ({"zero_optimization.offload_param.device": "nvme"}, "offload_param.device is 'nvme'.*set cpu"),
        ({"zero_optimization.cpu_offload": True}, r"cpu_offload is True, .*\.offload_optimizer\.device"),
        ({"zero_optimization.cpu_offload_param": True}, r"_param is True, .*\.offload_param\.device"),
        ({"lr": 5e-4}, r"lr is 0\.0005: trainer\.lr decides this alone"),
        ({"optimizer.params.lr": 5e-4}, r"optimizer\.params\.lr is 0\.0005: trainer\.lr decides"),
        ({"optimizer.params.betta": 0.9}, r"optimizer\.params\.betta is unknown to AdamW: .* 'betas'"),
        ({"optimizer.type": "Lion"}, r"params\.eps is unknown to Lion.*\.torch_adam is unknown to Lion"),
        ({"optimizer": {"type": "AdmW"}}, "'AdmW' is unknown: did you mean 'AdamW'"),
        ({"scheduler.type": "WarmupLR"}, r"scheduler is .*'WarmupLR'.*set trainer\.lr_schedule"),
        ({"gradient_cliping": 1.0}, "cliping is not read by DeepSpeed: did you mean 'gradient_clipping'"),
        ({"data_types.grad_acum_dtype": "fp32"}, r"data_types\.grad_acum_dtype .* mean 'grad_accum_dtype'"),
        ({"activation_checkpointing.profil": True}, "did you mean 'profile'"),
        ({"zero_optimization.reduce_bucket": 9}, r"refused by DeepSpeed.*\n.*reduce_bucket"),
        ({"amp.enabled": True}, "refused by DeepSpeed: NVIDIA Apex"),
        ({"gradient_clipping.value": 1.0}, "'gradient_clipping' is 1.0"),
        ({"sequence_parallel_size": 2}, r"trainer\.sequence_parallel decides this alone"),
        ({"expert_parallel.enabled": True}, r"trainer\.expert_parallel decides this alone"),
    ],
)
def test_what_the_trainer_cannot_work_with_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merged(overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"zero_optimization.offload_param.device": "cpu"}, "offload_param is set and .*is 2: AutoEP"),
        ({"zero_optimization.offload_optimizer.device": "cpu"}, "offload_optimizer is set and .*: AutoEP"),
        ({"use_data_before_expert_parallelism": True}, "neighbouring ranks share experts, leave it out"),
    ],
)
def test_what_ranks_that_share_experts_cannot_work_with_is_refused(
    overrides: dict[str, Any], message: str
) -> None:
    merged(expert_parallel=2)
    with pytest.raises(ConfigError, match=message):
        merged(overrides=overrides, expert_parallel=2)


QWEN = {"model_type": "qwen3_moe", "num_experts": 6}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default"}}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CHUNKED = {"layer_types": ["chunked_attention"] * 2}
BY_KIND = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}


def problems(asked: dict[str, Any], model: dict[str, Any], world: int | None) -> list[str]:
    return [*parallelism.problems(config(**asked).trainer, SimpleNamespace(**model), world)]


@pytest.mark.parametrize(
    ("asked", "model", "named"),
    [
        ({}, LINEAR, r"of the kind linear_attention, through which rows.* set trainer\.packing = \"padded\""),
        ({"expert_parallel": 3}, QWEN, "is 3 and the trainer has 4 ranks: it must divide them"),
        ({"expert_parallel": 4}, QWEN, "has 6 experts a layer"),
        ({"expert_parallel": 2, "lora": {}}, QWEN, "is 2 and trainer.lora is set"),
        ({"expert_parallel": 2}, {"model_type": "qwen3"}, "the student is a qwen3: DeepSpeed's AutoEP"),
        ({"sequence_parallel": 8}, LLAMA, "is 8 and the trainer has 4 ranks: it must divide them"),
        ({"attention": "flash_attention_2"}, LLAMA, "heads are exchanged for sdpa and eager alone"),
        ({"packing": "padded"}, LLAMA | CHUNKED, "of the kind chunked_attention, which"),
        ({}, LLAMA | {"rope_parameters": {"rope_type": "dynamic"}}, "is of the type dynamic, which follows"),
        ({}, LLAMA | {"rope_parameters": BY_KIND}, "rotary embedding is of the type longrope"),
        ({}, LLAMA | {"num_attention_heads": 6}, "has 6 attention heads: it must divide them"),
        ({}, LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 3}, "has 3 heads of keys and values"),
    ],
)
def test_what_ranks_cannot_pack_split_or_share_is_named(
    asked: dict[str, Any], model: dict[str, Any], named: str
) -> None:
    four = {"sequence_parallel": 4} if "num_attention_heads" in model else {}
    (problem,) = problems(four | asked, model, 4)
    assert re.search(named, problem)


def test_what_ranks_can_pack_split_and_share() -> None:
    for world in (4, 8, None):
        assert problems({"expert_parallel": 2}, QWEN, world) == []
        assert problems({"sequence_parallel": 4, "attention": "eager"}, LLAMA, world) == []
    assert problems({"attention": "flash_attention_2"}, LLAMA | {"num_attention_heads": 3}, 3) == []


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_trainer_computes_in_the_precision_of_deepspeed(tmp_path: Path, name: str, enabled: bool) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(JSONS[0].read_text())
    content.pop("bf16", None)
    (tmp_path / "ds.json").write_text(json.dumps(content | {name: {"enabled": enabled}}))
    found = merged(tmp_path / "ds.json")
    assert in_bf16(found) is DeepSpeedConfig(found).bfloat16_config.enabled is enabled


def test_every_field_that_deepspeed_reads_is_accepted() -> None:
    muon = {"muon_lr": 0.02, "momentum": 0.9, "torch_adam": True}
    adam = {"adam_w_mode": False, "amsgrad": True, "torch_adam": False, "lr": 3e-6}  # as trainer.lr says
    for optimizer in ({"type": "Muon", "params": muon}, {"type": "AdamW", "params": adam}):
        merged(overrides={"optimizer": optimizer})
    others = {"aio.block_size": 1, "comms_logger.enabled": False, "compile.deepcompile": False}
    others |= {"data_types.keep_in_fp32_modules": "auto", "tensorboard.job_name": "auto"}
    others |= {"pipeline.stages": "auto", "hybrid_engine.enabled": False, "communication_data_type": "fp32"}
    others |= {"zero_optimization.offload_optimizer.ratio": 0.5, "zero_allow_untested_optimizer": True}
    merged(overrides={**others, "checkpoint.tag_validation": "Warn", "tensorboard.enabled": False})


def test_a_missing_or_broken_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read \(No such file"):
        merged(tmp_path / "missing.json")
    whys = {"{": "is not JSON", "[]": "must be a JSON object", "{}": "stage is None"}
    for text, why in (whys | {'{"zero_optimization": {"stage": 3}}': "no optimizer section"}).items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=why):
            merged(tmp_path / "bad.json")


def started_on(argv: list[str]) -> Any:
    """Machine → device of each rank, as deepspeed reads it."""
    return json.loads(base64.urlsafe_b64decode(argv[argv.index("--world_info") + 1]))


def test_the_launcher_gets_ranks_module_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    argv, env = launch.command(config(ranks=3, threads=2, env={"A": "b"}), Path("t.json"))
    assert argv[1:3] == ["-m", "student_trainer.launch"]
    assert started_on(argv) == {"node-0": ["0", "1", "2"]}
    assert argv[-4:] == ["--module", "student_trainer", "--config", "t.json"]
    ours = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    assert env.items() >= (ours | {"GLOO_SOCKET_IFNAME": "lo", "A": "b"}).items()


def test_a_hostfile_goes_to_the_launcher_with_the_variables_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_TOKEN", raising=False)
    inherited = (TOKEN_FILE_VARIABLE, CODE_VARIABLE)
    for name in inherited:
        monkeypatch.setenv(name, "/shared")
    (tmp_path / "hosts").write_text("node-1 slots=2\nnode-2 slots=2\n")
    far = config(hostfile=tmp_path / "hosts", threads=2, env={"A": "b"})
    far = far.model_copy(update={"controller_url": "http://10.0.0.1:8000"})
    argv, env = launch.command(far, tmp_path / "trainer.json")
    assert argv[1:5] == ["-m", "student_trainer.launch", "--hostfile", str(tmp_path / "hosts")]
    assert env["DS_ENV_FILE"] == str(tmp_path / "trainer.env")
    told = (tmp_path / "trainer.env").read_text().splitlines()
    assert {"OMP_NUM_THREADS=2", "OMP_WAIT_POLICY=PASSIVE", "PYTHONSAFEPATH=1", "A=b"} <= set(told)
    assert {f"{name}=/shared" for name in inherited} <= set(told)
    assert "MALLOC_MMAP_MAX_=0" in told, "ranks on other machines keep their memory too"


def test_ranks_of_several_machines_meet_at_another_port_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(arguments: list[str]) -> None:
        started.append(arguments)
        with pytest.raises(OSError, match="in use"):  # rank 0 does not listen there yet
            socket.create_server(("127.0.0.1", int(arguments[1])))
        if len(started) == 1:  # another trainer starts beside this one
            launch.main()

    monkeypatch.setattr("deepspeed.launcher.runner.main", run)
    monkeypatch.setattr(sys, "argv", ["launch", "--hostfile", "hosts", "--module", "m"])
    launch.main()
    assert started[0][1] != started[1][1]
    assert [words[2:] for words in started] == [["--hostfile", "hosts", "--module", "m"]] * 2


def test_devices_are_passed_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    argv, _ = launch.command(config(ranks=2, devices="4,6"), Path("t.json"))
    assert started_on(argv) == {"node-0": ["4", "6"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    argv, _ = launch.command(config(ranks=2), Path("t.json"))
    assert started_on(argv) == {"node-0": ["1", "2"]}
    with pytest.raises(ConfigError, match="every rank needs a device"):
        launch.command(config(ranks=2, devices="4"), Path("t.json"))


def test_ranks_of_several_machines_meet_on_their_controllers_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one = config(ranks=2, nodes=3).model_copy(update={"controller_url": "http://127.0.0.1:1"})
    argv, env = launch.command(one, Path("t.json"), 1, "http://[fd00::1]:1234")
    assert argv[3:7] == [launch.MEETING, "fd00::1", "--master_port", "1234"]
    assert started_on(argv) == {"node-0": ["0", "1"], "node-1": ["4", "5"], "node-2": ["0", "1"]}
    assert argv[argv.index("--node_rank") + 1] == "1"
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch.command(one, Path("t.json"), 1, "http://a:1")[1]["GLOO_SOCKET_IFNAME"] == "eth7"
    with pytest.raises(ValidationError, match="nodes is 2 and hostfile is hosts: machines meet through"):
        config(nodes=2, hostfile=Path("hosts"))


def test_every_objective_has_a_divergence_and_states_its_needs() -> None:
    wants = [
        (Sampled(), Want(entropy=True), 0),
        (TopK(k=7), Want(topk=7, entropy=True), 0),
        (objectives.StudentTopK(k=5), Want(entropy=True), 5),
        (objectives.ForwardTopK(k=9), Want(topk=9, entropy=True), 0),
        (Full(), Want(hidden=True), 0),
        (objectives.JSD(), Want(hidden=True), 0),
        (objectives.SkewReverse(), Want(hidden=True), 0),
        (objectives.SFT(), Want(entropy=True), 0),
    ]
    for objective, want, k in wants:
        assert callable(build(objective))
        assert needs(objective) == want
        assert objectives.student_topk(objective) == k
    assert discount(TopK(discount=0.5, rho_cap=2.0)) == Discount(0.5, 2.0, None)
    assert discount(TopK()) == Discount(0.0, 5.0, None), "1 within segments of text"
    assert discount(Full()) is None


def test_head_shapes_of_model_families() -> None:
    from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, xLSTMConfig

    assert head_shape(LlamaConfig(), 9, 0.5).temperature == 0.5
    assert head_shape(LlamaConfig(), 9, 1.0).scale == 1.0
    assert head_shape(CohereConfig(logit_scale=0.25), 9, 1.0).scale == 0.25
    assert head_shape(GraniteConfig(logits_scaling=8.0), 9, 1.0).scale == 0.125
    assert head_shape(Gemma2Config(), 9, 1.0).soft_cap == 30.0
    assert head_shape(xLSTMConfig(), 9, 1.0).soft_cap == 30.0


def test_infinity_in_toml_removes_a_cap() -> None:
    assert Sampled.model_validate({"rho_cap": math.inf}) == Sampled.model_validate({"rho_cap": None})
    with pytest.raises(ValidationError, match="greater than 0"):
        Sampled.model_validate({"rho_cap": 0.0})


# --- hostfiles: what is refused, and what reaches the other machines ----------------------------------------


LOOPBACK, REACHED = "http://127.0.0.1:8000", "http://10.0.0.1:8000"


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_the_machines_of_a_hostfile_are_read_and_a_missing_one_is_not_this_machine(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two machines\n\nnode-1 slots=8\n  node-2   slots=4  # half of it\n")
    assert read_hosts(path) == {"node-1", "node-2"}
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hosts(tmp_path / "none")


def test_other_machines_cannot_use_a_loopback_address_or_a_token_of_this_process(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "node-1 slots=8\nnode-2 slots=8\n")
    with pytest.raises(ConfigError, match=r"this machine's loopback: set controller\.host"):
        check_reach(path, LOOPBACK, {})
    with pytest.raises(ConfigError, match=f"set {TOKEN_FILE_VARIABLE} to its path"):
        check_reach(path, REACHED, {TOKEN_VARIABLE: "secret"})
    check_reach(path, REACHED, {TOKEN_FILE_VARIABLE: "/shared/token"})
    check_reach(hostfile(tmp_path, "localhost slots=8\n"), LOOPBACK, {TOKEN_VARIABLE: "secret"})


def test_neither_secrets_nor_line_breaks_travel(tmp_path: Path) -> None:
    for name, value in (("HF_TOKEN", "x"), ("URL", "http://me:hidden@host")):
        with pytest.raises(ConfigError, match=f"trainer.env.{name} looks like a secret"):
            write_environment(tmp_path / "refused.env", {name: value})
    with pytest.raises(ConfigError, match="line break"):
        write_environment(tmp_path / "refused.env", {"A": "1\nB=2"})
    assert not (tmp_path / "refused.env").exists()


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    return tmp_path / "token"


def test_the_token_is_read_from_a_file_when_the_variable_is_unset(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        token_from_environment()
    token_file.write_text("of the file\n")
    assert token_from_environment() == "of the file"
    monkeypatch.setenv(TOKEN_VARIABLE, " of the process\n")
    assert token_from_environment() == "of the process"


@pytest.mark.parametrize(
    ("secret", "why"),
    [(b"\n", "is empty"), (b"\xff\xfe", "printable ASCII"), (b"two\nlines", "printable ASCII")],
)
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(
    token_file: Path, secret: bytes, why: str
) -> None:
    token_file.write_bytes(secret)
    with pytest.raises(ConfigError, match=why) as refused:
        token_from_environment()
    assert secret.decode("utf-8", "replace") not in str(refused.value)
