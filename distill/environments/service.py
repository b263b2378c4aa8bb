"""One environment process.

    python -m distill.environments.service --config FILE --port PORT [--host HOST] [--index I]

FILE is an EnvironmentService as JSON. It imports no torch, and runs in any virtual environment that has what
`sync.wire.server` imports, and transformers for the tokenizer.
Exit status: 0 after a signal, 1 without a server of tools, 2 when the configuration cannot be served.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.environments.app import Host, Service
from distill.environments.config import EnvironmentService
from distill.environments.rendering import Renderer
from sync.base.address import TOKEN_VARIABLE, token_from_environment
from sync.base.settings import read_settings
from sync.wire import RunIdentity
from sync.wire.claims import Claim
from sync.wire.server import check_bind, run_role, serve_app

log = logging.getLogger("distill.environments.service")


def make_host(settings: EnvironmentService, tokenizer: Any) -> Host:
    """The environment of a configuration; `tokenizer`: the student's. Raises ConfigError."""
    name, config = settings.name, settings.environment
    if config.type == "python":
        from distill.environments.python_host import PythonEnvironment

        return PythonEnvironment(name, config, Renderer(tokenizer, config.chat_template_kwargs))
    from distill.environments.verifiers_host import VerifiersEnvironment

    return VerifiersEnvironment(name, config, tokenizer)


def serve(settings: EnvironmentService, host: str, port: int, index: int) -> None:
    """Load tokenizer and environment, then answer until SIGTERM or SIGINT."""
    token = token_from_environment()
    os.environ.pop(TOKEN_VARIABLE, None)  # an environment starts processes of its own: tools, sandboxes
    check_bind(host, token)
    import setproctitle

    from sync.base.tokenizers import fingerprint, load_tokenizer, vocab_size

    setproctitle.setproctitle(f"distill environment {settings.name}[{index}]")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # while loading, and at uvicorn's end
    tokenizer = load_tokenizer(settings.student)
    environment = make_host(settings, tokenizer)
    known = fingerprint(tokenizer), vocab_size(tokenizer, settings.student.known_ids)
    service = Service(environment, settings.environment, known, token, Claim(RunIdentity(settings.run)))
    serve_app(service.app, host, port, grace=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until signalled; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distill.environments.service", description="Serve one environment."
    )
    parser.add_argument("--config", type=Path, required=True, help="an EnvironmentService as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--index", type=int, default=0, help="process, for its title and its log")
    options = parser.parse_args(arguments)

    def work() -> None:
        settings = read_settings(EnvironmentService, options.config)
        serve(settings, options.host, options.port, options.index)

    chatty = ("httpx", "httpx2", "aiohttp.access", "verifiers")  # lines for every turn, and secret URLs
    return run_role(log, f"environment [{options.index}]", work, chatty)


if __name__ == "__main__":
    sys.exit(main())
