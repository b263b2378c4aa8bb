"""A page in a headless Chromium, if this machine has one: what a script sees in it, and its picture.

Every host name is unknown to that browser: what a page asks of a network fails, and `performance` lists it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NAMES = "chromium-headless-shell", "chrome-headless-shell", "chromium", "google-chrome"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")
SEEN = re.compile(r'<pre id="seen">(.*?)</pre>', re.DOTALL)
CONSOLE = re.compile(r":CONSOLE:\d+\] (.*)")


class Size(NamedTuple):
    """Of a window, in CSS pixels."""

    width: int
    height: int
    scale: int = 1
    """Pixels of the device to one of them."""


DESKTOP, PHONE = Size(1280, 900), Size(390, 844, 2)


@cache
def browser() -> str:
    """The program; a test that asks for it is skipped where none can be started."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed (apt-get install {NAMES[0]})")
    done = _run(found, "--dump-dom", "data:text/html,<p>up")
    if "<p>up" not in done.stdout:
        pytest.skip(f"{found} cannot show a page: {done.stderr[-500:]}")
    return found


def look(page: Path, size: Size, expression: str) -> tuple[Any, list[str]]:
    """The value of a JavaScript expression in the page as loaded, and what its console says."""
    script = (
        '<script>addEventListener("load", () => { const seen = document.createElement("pre"); '
        f'seen.id = "seen"; seen.textContent = JSON.stringify({expression}); document.body.append(seen) }})'
        "</script>"
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(page.read_text() + script)
        log = "--enable-logging=stderr", "--virtual-time-budget=5000"
        done = _run(browser(), *_window(size), *log, "--dump-dom", copy.as_uri())
    seen = SEEN.search(done.stdout)
    assert seen is not None, done.stderr
    return json.loads(unescape(seen[1])), CONSOLE.findall(done.stderr)


def picture(page: Path, size: Size, target: Path) -> None:
    """Write the page's top as PNG, as large as the window."""
    done = _run(browser(), *_window(size), f"--screenshot={target}", page.absolute().as_uri())
    assert target.is_file(), done.stderr


def _window(size: Size) -> tuple[str, str]:
    return f"--window-size={size.width},{size.height}", f"--force-device-scale-factor={size.scale}"


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [program, *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
