"""A run's folder: its lock, its ports, its checkpoints, and what a resume compares of its configuration."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_config import LEAST

from distill.config import RunConfig
from distill.config.laws import law_of, sections
from distill.config.loading import load_run_dir, merge, validate
from distill.evaluation.service import keep_best
from distill.launch.roles import Ports
from distill.launch.run import finished
from distill.launch.run_folder import RunFolder
from distill.metrics.results import read_summary
from distill.prompts.sources import TableSource, split_table
from distill.prompts.stream import Prompt
from distill.quickstart import make_room
from distill.record import resume as configuration
from distill.record.resume import _decide, compare, content, record_of, resumed
from student_trainer.checkpoint_files import latest, saved
from student_trainer.config import LoRAConfig
from sync.base.errors import ConfigError
from sync.base.settings import FIXED, LIVE, Settings
from sync.wire import Version
from sync.wire.server import join_port

ROOT = Path(__file__).parents[3]
JSON = str(ROOT / "configs/deepspeed/zero3_cpu.json")


def config(folder: Path, **more: Any) -> RunConfig:
    run = {"run": {"name": "x", "steps": 3, "folder": str(folder)}, "trainer": {"deepspeed": JSON}}
    return validate(merge(merge(LEAST, run), more), "x")


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("distill.launch.run_folder.fcntl.flock", flock)
    said = r"x cannot be locked \(Function not implemented\): mount .* with locks.* or set run\.folder"
    with pytest.raises(ConfigError, match=said):
        RunFolder.open(config(tmp_path), resume=False)


def test_a_folder_is_entered_by_one_process_and_with_a_run_in_it_only_to_resume_that(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunFolder.open(config(tmp_path), resume=True)
    assert not (tmp_path / "x").exists()
    with RunFolder.open(config(tmp_path), resume=False) as folder:
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
            RunFolder.open(config(tmp_path), resume=False)
        (folder.path / "run.db").touch()
    with pytest.raises(ConfigError, match="go on with --resume"):
        RunFolder.open(config(tmp_path), resume=False)
    with RunFolder.open(config(tmp_path), resume=True):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\)"):
        RunFolder.open(config(tmp_path / "file"), resume=False)


def test_an_earlier_quickstart_makes_room_unless_it_never_began(tmp_path: Path) -> None:
    settings = config(tmp_path)
    (tmp_path / "x").mkdir(exist_ok=True)
    make_room(settings)
    assert (tmp_path / "x").is_dir()
    (tmp_path / "x" / "run.db").write_text("x")
    make_room(settings)
    assert [path.name for path in tmp_path.iterdir()] == ["x.1"]


def test_an_address_of_another_machine_is_named_with_its_setting() -> None:
    with Ports() as ports, pytest.raises(ConfigError, match=r"student\.port: cannot listen on 203\.0\.113"):
        ports.take("203.0.113.1", 0, "student.port")


def test_nobody_takes_a_port_between_its_choice_and_its_server_nor_while_that_is_started_again() -> None:
    with Ports() as ports:
        number = ports.take("127.0.0.1", 0, "x")
        for _ in range(2):
            assert not any(taken(number, option) for option in ([], [socket.SO_REUSEADDR]))
            with join_port("127.0.0.1", number) as server:
                server.listen()
                assert not any(taken(number, option) for option in ([], [socket.SO_REUSEADDR]))
                with socket.create_connection(("127.0.0.1", number)) as client:
                    server.accept()[0].close()  # leaves a connection that lingers on the server's side
                    assert client.recv(1) == b""
                with pytest.raises(ConfigError, match="another server answers there"):
                    join_port("127.0.0.1", number)
    with Ports() as ports:
        assert ports.take("127.0.0.1", number, "x") == number


def taken(number: int, options: list[int]) -> bool:
    """Whether another program could listen on a port."""
    with socket.socket() as thief:
        for option in options:
            thief.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            thief.bind(("127.0.0.1", number))
        except OSError:
            return False
        return True


def test_the_best_model_is_replaced_whole_and_outlives_two_crashes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    (tmp_path / "one" / "more").write_text("")
    keep_best(tmp_path / "one", tmp_path / "best")
    keep_best(tmp_path / "two", tmp_path / "best")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "one", "two"]
    (tmp_path / "best").rename(tmp_path / ".best.old")  # the first crash was between the two renames
    (tmp_path / ".best.new").mkdir()
    monkeypatch.setattr(shutil, "copytree", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit, match="killed"):
        keep_best(tmp_path / "one", tmp_path / "best")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "one", "two"]
    assert (tmp_path / "best" / "weights").read_text() == "two"


@pytest.mark.parametrize("to", [Version(0, 4), None])
def test_a_rollback_never_leaves_latest_naming_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Version | None
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for version in (Version(0, 2), Version(0, 4), Version(1, 3), Version(1, 5)):
        (checkpoints / str(version)).mkdir(parents=True)
    (checkpoints / "latest").write_text(f"{Version(1, 5)}\n")
    named: list[str] = []

    def removing(path: Path) -> None:
        named.append(latest(checkpoints))
        path.rmdir()

    monkeypatch.setattr(shutil, "rmtree", removing)
    with (tmp_path / "lock").open("w") as lock:
        RunFolder(tmp_path, lock).set_back(to)
    assert set(named) == {str(to) if to else ""}
    assert [path.name for path in saved(checkpoints)] == (["L000-v00000002", "L000-v00000004"] if to else [])


# --- what a resume compares


def table(word: str = "row", rows: int = 40) -> TableSource:
    return TableSource(Prompt(str(i), [i], "default", None, f"{word} {i}") for i in range(rows))


def lawless(kind: type[Settings], place: str = "") -> Iterator[str]:
    """Keys below `kind` for which neither they nor a section around them have a law."""
    for name, field in kind.model_fields.items():
        law, inner = law_of(field), sections(field.annotation)
        if law is None and not inner:
            yield f"{place}{name}"
        for section in inner if law not in (LIVE, FIXED) else ():
            yield from lawless(section, f"{place}{name}.")


def test_every_key_or_a_section_around_it_has_a_law() -> None:
    assert {*lawless(LoRAConfig)} == LoRAConfig.model_fields.keys(), "the law of these stands around them"
    assert [*lawless(RunConfig)] == [], "write Live[…], Content[…] or Fixed[…] round the type"


@pytest.mark.parametrize(
    ("path", "decision"),
    [
        (("trainer", "lora", "rank"), "refused: weights and optimizer"),
        (("content", "deepspeed", "optimizer", "params", "eps"), "takes effect"),
        (("content", "deepspeed", "optimizer", "type"), "refused: weights and optimizer"),
        (("run", "new_key"), "refused: rollouts on record"),
        (("guard", "max_grad_norm"), "takes effect"),
        (("teachers", "big", "generate_url"), "takes effect"),
        (("teachers", "big", "chat_template"), "same content"),
        (("evaluation", "sets", "s", "source", "path"), "takes effect"),
        (("evaluation", "prompts"), "same content"),
        (("prompts", "parts", "maths", "path"), "same content"),
        (("prompts", "parts", "maths", "pass_threshold"), "takes effect"),
        (("prompts", "parts", "maths", "reward_fn"), "refused: rewards on record"),
        (("prompts", "parts", "maths"), "refused: rewards on record"),
        (("prompts", "weights", "maths"), "refused: rewards on record"),
    ],
)
def test_the_innermost_law_decides_and_a_key_that_is_not_known_is_refused(
    path: tuple[str, ...], decision: str
) -> None:
    assert _decide(path).startswith(decision)


def record(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """A record of a run; `content` in `more` over its content."""
    over = more.pop("content", {})
    made = config(tmp_path, **more)
    given = {"prompts": "40 prompts, a", "held_out": "4 prompts, b", "deepspeed": {"gradient_clipping": 1.0}}
    return made.model_dump(mode="json") | {"content": given | over}


CLIPPED, HALVED = {"gradient_clipping": 2.0}, {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"trainer": {"lr": 1e-5}}, "trainer.lr: 3e-06 -> 1e-05 (takes effect)"),
        ({"student": {"engine_args": {"seed": 1}}}, "student.engine_args.seed: None -> 1 (takes effect)"),
        ({"teachers": {"t": {"port": 7}}}, "teachers.t.port: 0 -> 7 (takes effect)"),
        ({"trainer": {"overrides": {"a.b": 2}}}, "trainer.overrides.a.b: None -> 2 (same content)"),
        ({"content": {"deepspeed": CLIPPED}}, "deepspeed.gradient_clipping: 1.0 -> 2.0 (takes effect)"),
        ({}, ""),
    ],
)
def test_what_may_change_is_said_and_taken(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    assert compare(record(tmp_path), record(tmp_path, **more)) == ([line] if line else [])


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"student": {"path": "other"}}, "student.path: s -> other (refused: the checkpoint was trained"),
        ({"teachers": {"t": {"path": "u"}}}, "teachers.t.path: t -> u (refused: rollouts on record"),
        ({"teachers": {"u": {"path": "u"}}}, "teachers.u: None -> {'urls': []"),
        ({"objective": {"type": "topk", "k": 4}}, "objective.k: None -> 4 (refused: the weights"),
        ({"rollout": {"max_tokens": 8}}, "rollout.max_tokens: 12 -> 8 (refused: rollouts"),
        ({"trainer": {"lora": {}}}, "trainer.lora: None -> {'rank': 32"),
        ({"content": {"prompts": "4, z"}}, "prompts: 40 prompts, a -> 4, z (refused: other"),
        ({"content": {"held_out": "4 prompts, z"}}, "held_out: 4 prompts, b -> 4 prompts, z (refused: eval"),
        ({"content": {"deepspeed": HALVED}}, "deepspeed.bf16: None -> {'enabled': True}"),
    ],
)
def test_what_must_not_change_is_refused_by_name_each_on_a_line_of_its_own(
    tmp_path: Path, more: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(record(tmp_path), record(tmp_path, run={"seed": 1, "steps": 9}, **more))
    told = str(caught.value)
    assert all(f"\n{start}" in told for start in (line, "run.seed: 0 -> 1 (refused"))
    assert "run.steps" not in told, "that may change"
    assert "\nundo them, or start a new run" in told


def test_an_evaluation_may_come_and_go_where_it_holds_no_row_back(tmp_path: Path) -> None:
    without = record(tmp_path, evaluation=False, content={"held_out": None})
    (line,) = compare(record(tmp_path), without)
    assert line.startswith("evaluation: {'every': 0")
    assert line.endswith("-> None (same content)")


def test_prompts_are_told_apart_by_content_whatever_their_number(tmp_path: Path) -> None:
    made = config(tmp_path)
    first, again, other = (content(made, split_table(table(word), 4, 0)) for word in ("row", "row", "line"))
    assert first == again
    assert first["prompts"].startswith("36 prompts, ")
    assert first["held_out"].startswith("4 prompts, ")
    assert first["prompts"] != other["prompts"]
    assert first["held_out"] != other["held_out"]
    moved = content(made, split_table(table(), 4, 1))
    assert moved["held_out"] != first["held_out"], "the same rows, split otherwise"
    assert "lr" not in first["deepspeed"]["optimizer"]["params"], "said once, as trainer.lr"


def test_the_digest_of_the_prompts_of_earlier_releases_stays(tmp_path, monkeypatch) -> None:
    made, split = config(tmp_path), split_table(table(), 4, 0)
    pinned = "4 prompts, 828cd31e5f3554deb12c33080a102234"
    assert content(made, split)["held_out"] == pinned
    later = msgspec.defstruct("Prompt", [("later", str, "")], bases=(Prompt,), frozen=True, array_like=True)
    monkeypatch.setattr(configuration, "Prompt", later)

    def with_field(value: str) -> str:
        rows = [later(*msgspec.structs.astuple(prompt), value) for prompt in split.held_out]
        digest: str = configuration._digest(rows)
        return digest

    assert with_field("") == pinned
    assert with_field("x") != pinned


def goes_on(folder: RunFolder, config: RunConfig, given: dict[str, Any]) -> list[str]:
    record, lines = resumed(folder.path, record_of(config, given))
    folder.keep(record)
    return lines


GIVEN: dict[str, Any] = {"prompts": "a", "held_out": None, "deepspeed": {}}


@pytest.fixture
def said(tmp_path: Path) -> list[str]:
    """What the last of three resumes said, each of which may have had a faster trainer."""
    with RunFolder.open(config(tmp_path), resume=False) as folder:
        folder.keep(record_of(config(tmp_path), GIVEN))
        (folder.path / "run.db").touch()
    for lr in (1e-5, 1e-5, 1e-4):
        faster = config(tmp_path, trainer={"lr": lr})
        with RunFolder.open(faster, resume=True) as folder:
            lines = goes_on(folder, faster, GIVEN)
    (tmp_path / "x/summary.json").write_text('{"steps": 3}')
    return lines


def test_every_configuration_of_a_run_is_kept(said: list[str], tmp_path: Path) -> None:
    assert said == ["trainer.lr: 1e-05 -> 0.0001 (takes effect)"]
    names = ["config.0.json", "config.1.json", "config.json"]
    kept = [json.loads((tmp_path / "x" / name).read_text())["trainer"]["lr"] for name in names]
    assert kept == [3e-6, 1e-5, 1e-4]
    assert load_run_dir(tmp_path / "x").trainer.lr == 1e-4
    assert {(tmp_path / "x" / name).stat().st_mode & 0o777 for name in names} == {0o600}


@pytest.mark.usefixtures("said")
def test_a_resumed_run_has_no_summary_until_it_ends_again(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path), resume=True) as folder:
        goes_on(folder, config(tmp_path), GIVEN)
        assert read_summary(tmp_path / "x") == {"steps": 3}, "nothing has started yet"
        folder.begin()
    assert read_summary(tmp_path / "x") == {}


@pytest.mark.usefixtures("said")
def test_a_refused_resume_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    before = (tmp_path / "x/config.json").read_text()
    other = config(tmp_path, student={"path": "other"})
    with RunFolder.open(other, resume=True) as folder, pytest.raises(ConfigError, match=r"student\.path"):
        goes_on(folder, other, GIVEN)
    assert (tmp_path / "x/config.json").read_text() == before
    assert not (tmp_path / "x/config.2.json").exists()
    assert read_summary(tmp_path / "x") == {"steps": 3}


@pytest.mark.usefixtures("said")
def test_held_out_prompts_are_compared_across_a_resume_without_them(tmp_path: Path) -> None:
    def resumes(held_out: str | None) -> None:
        with RunFolder.open(config(tmp_path), resume=True) as folder:
            goes_on(folder, config(tmp_path), GIVEN | {"held_out": held_out})

    for held_out in ("4 prompts, b", None, "4 prompts, b"):
        resumes(held_out)
    with pytest.raises(ConfigError, match="held_out"):
        resumes("4 prompts, c")


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "has no table 'run'"),
        (b'{"run": {}}', "has no table 'content'"),
        (b'{"run": 3, "content": {}}', "has no table 'run'"),
    ],
    ids=["folder", "no text", "nested", "list", "no content", "no run"],
)
def test_a_run_whose_record_is_a_folder_or_altered_is_not_resumed(
    tmp_path: Path, damage: bytes | None, says: str
) -> None:
    record = tmp_path / "x/config.json"
    record.unlink()
    if damage is None:
        record.mkdir()
    else:
        record.write_bytes(damage)
    with RunFolder.open(config(tmp_path), resume=True) as folder, pytest.raises(ConfigError, match=says):
        goes_on(folder, config(tmp_path), GIVEN)
    with pytest.raises(ConfigError, match=says if "content" not in says else "missing"):
        load_run_dir(tmp_path / "x")


@pytest.mark.parametrize(
    ("lacks", "exported"),
    [
        ({"completed": False}, True),
        ({"problems": ["x"]}, True),
        ({"error": "x"}, True),
        ({"steps": 2}, True),
        ({}, False),
    ],
    ids=["stopped", "ended with a problem", "failed", "more steps are wanted", "died before it left final/"],
)
def test_a_run_that_lacks_anything_is_not_complete(
    tmp_path: Path, lacks: dict[str, Any], exported: bool
) -> None:
    """One that lacks nothing is; see test_api.py."""
    summary = {"completed": True, "steps": 3, "problems": [], "error": None} | lacks
    (tmp_path / "x").mkdir()
    (tmp_path / "x/summary.json").write_text(json.dumps(summary))
    if exported:
        (tmp_path / "x/final").mkdir()
    assert finished(config(tmp_path)) is None
