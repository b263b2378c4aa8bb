"""Pictures of what people see of a run, for the documents: python tests/support/screens.py runs/quickstart-0

Of a finished run of one teacher, in the folder in which it was started. Written to docs/images: init.svg,
plan.svg, live.svg, samples.svg, report-desktop.png.
"""

from __future__ import annotations

import sys
import tempfile
from io import StringIO
from pathlib import Path

from browser import DESKTOP, Size, picture
from PIL import Image
from rich.console import Console, RenderableType
from rich.text import Text
from typer.testing import CliRunner

from distill.cli.main import app
from distill.metrics.console import Logged, Shown, evaluation_line, panel
from distill.metrics.page import REPORT, write_page
from distill.metrics.results import read_run
from distill.metrics.samples import choose, decoder, read_samples, shown

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"
COLUMNS = 112
COLORS = 256
"""Of a picture's palette."""


def live(run_dir: Path) -> RenderableType:
    """The panel as it was in the middle of a run."""
    run = read_run(run_dir)
    steps = [row for row in run.metrics if "train/rows" in row]
    half = steps[: len(steps) // 2]
    began = steps[0]["time"] - (run.summary["seconds"]["total"] - run.summary["seconds"]["distill"])
    names = sorted(path.stem for path in (run_dir / "logs").glob("*.log"))
    seen = Shown(run.config, lambda: dict.fromkeys(names, ("ready", 0)), began=began)
    for row in half:
        seen.add(Logged(row["time"], int(row["step"]), row))
    for row in run.metrics:
        if "eval/reverse_kl" in row and row["time"] <= half[-1]["time"]:
            seen.evaluation = evaluation_line(row["step"], row)
    return panel(seen, half[-1]["time"])


def said(*words: str) -> Text:
    """A command and what it prints."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if "[real_accelerator.py:" not in line]  # DeepSpeed's
    return Text("\n".join([f"$ distill {' '.join(words)}", *lines]))


def samples(run_dir: Path) -> Text:
    """Three of the first batch, the worst first."""
    found, decode = read_samples(run_dir), decoder(run_dir)
    first = [one for one in found if one.version == found[0].version]
    return Text("\n\n").join(shown(one, decode) for one in choose(first, "worst", 3))


def save(name: str, what: RenderableType) -> None:
    """Write one as SVG, as a terminal shows it."""
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(what)
    (IMAGES / name).write_text(console.export_svg(title=name.removesuffix(".svg")))


def page(run_dir: Path, name: str, size: Size) -> None:
    """Write the top of the report as PNG."""
    picture(write_page([run_dir], run_dir / REPORT), size, target := IMAGES / name)
    Image.open(target).quantize(COLORS).save(target, optimize=True)


def main(run_dir: Path) -> None:
    config = read_run(run_dir).config
    (teacher,) = config.teachers.values()
    rows = ROOT / "configs/user_run.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        prompts, file = Path(folder) / "rows.jsonl", Path(folder) / "run.toml"
        prompts.write_text(rows.read_text())
        models = "--teacher", teacher.path, "--student", config.student.path
        begun = said("init", str(file), *models, "--prompts", str(prompts), "--gpus", "0")
        text = f"{begun.plain}\n\n{file.read_text()}"
        for place in (folder, Path.cwd(), ROOT):
            text = text.replace(f"{place}/", "")
    save("init.svg", Text(text))
    save("plan.svg", said("plan", str(run_dir), "--measured", str(run_dir)))
    save("live.svg", live(run_dir))
    save("samples.svg", samples(run_dir))
    page(run_dir, "report-desktop.png", DESKTOP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
