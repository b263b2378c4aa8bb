"""Servers whose answers cannot be used: how many in a row, and when one is asked nothing any more.

    in use ──unusable answers to `most` questions, none good between them──▶ out of use, told once
                                                    (none of its kind is left ──▶ the run stops)

Answers to the same question count once: a prompt that no server can answer takes none of them out of use.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)


class Trust:
    """Unusable answers of every server (a replica, a teacher's URL, the evaluator), one after the other."""

    def __init__(self, most: int, stop: Callable[[str], None]) -> None:
        """`stop` ends the run with an error and its reason."""
        self._most, self._stop = most, stop
        self._bad: defaultdict[str, set[Hashable]] = defaultdict(set)
        self._out: set[str] = set()

    def good(self, server: str) -> None:
        """Its answer could be used."""
        self._bad.pop(server, None)

    def bad(self, server: str, question: Hashable, problem: str, leave_out: Callable[[], bool]) -> None:
        """Its answer to `question` could not. `leave_out` takes it out of use; whether another is left."""
        self._bad[server].add(question)
        if len(self._bad[server]) < self._most or server in self._out:
            return
        self._out.add(server)
        told = f"{server} gave {self._most} unusable answers one after the other, the last one: {problem}"
        logger.error("%s; it is out of use until the run ends", told)
        if not leave_out():
            self._stop(f"{told}; none of its kind is left in use")
