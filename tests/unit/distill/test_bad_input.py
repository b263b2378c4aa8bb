"""Each bad input through the real command line: one message, exit status 2, nothing started or left."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from command import left

from distill.launch.preflight import check_arguments
from distill.preflight_checks import machine
from distill.tasks.sort_letters import STUDENT, TEACHER, VOCABULARY, letter_tokenizer
from distill.tasks.teaching import new_model

ROOT = Path(__file__).parents[3]
Distill = Callable[..., str]
Altered = Callable[[str, str, object], None]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """student/ and teacher/ with random weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, recipe in {"student": STUDENT, "teacher": TEACHER}.items():
        new_model(recipe, letter_tokenizer()).save_pretrained(folder / name)
        letter_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(autouse=True)
def vllm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes seconds; two tests ask it."""
    monkeypatch.setattr("distill.launch.preflight.check_arguments", lambda _: None)


@pytest.fixture
def distill(models: Path, tmp_path, monkeypatch, capsys) -> Distill:
    """Run a command on the quickstart's configuration; the message it leaves with.

    HERE is the test's folder, in the command's words and in the message, MODELS that of the models.
    """
    monkeypatch.chdir(ROOT)
    ours = ["student.path=MODELS/student", "teachers.sorter.path=MODELS/teacher", "run.folder=HERE/runs"]

    def command(
        *overrides: str, name: str = "run", status: int = 2, more: tuple[str, ...] = (), writes: bool = False
    ) -> str:
        settings = [word for override in [*ours, *overrides] for word in ("--set", override)] + [*more]
        words = [word.replace("MODELS", str(models)).replace("HERE", str(tmp_path)) for word in settings]
        code, captured = left(name, "configs/quickstart.toml", *words), capsys.readouterr()
        assert code == status, captured
        assert "Traceback" not in captured.err
        assert writes or not list(tmp_path.glob("runs/*/run.db"))
        return (captured.err if status else captured.out).replace(str(tmp_path), "HERE")

    return command


@pytest.fixture
def altered(models: Path, tmp_path: Path) -> Altered:
    """Copy a model to HERE/m, with a file that has other bytes, a slice of its own, or keys over its own."""

    def copy(model: str, file: str, content: object) -> None:
        path = shutil.copytree(models / model, tmp_path / "m") / file
        before = path.read_bytes() if path.is_file() else b"{}"
        match content:
            case bytes():
                path.write_bytes(content)
            case slice():
                path.write_bytes(before[content])
            case dict():
                path.write_text(json.dumps(json.loads(before) | content))

    return copy


READY = "ready to run; endless prompts, 512 held out"


def test_good_input_is_told_to_be_ready(distill: Distill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.launch.preflight.check_arguments", check_arguments)
    assert READY in distill(name="preflight", status=0)


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.top_p=0.9; rollout.top_k=4",
        "rollout.min_p=0.1; rollout.top_k=4",
        'objective={type="topk",k=4}; rollout.top_k=4',
        'objective={type="student_topk",k=4,drop_rho_outside=[0.5,2.0]}; rollout.top_k=4',
        'objective={type="topk",k=29}',
        "objective.on_policy=0.5; teachers.sorter.engine=vllm; teachers.sorter.generate_url=http://127.0.0.1:9",
    ],
)
def test_what_goes_together_is_told_to_be_ready(distill: Distill, overrides: str) -> None:
    """Each is a neighbour of what the last table refuses."""
    assert READY in distill(*overrides.split("; "), name="preflight", status=0)


def test_a_processor_that_vllm_cannot_run_on_is_refused_by_what_it_lacks(
    distill: Distill, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = machine.cpuinfo().replace(" avx2 ", " ").replace(" f16c ", " ")
    monkeypatch.setattr(machine, "cpuinfo", lambda: older)
    message = distill(name="preflight")
    assert "this processor lacks avx2, f16c, and the CPU build of vLLM, which student runs, needs" in message


@pytest.mark.parametrize("name", ["models/studnet", "studnet"])  # a folder models is here
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_refused(
    distill: Distill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = distill(f"student.path={name}")
    assert f"the tokenizer of {name!r} cannot be loaded: it is no folder here; correct `path`" in said


@pytest.mark.parametrize(
    ("key", "name", "kind"),
    [
        ("student.path", "acme/nope-1B", "model"),
        ('prompts={type="dataset",field="text",template="plain",path', "acme/nope", "dataset"),
    ],
)
def test_a_hub_that_cannot_be_reached_is_asked_once(
    distill: Distill, monkeypatch: pytest.MonkeyPatch, key: str, name: str, kind: str
) -> None:
    asked = []
    nobody = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nobody)
    ask = huggingface_hub.file_download.get_hf_file_metadata
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: asked.append(url) or ask(url))
    message = distill(f'{key}="{name}"}}' if kind == "dataset" else f"{key}={name}")
    assert f"{kind} {name!r} is no folder here, nothing of it is in" in message
    assert "Retrying" not in message
    assert len(asked) == 1


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
"""What git leaves in the place of a large file without LFS."""


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", POINTER, "it was cut or altered; copy or download it anew"),
        ("model.safetensors", slice(0, 20_000), "cannot be read as safetensors"),
        ("config.json", {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lack or have in"),
        ("config.json", {"tie_word_embeddings": False}, "with 1 tensors that its weights lack"),
        ("config.json", {"vocab_size": 99}, "such as model.embed_tokens.weight, which would"),
        ("config.json", {"model_type": "t5"}, "transformers cannot load it (ValueError: Unrecognized config"),
        ("config.json", {"dtype": "bfloat17"}, "no attribute 'bfloat17'): correct its config.json"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "is quantized (gptq), and such w"),
        ("config.json", POINTER, "is not a valid JSON file.): correct its config.json"),
        ("generation_config.json", POINTER, "has no eos_token_id that can be read (Expecting value"),
        ("generation_config.json", b"[2]", "transformers cannot load it (TypeError: "),
        ("generation_config.json", {"eos_token_id": ["2"]}, "write an id or a list of ids"),
        ("generation_config.json", {"eos_token_id": -1}, "has no eos_token_id that can be read (it is -1)"),
        ("tokenizer.json", b"{}", "cannot be loaded: save one beside the model"),
        ("tokenizer_config.json", POINTER, "cannot be loaded: save one beside the model"),
    ],
)
def test_a_model_folder_that_is_not_what_it_looks_like_is_refused(
    distill: Distill, altered: Altered, file: str, content: object, says: str
) -> None:
    altered("student", file, content)
    message = distill("student.path=HERE/m", name="preflight")
    assert says in message
    assert "HERE/m" in message


def test_a_head_beside_the_embeddings_that_it_is_tied_to_must_equal_them(
    distill: Distill, models: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    path = shutil.copytree(models / "student", tmp_path / "m") / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path, {"format": "pt"})
    assert "ready to run" in distill("student.path=HERE/m", name="preflight", status=0)
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, path, {"format": "pt"})
    message = distill("student.path=HERE/m", name="preflight")
    assert "has tie_word_embeddings, and model.embed_tokens.weight and lm_head.weight differ" in message


def test_a_teacher_of_another_vocabulary_needs_a_tokenizer_of_its_own_and_an_objective_for_it(
    distill: Distill, models: Path, altered: Altered
) -> None:
    model = json.loads((models / "teacher/tokenizer.json").read_text())["model"]
    model["vocab"] |= {"a": VOCABULARY.index("b"), "b": VOCABULARY.index("a")}
    altered("teacher", "tokenizer.json", {"model": model})
    path_is = "teachers.sorter.path=HERE/m"
    message = distill(path_is, "teachers.sorter.tokenizer=student")
    assert "have different vocabularies, 2 of 29 token ids mean other text to the teacher: " in message
    assert "is 'a' and 'b'" in message
    assert "token ids must mean the same to both" in message
    message = distill(path_is, "objective.type=full")
    assert "(it has a tokenizer of its own) gives topk, entropy" in message
    assert 'set objective.type = "topk"' in message
    message = distill(path_is, "objective.type=forward_topk")
    assert 'has a tokenizer of its own, and "forward_topk" compares single tokens' in message


def jsonl(folder: Path, rows: str) -> str:
    """An override: prompts of a file with these rows."""
    (folder / "prompts.jsonl").write_text(rows)
    return 'prompts={type="jsonl",path="HERE/prompts.jsonl",template="plain"}'


def test_another_chat_template_matters_to_prompts_that_go_through_it(
    distill: Distill, altered: Altered, tmp_path: Path
) -> None:
    altered("teacher", "chat_template.jinja", b"{{ messages[0].content }}")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    settings = [jsonl(tmp_path, '{"prompt": "abc>"}\n' * 10), "evaluation=false"]
    settings += ["teachers.sorter.path=HERE/m", "student.chat_template=HERE/mine.jinja"]
    said = distill(*settings, "prompts.template=chat", name="preflight")
    assert "have different chat templates" in said
    assert "Name the same Jinja file in student.chat_template and teachers.sorter.chat_template" in said
    assert "10 prompts to train on, 0 held out" in distill(*settings, name="preflight", status=0)


LONG = '{"prompt": "abc>"}\n{"prompt": "abcdefghi>"}\n'
TOO_LONG = "prompts.jsonl:2: the prompt has 10 tokens, allowed are 1 to 8 … lower rollout.max_tokens"


@pytest.mark.parametrize(
    ("rows", "override", "says"),
    [
        ("", "run.steps=2", "0 prompts were found"),
        (LONG, "student.engine_args.max-model-len=20", TOO_LONG),
        (LONG, "teachers.sorter.max_length=20", TOO_LONG),
        ('{"prompt": "abc>"}\n' * 9, "evaluation.prompts=2", "no prompt can be held out for evaluation"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(
    distill: Distill, tmp_path: Path, rows: str, override: str, says: str
) -> None:
    (message,) = distill(jsonl(tmp_path, rows), override, name="preflight").splitlines()
    assert all(words in message for words in says.split(" … ")), message


ELSEWHERE = "controller.host=10.0.0.1; controller.trainer=external; buffer.scores=reference"


@pytest.mark.parametrize(
    ("overrides", "says", "remedy"),
    [
        *(
            (
                f"{ELSEWHERE}; teachers.sorter.{address}",
                f"keeps scores at … teachers.sorter.{key} to an address that they reach, or buffer.scores =",
                "buffer.scores=inline",
            )
            for address, key in {
                'host="0.0.0.0"': "host",
                'host="127.0.0.1"': "host",
                'urls=["http://10.0.0.7:1", "http://[::1]:2"]': "urls",
            }.items()
        ),
        (
            "trainer.nodes=2; controller.host=0.0.0.0",
            "beside which … trainer.nodes is 2 and controller.host is 0.0.0.0",
            "controller.url=http://10.0.0.1:1",
        ),
        ("trainer.expert_parallel=2; trainer.ranks=3", "3 ranks", "controller.trainer=external"),
        (
            "student.path=HERE/m",
            "linear_attention … the student has layers of the kind linear_attention, through which rows",
            "trainer.packing=padded",
        ),
    ],
)
def test_what_cannot_work_is_refused_until_it_is_changed_as_the_message_says(
    distill: Distill, altered: Altered, monkeypatch, overrides: str, says: str, remedy: str
) -> None:
    """Addresses that no other machine reaches, ranks that do not divide, rows that cannot lie end to end."""
    monkeypatch.setenv("DISTILL_TOKEN", "t")
    altered("student", "config.json", {"layer_types": ["linear_attention", "full_attention"]})
    refused = [*overrides.split("; "), "rollout.top_p=0.5"]
    message, (first, *more) = distill(*refused), says.split(" … ")
    assert all(words in message for words in [first, *more]), message
    changed = distill(*refused, remedy)
    assert "rollout.top_p is 0.5" in changed
    assert first not in changed


def test_arguments_that_vllm_does_not_take_are_refused_in_its_words(distill: Distill, monkeypatch) -> None:
    monkeypatch.setattr("distill.launch.preflight.check_arguments", check_arguments)
    teacher = "teachers.sorter={engine='vllm',engine_args={tensor_paralel_size=2}}"
    message = distill("student.engine_args.max-model-lenn=64", teacher, name="preflight")
    assert "vLLM does not take them: unrecognized arguments: --max-model-lenn=64" in message
    assert "teachers.sorter.engine_args: vLLM's engine has no argument 'tensor_paralel_size'" in message


def test_a_head_that_no_answer_holds(distill: Distill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.preflight_checks.objective.MAX_ANSWER", 1000)
    message = distill("objective={type='full'}", name="preflight")
    assert "teachers.sorter: its output head takes 0.0 GB as it is sent, an answer holds 0.0 GB" in message
    assert "ready to run" in distill("objective={type='sampled'}", name="preflight", status=0)


def test_a_port_in_use_is_named(distill: Distill) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        message = distill(f"student.port={number}")
        assert f"student.port: port {number} of 127.0.0.1 is in use: choose another one, or 0" in message
        message = distill(f"controller.port={number}", name="preflight")
        assert f"controller.port: port {number} of 127.0.0.1 is in use" in message


@pytest.mark.parametrize("role", ["student", "teacher", "train"])
def test_a_role_alone_names_a_missing_model(distill: Distill, role: str) -> None:
    missing = [f"{place}.path=HERE/none" for place in ("student", "teachers.sorter")]
    more = ("--controller", "http://127.0.0.1:1") if role == "train" else ()
    assert "HERE/none does not exist: name a model folder" in distill(*missing, name=role, more=more)


def test_control_names_what_has_not_registered(distill: Distill) -> None:
    message = distill("run.start_seconds=1", name="control", status=1, writes=True)
    assert "teacher-sorter has not registered with the controller" in message


def test_an_optimum_that_is_not_the_teacher_is_warned_of(distill: Distill, caplog) -> None:
    for temperature, of, warned in ((0.7, "one", True), (0.7, "rollout", False), (1.0, "one", False)):
        caplog.clear()
        settings = f"rollout.temperature={temperature}", f"objective.teacher_temperature={of}"
        distill(*settings, name="preflight", status=0)
        assert ("rollout.temperature is 0.7 and the teacher's is 1" in caplog.text) == warned


@pytest.mark.parametrize("url", ["http://h:port", "h:1"])
def test_a_controller_at_no_servers_url_is_refused(distill: Distill, capsys, url: str) -> None:
    expected = f"--controller '{url}' is not a server's URL"
    assert expected in distill(name="train", more=("--controller", url))
    assert left("servers", "ls", "--controller", url) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("run.seed=18446744073709551616", "18446744073709551616: input should be less than 4294967296"),
        (f"run.name={'a' * 300}", "string should have at most 100 characters"),
        ('environments."../x".factory="m:f"', "environments = '../x': string should match pattern"),
        ("controller.host=", "controller.host = '': '' does not appear to be an IPv4 or IPv6 address"),
        ("teachers.sorter.host=256.1.1.1", "'256.1.1.1' does not appear to be an IPv4 or IPv6 address"),
        ("trainer.overrides={optimizer={params=5}}", "optimizer.params is 5: it must be a section"),
        ("trainer.overrides={optimizer={type=5}}", "no optimizer section with a type (it is 5)"),
        ("student.path=/none", "student.path /none does not exist: name a model folder, or a Hub id"),
        ("teachers.sorter.path=/", "teachers.sorter.path / holds no config.json"),
        ("rollout.max_tokens=64", "the context is 64 tokens: no room for a prompt is left"),
        ('student.engine_args.max-model-len="8k"', "has max-model-len = '8k' … write the number of tokens"),
        (
            "rollout.routing_replay=true; student.engine_args={enable-prefix-caching=true}",
            "routing_replay is true and the student, a qwen3, has no experts … turns on enable-prefix",
        ),
        (
            "trainer.sequence_parallel=16; trainer.ranks=3; trainer.attention=flash_attention_2",
            "sequence_parallel is 16 and … 3 ranks: it must divide … are exchanged for … attention heads: it",
        ),
        ("student.host=0.0.0.0", "no token is set"),
        ("prompts.task=sudoku", "prompts.task 'sudoku' cannot be loaded"),
        ("objective.teacher_coefficients.math=2.0", "names math, the teachers are sorter: use their names"),
        ("rollout.stop_token_ids=[2, 99]", "has 99, and the student's ids are 0 to 28: correct it"),
        ("rollout.stop_token_ids=[-1]", "rollout.stop_token_ids has -1, and the student's ids are 0 to"),
        ("objective.on_policy=0.0; objective.task={}", "objective.on_policy is 0, so there are none"),
        (
            "objective.on_policy=0.5; teachers.sorter.engine=vllm",
            "engine 'vllm' of teacher 'sorter' gives topk, gather … set objective.on_policy = 1, or teacher",
        ),
        ("student.revision=v2", "student.path is a folder, and no folder has a revision 'v2'"),
        ("rollout.temperature=2.5", "rollout.temperature … less than or equal to 2"),
        ('evaluation.sets.a={source={type="jsonl",path="p"},temperature=3}', "a.temperature … equal to 2"),
        ("rollout.top_p=0.9", "rollout.top_p is 0.9 and rollout.top_k is 0"),
        ("rollout.min_p=0.1", "rollout.min_p is 0.1 and rollout.top_k is 0"),
        ('objective={type="sampled",discount=0.5}; rollout.top_k=4', "is 4 and objective.discount credits"),
        ('objective={type="topk",k=4,drop_rho_outside=[0.5,2]}; rollout.top_k=4', "drop_rho_outside would"),
        ('objective={type="topk",k=30}', "objective.k is 30 and the student's tokenizer has 29 ids"),
        ('objective={type="student_topk",k=30}', "objective.k is 30 and the student's tokenizer has 29 ids"),
        (
            "trainer.expert_parallel=2; trainer.ranks=3; trainer.lora={}",
            "2 and the trainer has 3 ranks: it must divide … is 2 and the student is a qwen3: DeepS",
        ),
        ('teachers.other={path="MODELS/teacher"}', "only one may take the rest"),
        ("teachers.sorter.path=HERE/two", "sorter.path HERE/two: the trainer would load model.safetensors"),
        ("trainer.hostfile=HERE/binary", "HERE/binary"),
        ("student.chat_template=HERE/binary", "HERE/binary"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_key(
    distill: Distill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, says: str
) -> None:
    (tmp_path / "binary").write_bytes(b"host slots=1\n\xff\xfe\n")
    (tmp_path / "two").mkdir()
    for name in ("config.json", "model.safetensors", "old.safetensors"):
        (tmp_path / "two" / name).touch()
    monkeypatch.delenv("DISTILL_TOKEN", raising=False)
    message = distill(*overrides.split("; "))
    assert all(words in message for words in says.split(" … ")), message


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("evaluate", ("--model", "/none"), "--model /none holds no config.json"),
        ("evaluate", ("--model", "HERE/final"), "an adapter: distill export HERE FOLDER merges it into"),
        ("evaluate", ("--completions", "/"), "--completions / exists: name a new folder"),
        ("run", ("--resume",), "holds no run to resume"),
        ("run", ("--set", "run.min_free_disk_gib=1e6"), "run.min_free_disk_gib asks for 1e+06"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused(
    distill: Distill, tmp_path: Path, name: str, more: tuple[str, ...], says: str
) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final/adapter_config.json").write_text("{}")
    assert says in distill(name=name, more=more)


def test_an_override_of_the_quickstart_is_read_before_its_models_are_made(monkeypatch, capsys) -> None:
    monkeypatch.setattr("distill.quickstart.make_models", lambda *_: pytest.fail("a minute has passed"))
    assert left("quickstart", "--set", "run.steps=x") == 2
    assert "run.steps = 'x': input should be a valid integer" in capsys.readouterr().err
    assert left("quickstart", "--seed", "-1") == 2
    assert "run.seed = -1: input should be greater than or equal to 0" in capsys.readouterr().err
