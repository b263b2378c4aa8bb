"""Rank 0's conversation with the controller: hello, events in order, teachers' heads.

TrainerHello → TrainerWelcome, once;  then events from a thread of their own, so that no step waits for one.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Protocol

from sync.client import BlockingPeer
from sync.errors import DistillError, Overloaded, RemoteError, Unreachable
from sync.wire import (
    Audience,
    BroadcastMembers,
    Head,
    Heartbeat,
    Message,
    Ok,
    Published,
    TrainerHello,
    TrainerWelcome,
)

log = logging.getLogger(__name__)
_SEATS_SECONDS: Final = 1.0
_AUDIENCE_SECONDS: Final = 3600.0
"""A broadcast waits so long for replicas that are still starting."""
LAST_WORDS_SECONDS: Final = 5.0
"""Longest wait for the controller after a stop signal: it may have been stopped too."""
_GLANCE_SECONDS: Final = 0.2
"""How often a wait looks whether the trainer was asked to stop."""
_EVENT_SECONDS: Final = 3600.0
"""An event waits so long while the controller's disk is full; one that is gone is noticed by the batches."""


class Controller(Protocol):
    """What a trainer tells and asks; `HttpController` in a run, `SilentController` in memory."""

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """Introduce this start of the trainer."""

    def tell(self, event: Message) -> None:
        """Send an event after those told before. Raises what a former one met, when it is known."""

    def audience(self, published: Published) -> Audience:
        """Announce a broadcast and learn who will listen. Raises Unreachable."""

    def lost(self, group: str) -> str | None:
        """Why somebody will not receive a broadcast to its end; None: nobody is known to be lost."""

    def head(self, teacher: str) -> Head:
        """Output head of a teacher."""

    def close(self, patience: float | None = None) -> None:
        """Return when every event was received; with `patience`, after so many seconds at the latest."""


class HttpController:
    """The controller over HTTP. `tell` may be called from any thread."""

    def __init__(
        self,
        peer: BlockingPeer,
        start_seconds: float | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """`start_seconds`: how long the first word waits for a controller that starts later; None: as any.

        `stopping`: set once the trainer was asked to stop; nothing waits long from then on.
        """
        self._peer, self._start_seconds = peer, start_seconds
        self._stopping = stopping or threading.Event()
        self._thread = ThreadPoolExecutor(1, "events")
        self._announcing = ThreadPoolExecutor(thread_name_prefix="audience")
        self._lock = threading.Lock()
        self._sent: list[Future[Ok]] = []

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        return self._peer.call("/v1/hello", hello, TrainerWelcome, self._start_seconds)

    def tell(self, event: Message) -> None:
        with self._lock:
            for future in self._sent:
                if future.done():
                    future.result()
            pending = [future for future in self._sent if not future.done()]
            self._sent = [
                *pending,
                self._thread.submit(self._peer.call, "/v1/event", event, Ok, _EVENT_SECONDS),
            ]

    def audience(self, published: Published) -> Audience:
        answer = self._announcing.submit(self._peer.call, "/v1/event", published, Audience, _AUDIENCE_SECONDS)
        while not wait([answer], _GLANCE_SECONDS).done:
            if self._stopping.is_set() and not wait([answer], LAST_WORDS_SECONDS).done:
                raise Unreachable(
                    f"{self._peer.url} did not say within {LAST_WORDS_SECONDS:.0f} s of the stop signal who "
                    f"listens to {published.version}: is the controller running?"
                )
        try:
            return answer.result()
        except Overloaded as error:
            raise Unreachable(f"nobody listened to {published.version} for an hour: {error}") from error

    def lost(self, group: str) -> str | None:
        try:
            seats = self._peer.call(f"/v1/broadcasts/{group}", None, BroadcastMembers, _SEATS_SECONDS)
        except RemoteError as error:
            return str(error)
        except Unreachable:  # it says nothing about the replicas
            return None
        return "; ".join(f"{name}: {why}" for name, why in seats.lost.items()) or None

    def head(self, teacher: str) -> Head:
        return self._peer.call(f"/v1/teachers/{teacher}/head", None, Head)

    def close(self, patience: float | None = None) -> None:
        self._thread.shutdown(wait=False)
        self._announcing.shutdown(wait=False)
        done, late = wait(self._sent, patience)
        for future in done:
            future.result()
        if late:
            log.warning("the controller did not take the last %d events: it is gone", len(late))


def beat(peer: BlockingPeer, heartbeat: Heartbeat, seconds: float) -> None:
    """Send a heartbeat every `seconds`, from a thread, until the controller knows another start."""

    def send() -> None:
        while True:
            try:
                peer.call("/v1/event", heartbeat, Ok, seconds)
            except (Unreachable, Overloaded):  # a controller that starts again has missed nothing
                pass
            except DistillError as error:
                log.warning("no more heartbeats are sent: %s", error)
                return
            time.sleep(seconds)

    threading.Thread(target=send, name="heartbeat", daemon=True).start()


class SilentController:
    """Nobody listens: events are kept in `told`. For tests, and for ranks other than 0."""

    def __init__(self, welcome: TrainerWelcome, heads: dict[str, Head] | None = None) -> None:
        self.told: list[Message] = []
        self._welcome = welcome
        self._heads = heads or {}

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        self.told.append(hello)
        return self._welcome

    def tell(self, event: Message) -> None:
        self.told.append(event)

    def audience(self, published: Published) -> Audience:
        self.told.append(published)
        return Audience(group="", world_size=1)

    def lost(self, group: str) -> str | None:
        return None

    def head(self, teacher: str) -> Head:
        return self._heads[teacher]

    def close(self, patience: float | None = None) -> None:
        """Nothing to wait for."""
