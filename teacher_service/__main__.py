"""One teacher process: python -m teacher_service --config FILE --name NAME [--host H] [--port P] [--index I]

FILE is a TeacherConfig as JSON; its `env` and `devices` are for who starts this, such as `distill teacher`.
The address it listens on is logged once it answers. SIGTERM ends it cleanly.
Exit status: 0 after a signal, 2 when the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from sync.base.address import token_from_environment
from sync.base.settings import ReplicaConfig, read_settings
from sync.wire import RunIdentity
from sync.wire.claims import Claim
from sync.wire.server import check_bind, run_role, serve_app
from teacher_service.config import TeacherConfig

log = logging.getLogger("teacher_service")
GRACE_SECONDS: Final = 1
"""Requests under way are answered for so long after a signal; callers retry on another replica."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m teacher_service", description="Serve one teacher.")
    parser.add_argument("--config", type=Path, required=True, help="TeacherConfig as JSON")
    parser.add_argument("--name", required=True, help="the teacher's name in the run's configuration")
    parser.add_argument("--host", help="default: the configuration's")
    parser.add_argument("--port", type=int, help="default: the configuration's, 0: any free one")
    parser.add_argument("--index", type=int, default=0, help="replica, chooses its port")
    options = parser.parse_args(arguments)
    return run_role(log, f"teacher {options.name}[{options.index}]", partial(serve, options))


def serve(options: argparse.Namespace) -> None:
    """Load the engine and answer until SIGTERM or SIGINT."""
    config = read_settings(TeacherConfig, options.config)
    host, index = options.host or config.host, options.index
    port = options.port if options.port is not None else config.port and config.port + index
    token = token_from_environment()
    check_bind(host, token)
    import setproctitle

    from sync.base.memory import memory
    from sync.base.tokenizers import end_ids, load_tokenizer, vocab_size
    from teacher_service.app import TeacherService
    from teacher_service.engines import build
    from teacher_service.limits import device_memory, limits
    from teacher_service.messages import describe

    setproctitle.setproctitle(f"distill teacher {options.name}[{index}]")
    signal.signal(signal.SIGTERM, _leave)  # while loading; uvicorn takes over, and calls it again at its end
    tokenizer = load_tokenizer(config)
    claim = None  # a teacher may serve many runs, unless it follows one
    if config.follow_student_every is not None:
        claim = Claim(RunIdentity(ReplicaConfig.from_environment().run))
    engine = build(config, vocab_size(tokenizer, config.known_ids), claim)
    own_pass = config.kind.computes == "layers" and config.device != "cpu"
    gpus = device_memory() if own_pass else []  # vLLM sees to its own
    bounds = limits(config, engine.engine_info, memory()[0], gpus)
    engine.engine_info = replace(engine.engine_info, max_length=bounds.max_length)
    info = describe(options.name, engine.engine_info, tokenizer, config.known_ids)
    if config.keep_folder is not None:  # one for each process
        config = config.model_copy(update={"keep_folder": config.keep_folder / str(index)})
    ends = end_ids(config, tokenizer)
    service = TeacherService(engine, info, config, bounds, end_ids=ends, token=token, claim=claim)
    log.info("%s: %s", options.name, service.info)
    log.info("%s: %s", options.name, bounds.line)
    serve_app(service.app, host, port, GRACE_SECONDS)


def _leave(*_: object) -> None:
    """End at once, with all processes of the engine; threads that load or read are not waited for."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
