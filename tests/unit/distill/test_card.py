"""The card of a model folder, and its way to the Hub."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hostile_store
import huggingface_hub.constants
import pytest
from command import left
from huggingface_hub import ModelCard
from ports import Handler, served
from small_config import make_config
from typer.testing import CliRunner

from distill.cli.main import app
from distill.config import RunConfig
from distill.metrics.card import front_matter, write_card
from distill.metrics.summary import evaluation
from sync.weights.stores.store import DirectoryStore
from sync.wire import Estimate, EvalReport, SetReport, Version

STUDENT_CARD = "---\nlicense: other\nlicense_name: tiny\nbase_model: acme/tiny\nlanguage: [en]\n---\n# Tiny\n"
SECRET = "hf_" + "b" * 34


def report(step: int, kl: float, passed: float, share: float) -> EvalReport:
    estimate = Estimate(share, share - 0.125, share + 0.125)
    return EvalReport(
        version=Version(0, step), reverse_kl=kl, pass_rate=passed, completions=9, tokens=99, truncated=0.0,
        seconds=1.0, reverse_kl_error=0.01, pass_rate_interval=(passed - 0.0625, passed + 0.0625),
        sets={"gsm8k": SetReport(3, 9, 99, 0.0, 0, estimate, estimate, None)},
    )  # fmt: skip


EVALUATIONS = [evaluation(report(0, 1.25, 0.25, 0.125)), evaluation(report(6, 0.5, 0.75, 0.625))]
SUMMARY = {
    "evaluations": EVALUATIONS,
    "before": EVALUATIONS[0],
    "train": {"tokens_total": 12345},
    "rollout": {"tokens_total": 20000},
    "seconds": {"distill": 3725.4},
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test asks the real Hub, or finds a token of this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def of_run(tmp_path: Path, card: str | None = STUDENT_CARD) -> RunConfig:
    """A run of a student in a folder, with a secret in its environment."""
    (tmp_path / "student").mkdir(parents=True)
    if card is not None:
        (tmp_path / "student/README.md").write_text(card)
    written = {"system_prompt": f"key {SECRET}", "prompt_suffix": "/no_think"}
    store = {"type": "object", "url": "s3://bucket/x"}
    return make_config(
        run={"name": "run", "folder": str(tmp_path)},
        student={"path": str(tmp_path / "student"), "env": {"HF_TOKEN": SECRET}},
        teachers={"t": {"path": "acme/teacher", "urls": ["http://10.1.2.3:7200"]}},
        prompts={"type": "dataset", "path": "acme/questions"} | written,
        weights={"store": store | {"options": {"secret_key": "s3cr3t-value"}}},
        cluster={"type": "ray", "address": "10.1.2.4:6379"},
    )


def test_a_card_has_figures_and_where_the_model_is_from_but_no_secret_and_nothing_of_the_machine(
    tmp_path: Path,
) -> None:
    config = of_run(tmp_path)
    write_card(tmp_path, config, SUMMARY, "L000-v00000006")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "base_model": "acme/tiny",
        "license": "other",
        "license_name": "tiny",
        "language": ["en"],
        "base_model_relation": "finetune",
        "datasets": ["acme/questions"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["distillation", "on-policy-distillation", "onpolicy-distill"],
    }
    rows = (
        "| reverse KL, nats per token | 1.250 ± 0.020 | 0.500 ± 0.020 |",
        "| pass rate | 0.250 (0.188 to 0.312) | 0.750 (0.688 to 0.812) |",
        "| gsm8k, pass@1 | 0.125 (0.000 to 0.250) | 0.625 (0.500 to 0.750) |",
        "| teacher t | acme/teacher, auto, engine transformers |",
        "| version | L000-v00000006, of 6 steps |",
        "| tokens | 12,345 trained on, of 20,000 generated |",
        "| time, all starts | 1:02:05 hours |",
    )
    assert not [row for row in rows if row not in card.text]
    assert "Objective `sampled`. Reverse KL by policy gradient on the sampled token." in card.text
    assert "torch 2.13.0" in card.text
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder"' in card.text
    assert json.loads(card.text.partition("```json")[2].partition("```")[0])["rollout"]["batch"] == 8
    assert "maj@k" not in card.text
    text = (tmp_path / "README.md").read_text()
    for secret in (SECRET, "s3cr3t-value", str(tmp_path), "10.1.2.3", "10.1.2.4", "s3://bucket"):
        assert secret not in text
    assert "key (hidden)" in text
    assert '"prompt_suffix": "/no_think"' in text


@pytest.mark.parametrize(
    "card", [None, "# no front matter", "---\n[not: closed\n---\n", "---\n- a list\n---\n"]
)
def test_what_the_students_card_does_not_give_is_left_to_fill_in(card: str | None, tmp_path, caplog) -> None:
    write_card(tmp_path, of_run(tmp_path, card), {}, "L000-v00000006")
    assert "README.md leaves base_model and license to fill in" in caplog.text
    text = (tmp_path / "README.md").read_text()
    assert "# base_model: fill in\n# license: fill in\n---\n" in text
    assert "The run had not ended" in text
    assert ModelCard(text).data.license is None


def test_a_student_of_the_hub_is_the_base_model_and_its_license_may_stand_in_its_config(tmp_path) -> None:
    named = make_config(student={"path": "acme/tiny"})
    matter = front_matter(named, adapter=True)
    assert (matter["base_model"], matter["base_model_relation"]) == ("acme/tiny", "adapter")
    assert "license" not in matter, "the Hub cannot be reached"
    assert (matter["library_name"], matter["tags"][-1]) == ("peft", "lora")
    config = of_run(tmp_path, card=None)
    (tmp_path / "student/config.json").write_text('{"license": "mit"}')
    assert front_matter(config, adapter=False)["license"] == "mit"


def test_an_adapter_is_loaded_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    config = make_config(student={"path": "acme/tiny"}, trainer={"lora": {"rank": 12}})
    write_card(tmp_path, config, {}, None, "acme/distilled")
    text = (tmp_path / "README.md").read_text()
    assert 'AutoPeftModelForCausalLM.from_pretrained("acme/distilled"' in text
    assert "serve acme/tiny --enable-lora --max-lora-rank 16 --lora-modules distilled=acme/distilled" in text


# --- export and upload --------------------------------------------------------------------------------------


TOKEN = "hf_" + "a" * 34


class ModelHub(ThreadingHTTPServer):
    """A Hub of models on loopback, in memory: what huggingface_hub needs to create one and upload a folder.

    `models`: name → file → content. `created`: bodies of the requests that created one.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []


class _Handler(Handler):
    server: ModelHub

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").split("?")[0].removesuffix("/revision/main")
        if name in self.server.models:
            self._answer(200, {"id": name, "sha": "0" * 40, "siblings": []})
        else:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.body()
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            self.server.created.append(wanted)
            name = f"{wanted.get('organization', 'acme')}/{wanted['name']}"
            known = name in self.server.models
            self.server.models.setdefault(name, {})
            self._answer(409 if known else 200, {"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":  # of README.md
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        else:
            self._commit(self.path.removeprefix("/api/models/").removesuffix("/commit/main"), body)

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.models[name][line["value"]["path"]] = content
        url = f"{self.server.url}/{name}/commit/{'1' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})

    def _answer(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), headers or {})


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run's folder with two published versions and a summary."""
    config = of_run(tmp_path)
    config = config.model_copy(update={"weights": make_config().weights})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    hostile_store.publish(DirectoryStore(folder / "store"), tmp_path / "model", versions=2)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with served(ModelHub()) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_an_export_has_a_card_and_is_uploaded_if_asked_and_an_existing_model_is_asked_for_by_name(
    finished: Path, tmp_path: Path, hub: ModelHub
) -> None:
    push = "--push-to-hub", "acme/new"

    def export(target: str, *words: str, answer: str = "") -> tuple[int, str]:
        arguments = ["export", str(finished), str(tmp_path / target), *words]
        result = CliRunner().invoke(app, arguments, input=answer)
        return result.exit_code, f"{result.output}{result.exception}"

    assert export("out")[0] == 0
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "| version | L000-v00000001, of 6 steps |" in card.text
    assert "| reverse KL, nats per token | 1.250 ± 0.020 | – |" in card.text, "that version was not evaluated"
    assert hub.created == []

    status, said = export("one", *push, "--private")
    assert (status, hub.created[0]["visibility"]) == (0, "private"), said
    assert f"uploaded: {hub.url}/acme/new/commit/" in said
    uploaded = hub.models["acme/new"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert uploaded == files
    assert b'from_pretrained("acme/new"' in uploaded["README.md"]

    for target, answer in (("two", "acme/old\n"), ("three", "")):
        status, said = export(target, *push, answer=answer)
        assert "names a model that exists" in said
        assert status != 0
        assert not (tmp_path / target).exists()
    status, said = export("four", *push, "--version", "L000-v00000000", answer="acme/new\n")
    assert status == 0, said
    assert b"| version | L000-v00000000, of 6 steps |" in hub.models["acme/new"]["README.md"]


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("acme/new", "", "acme/new needs a Hugging Face token with write access, and none is set"),
        ("a/b/c", TOKEN, "--push-to-hub a/b/c: give OWNER/NAME of a model on the Hub"),
        ("acme/new", TOKEN + "x", "acme/new cannot be uploaded: .*401.*check HF_TOKEN"),
    ],
)
def test_what_cannot_be_uploaded_is_one_message(
    repo: str, token: str, message: str, finished: Path, tmp_path: Path, hub, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert left("export", str(finished), str(tmp_path / "out"), "--push-to-hub", repo) in (1, 2)
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert re.search(message, said), said
    assert hub.models == {}
