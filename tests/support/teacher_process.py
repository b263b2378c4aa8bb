"""A real teacher process that can be killed and started again on its port."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from forked import start
from ports import free_port


class TeacherProcess:
    """Engine "transformers" in fp32 on one thread; `config`: more of its section."""

    def __init__(self, model: Path, folder: Path, name: str, token: str = "", **config: Any) -> None:
        self.port = free_port()
        self.url, self._name = f"http://127.0.0.1:{self.port}", name
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "DISTILL_TOKEN": token}
        self._config, self._log = (folder / f"{self.port}.{end}" for end in ("json", "log"))
        settings = {"path": str(model), "dtype": "float32"} | config
        self._config.write_text(json.dumps(settings))
        self.start()

    def start(self) -> None:
        arguments = ["--config", str(self._config), "--name", self._name, "--port", str(self.port)]
        with self._log.open("ab") as log:
            line = [sys.executable, "-m", "teacher_service", *arguments]
            self.child = start(line, self._environment, log)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Signal it; the exit status."""
        self.child.send_signal(how)
        return self.child.wait(120)

    def log(self) -> str:
        return self._log.read_text()
