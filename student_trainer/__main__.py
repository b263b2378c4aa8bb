"""One rank of the student trainer.

    deepspeed --num_accelerators 2 --module student_trainer --config runs/NAME/roles/trainer.json

Exit 0: stopped by the controller, SIGTERM or SIGINT, everything saved. Exit 1: an error, logged once.
Until it trains there is nothing to save, and a signal ends it at once. `student_trainer.launch` starts ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from student_trainer.config import TrainerConfig
from student_trainer.launch import bind_to_launcher
from sync.base.errors import DistillError
from sync.base.secrets import redact_process
from sync.base.settings import read_settings

log = logging.getLogger("student_trainer")


def main(argv: list[str] | None = None) -> None:
    """Run a rank and leave with its exit code at once: a rank that lingers would hold the others."""
    parser = argparse.ArgumentParser(prog="student_trainer", description="One rank of the student trainer.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a TrainerConfig")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    arguments = parser.parse_args(argv)
    redact_process()
    rank = os.environ.get("RANK", "0")
    line = f"%(asctime)s %(levelname).1s rank{rank} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=line)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for every batch and event
    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)  # one for every layer
    bind_to_launcher()
    code = _exit_code(arguments.config)
    logging.shutdown()
    os._exit(code)


def _exit_code(path: Path) -> int:
    try:
        config = read_settings(TrainerConfig, path)
        from student_trainer.loop import run

        run(config)
    except DistillError as error:
        log.error("%s", error)
    except Exception as error:
        closed = any(f"Connection {how} by peer" in str(error) for how in ("closed", "reset"))
        if closed and isinstance(error, RuntimeError):  # torch's, from a collective
            log.error("another rank ended, this one cannot go on")
        else:
            log.exception("unexpected %s", type(error).__name__)
    else:
        return 0
    return 1


if __name__ == "__main__":
    main()
