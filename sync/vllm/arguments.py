"""Whether vLLM takes a server's flags and an engine's arguments; no model is loaded.

    python -m sync.vllm.arguments < '{"flags": […], "engines": {place: [name, …]}}'

A line on stdout for each problem. A process of its own, because vLLM takes seconds to import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import NoReturn

from sync.base.errors import ConfigError


def problems(flags: Sequence[str], engines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """`flags`: of vLLM's API server, none: there is none. `engines`: place in the configuration → names."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if flags:
        parser = make_arg_parser(FlexibleArgumentParser())
        parser.error = _refuse  # instead of a page of usage
        try:
            validate_parsed_serve_args(parser.parse_args([*flags]))
        except (ConfigError, ValueError, TypeError) as error:
            yield f"student.engine_args: vLLM does not take them: {error}"
    known = {field.name for field in fields(AsyncEngineArgs)}
    for place, names in engines.items():
        for name in {name.replace("-", "_") for name in names} - known:
            close = get_close_matches(name, known, n=1, cutoff=0.5)
            nearest = f"did you mean {close[0]!r}?" if close else "leave it out"
            yield f"{place}: vLLM's engine has no argument {name!r}: {nearest}"


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    for line in problems(asked["flags"], asked["engines"]):
        print(line)  # noqa: T201
