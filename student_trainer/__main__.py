"""One rank of the student trainer.

    deepspeed --num_accelerators 2 --module student_trainer --config runs/NAME/roles/trainer.json

Exit 0: stopped as asked by the controller, SIGTERM or SIGINT, everything saved. Exit 1: an error, said once.
Until it trains there is nothing to save, and a signal ends it at once. `student_trainer.launch` starts ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from student_trainer.config import TrainerConfig
from student_trainer.launch import LAUNCHER, heed_signals
from student_trainer.signals import die_with
from sync.errors import DistillError
from sync.secrets import redact_process
from sync.settings import read_settings

log = logging.getLogger("student_trainer")


def main(argv: list[str] | None = None) -> None:
    """Run a rank and leave with its exit code; never returns."""
    parser = argparse.ArgumentParser(prog="student_trainer", description="One rank of the student trainer.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a TrainerConfig")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    arguments = parser.parse_args(argv)
    heed_signals()
    redact_process()
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s rank{rank} %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for every batch and event
    if launcher := os.environ.get(LAUNCHER):
        die_with(int(launcher))
    os._exit(_guarded(arguments.config))


def _guarded(path: Path) -> int:
    """Exit code of the run. The process then ends at once: a rank that lingers would hold the others."""
    code = 0
    try:
        config = read_settings(TrainerConfig, path)
        from student_trainer.run import run

        run(config)
    except DistillError as error:
        log.error("%s", error)
        code = 1
    except Exception as error:
        if "Connection closed by peer" in str(error) or "Connection reset by peer" in str(error):
            log.error("another rank ended, this one cannot go on")
        else:
            log.exception("unexpected %s", type(error).__name__)
        code = 1
    logging.shutdown()
    return code


if __name__ == "__main__":
    main()
