"""The controller as one rank sees it: hello, batches, events in order, teachers' heads.

hello (rank 0, once) → per step: poll for a batch; report events, from a thread that no step waits for
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final

from student_trainer.teacher_scores import TeacherScores
from sync import wire
from sync.base.errors import DistillError, Overloaded, RemoteError, Unreachable
from sync.wire.client import MAX_ANSWER, BlockingPeer

log = logging.getLogger(__name__)
Answer = wire.TrainBatch | wire.Wait | wire.Stop
FINAL_REPORT_SECONDS: Final = 5.0
"""Longest wait for the controller after a stop signal: it may have been stopped too."""
_MEMBERS_SECONDS: Final = 1.0
_AUDIENCE_SECONDS: Final = 3600.0  # a broadcast waits so long for replicas that are still starting
_POLL_SECONDS: Final = 30.0  # longest that `poll` waits; the ranks' collectives must not time out meanwhile
_GLANCE_SECONDS: Final = 0.2  # between two checks of `stopping` in a blocked call
_EVENT_SECONDS: Final = 3600.0  # the controller's disk may be full; `poll` notices a controller that is gone


class ControllerClient:
    """The controller over HTTP. `report` may be called from any thread, the rest from the main one.

    Once `stopping` (a stop was requested) is set, no call blocks for long.
    """

    def __init__(
        self, peer: BlockingPeer, rank: int = 0, world_size: int = 1, stopping: threading.Event | None = None
    ) -> None:
        self.stopping = stopping or threading.Event()
        self._peer, self._rank, self._world_size = peer, rank, world_size
        self.scores: TeacherScores | None = None
        """Fetches what the rows of a batch refer to; None where they carry everything."""
        self._asking = ThreadPoolExecutor(thread_name_prefix="questions")
        """For answers that a stop does not wait for: the next batch, who receives a broadcast."""
        self._fetched: tuple[wire.Version, Future[Any]] | None = None
        self._thread = ThreadPoolExecutor(1, "events")
        self._lock = threading.Lock()
        self.publishing: Callable[[], str] = str
        """What is published now, in words; empty: nothing. Of rank 0."""
        self._does: dict[str, tuple[str, float]] = {}
        self._sent: list[Future[wire.Ok]] = []

    def hello(self, hello: wire.TrainerHello, seconds: float | None = None) -> wire.TrainerWelcome:
        """Introduce this start; `seconds`: to wait for a controller that starts later."""
        return self._peer.call("/v1/hello", hello, wire.TrainerWelcome, seconds)

    def teacher(self, name: str) -> wire.TeacherServers:
        return self._peer.call(f"/v1/teachers/{name}", None, wire.TeacherServers)

    def head(self, teacher: str) -> wire.Head:
        return self._peer.call(f"/v1/teachers/{teacher}/head", None, wire.Head, max_bytes=MAX_ANSWER)

    def does(self, what: str, who: str = "trainer") -> None:
        """What heartbeats say that this process does, from now on."""
        if self._does.get(who, ("", 0.0))[0] != what:
            self._does[who] = what, time.monotonic()

    def heartbeat(self, version: wire.Version) -> wire.Heartbeat:
        """What rank 0 does is in its own."""
        self.does(self.publishing() or "it has nothing to publish", "publisher")
        now = time.monotonic()
        does = {who: (what, now - since) for who, (what, since) in dict(self._does).items()}
        return wire.Heartbeat(version=version, rank=self._rank, does={} if self._rank else does)

    def beat(self, version: wire.Version, seconds: float) -> None:
        """Send a heartbeat every `seconds`, from a thread, until a newer start was welcomed."""

        def send() -> None:
            while True:
                heartbeat = self.heartbeat(version)
                try:
                    self._peer.call("/v1/event", heartbeat, wire.Ok, seconds)
                except (Unreachable, Overloaded):  # a controller that starts again has missed nothing
                    pass
                except DistillError as error:
                    log.warning("no more heartbeats are sent: %s", error)
                    return
                time.sleep(seconds)

        threading.Thread(target=send, name="heartbeat", daemon=True).start()

    def expect(self, version: wire.Version) -> None:
        """The batch for `version` will be polled next: fetch it and its scores meanwhile, in a thread."""
        if self._fetched is None:
            self._fetched = version, self._asking.submit(self._batch, version)

    def _batch(self, version: wire.Version) -> Answer:
        request = wire.BatchRequest(version=version, rank=self._rank, world_size=self._world_size)
        kinds: Any = Answer
        answer: Answer = self._peer.call("/v1/batch", request, kinds, max_bytes=MAX_ANSWER)
        if isinstance(answer, wire.TrainBatch) and self.scores is not None:
            return self.scores.filled(answer)
        return answer

    def poll(self, version: wire.Version) -> Answer:
        """One answer for `version`; Wait while it is still fetched, and as soon as `stopping` is set."""
        self.expect(version)
        assert self._fetched is not None
        assert self._fetched[0] == version
        answer, until = self._fetched[1], time.monotonic() + _POLL_SECONDS
        while not self.stopping.is_set() and time.monotonic() < until:
            if wait([answer], _GLANCE_SECONDS).done:
                self._fetched = None
                if answer.exception() is not None:  # the controller must know which step it ends at
                    wait(self._sent, FINAL_REPORT_SECONDS)
                return answer.result()
        return wire.Wait()

    def report(self, event: wire.Message) -> None:
        """Rank 0: send an event after the earlier ones. Raises what an earlier one met, when it is known."""
        with self._lock:
            for future in self._sent:
                if future.done():
                    future.result()
            self._sent = [future for future in self._sent if not future.done()]
            sending = self._thread.submit(self._peer.call, "/v1/event", event, wire.Ok, _EVENT_SECONDS)
            self._sent.append(sending)

    def confirm(self, version: wire.Version) -> None:
        """Return once the controller has the earlier events and still wants this start, or is silent.

        Raises RemoteError for a start that was sent away, as a rollback does.
        """
        beat = wire.Heartbeat(version=version, rank=self._rank)
        answer = self._thread.submit(self._peer.call, "/v1/event", beat, wire.Ok, FINAL_REPORT_SECONDS)
        with suppress(Unreachable, Overloaded, TimeoutError):
            answer.result(FINAL_REPORT_SECONDS)

    def audience(self, published: wire.Published) -> wire.Audience:
        """Rank 0: announce a broadcast and learn who will receive it. Raises Unreachable."""
        call, kind = self._peer.call, wire.Audience
        answer = self._asking.submit(call, "/v1/event", published, kind, _AUDIENCE_SECONDS)
        while not wait([answer], _GLANCE_SECONDS).done:
            if self.stopping.is_set() and not wait([answer], FINAL_REPORT_SECONDS).done:
                raise Unreachable(
                    f"{self._peer.url} did not name within {FINAL_REPORT_SECONDS:.0f} s of the stop signal "
                    f"the receivers of {published.version}: is the controller running?"
                )
        try:
            return answer.result()
        except Overloaded as error:
            raise Unreachable(f"{published.version} had no receivers for an hour: {error}") from error

    def lost(self, group: str) -> str | None:
        """Why a replica will not receive a broadcast to its end; None while none is known to be lost."""
        path = f"/v1/broadcasts/{group}"
        try:
            members = self._peer.call(path, None, wire.BroadcastMembers, _MEMBERS_SECONDS)
        except RemoteError as error:
            return str(error)
        except Unreachable:  # the replicas may be well
            return None
        return "; ".join(f"{name}: {why}" for name, why in members.lost.items()) or None

    def close(self, seconds: float | None = None) -> None:
        """Return when every event was received; with `seconds`, after so many at the latest."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False)
        done, late = wait(self._sent, seconds)
        for future in done:
            future.result()
        if late:
            log.warning("the controller did not take the last %d events: it is gone", len(late))
