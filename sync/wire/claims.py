"""Which run a process works for: every request names it in a header, and every answer names the run it is of.

A server that holds a run's state (a student replica, the evaluator, a teacher that follows the student) is
claimed by the first run that uses it, and refuses every other one until its process is started again.

    no id ──a request of a run that has begun──▶ claimed ──a request of any other run──▶ refused (421)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from sync.base.decoding import json_decoder
from sync.base.errors import WireError, WrongServer
from sync.wire import RunIdentity

RUN_HEADER: Final = "x-distill-run"
"""RunIdentity as JSON: of a request, the run it is made for; of an answer, the run that is served."""
MODEL_HEADER: Final = "x-distill-model"
"""Header of a teacher's answer: `TeacherInfo.fingerprint`."""
REMEDY: Final = "start a fresh server for this run, give the URL to one run alone, or stop the other run"


class Claim:
    """The run of one process: its own (controller, trainer), or the one that claimed it (a server)."""

    def __init__(self, run: RunIdentity | None = None) -> None:
        """`run`: None until it is known; a server begins with the name it is configured for, without id."""
        self.run = run

    @property
    def run_id(self) -> str | None:
        """`RunIdentity.id`; None: no run has begun or claimed this process."""
        return self.run.id if self.run else None

    def headers(self) -> dict[str, str]:
        """What names the run; nothing while none is known."""
        return {} if self.run is None else {RUN_HEADER: msgspec.json.encode(self.run).decode()}

    def admit(self, asking: RunIdentity | None, claims: bool) -> None:
        """Raise WrongServer for a request of another run; `claims`: it changes or uses the run's state."""
        if asking is None:
            if claims and self.run_id is not None:
                raise WrongServer(f"it serves {self.run} and the request names no run: {REMEDY}")
            return
        if self.run is not None and self.run.refuses(asking):
            raise WrongServer(f"it serves {self.run} and was asked for {asking}: {REMEDY}")
        if claims and asking.id is not None:
            known = self.run.model if self.run else None
            self.run = msgspec.structs.replace(asking, model=asking.model or known)

    def check(self, url: str, headers: Mapping[str, str]) -> None:
        """Check the run that an answer names. Raises WrongServer."""
        served = parse(headers.get(RUN_HEADER))
        if served is not None and self.run is not None and served.refuses(self.run):
            raise WrongServer(f"{url} serves {served}, not {self.run}: {REMEDY}")


def parse(header: str | None) -> RunIdentity | None:
    """Inverse of `Claim.headers`. Raises WireError."""
    try:
        return None if header is None else json_decoder(RunIdentity).decode(header)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:  # no UTF-8 arrives as surrogates
        raise WireError(
            f"header {RUN_HEADER} of {len(header or '')} characters names no run: {error}"
        ) from None
