"""Broadcasts: a lost replica is left out, and the rest get the very version."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_tensors import buckets_of, plan_of
from ports import refusing, silent
from trainer_fakes import RecordedClient, RecordedLearner

from student_trainer import controller_client as module
from student_trainer.config import TrainerConfig
from student_trainer.controller_client import ControllerClient
from student_trainer.ranks import Ranks
from student_trainer.transports import BroadcastTransport, Gathering, Publishing, metas_of
from student_trainer.weights import DTYPES, copy_of
from sync.base.errors import ConfigError, SnapshotError, StoreError, Unreachable
from sync.weights.broadcast import BroadcastSender, Receiver, Reception
from sync.weights.delta.file import Slice
from sync.wire import Audience, BroadcastTicket, Published, Version
from sync.wire.client import BlockingPeer

VERSION = Version(0, 3)
TENSORS = {"a": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


class TwoTensors(RecordedLearner):
    """Two tensors and no model; `adapter_config` where they are to be an adapter's."""

    def __init__(self, adapter_config: str | None = None) -> None:
        super().__init__()
        self.weights, self.adapter_config = self, adapter_config

    slices = (Slice("a", (5,), "f4", 0, 5), Slice("b", (2, 2), "bf16", 0, 4))

    def snapshot(self) -> dict[str, Any]:
        return {name: copy_of(tensor.flatten()) for name, tensor in TENSORS.items()}


class Listeners(RecordedClient):
    """One replica that listens, and `dead` broadcasts with a second one that died before it came."""

    def __init__(self, receiver: Receiver, dead: int) -> None:
        super().__init__()
        self.receptions: list[Reception] = []
        self.receiver, self._dead = receiver, dead

    def audience(self, published: Published) -> Audience:
        self.reported.append(published)
        group, size = f"0-{len(self.reported)}", 3 if len(self.reported) <= self._dead else 2
        ticket = BroadcastTicket(published.rendezvous, group, 1, size)
        self.receptions.append(self.receiver.receive(ticket))
        return Audience(group=group, world_size=size)

    def lost(self, group: str) -> str | None:
        return "student-1: killed" if group in [f"0-{i}" for i in range(1, self._dead + 1)] else None


@pytest.fixture
def sender() -> Iterator[BroadcastSender]:
    with closing(BroadcastSender("127.0.0.1", timeout=3600.0)) as sender:
        yield sender


Started = Callable[..., tuple[Publishing, Listeners]]


@pytest.fixture
def started(sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """started(dead=, adapter_config=, keep=): broadcasts without pauses, and their listeners."""
    monkeypatch.setattr("student_trainer.transports._PAUSE_SECONDS", 0.0)
    with closing(Receiver(3600.0)) as receiver:

        def make(dead: int = 0, adapter_config: str | None = None, keep: Any = (None,)) -> Any:
            listeners = Listeners(receiver, dead)
            transport = BroadcastTransport(sender, TwoTensors(adapter_config), listeners, *keep)
            return Publishing(transport.stage), listeners

        yield make


def settled(publishing: Publishing, version: Version) -> None:
    """Publish, to its end."""
    publishing.publish(version, publishing.anchor_due)
    publishing.settle()


@pytest.mark.parametrize("adapter_config", [None, '{"r": 2}'])
def test_a_version_goes_to_the_replicas_that_are_left(
    started: Started, caplog: pytest.LogCaptureFixture, adapter_config: str | None
) -> None:
    publishing, controller = started(dead=2, adapter_config=adapter_config)
    settled(publishing, VERSION)
    assert [event.version for event in controller.reported if isinstance(event, Published)] == [VERSION] * 3
    for left in controller.receptions[:2]:
        with pytest.raises(SnapshotError, match="student-1: killed"):
            left.result()
    received = controller.receptions[-1].result()
    assert (received.adapter_config, received.tensors.keys()) == (adapter_config, TENSORS.keys())
    assert all(torch.equal(received.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert caplog.text.count("student-1: killed") == 2


def test_a_version_without_receivers_is_skipped_and_the_run_continues(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    publishing, controller = started(dead=12)
    for _ in range(2):
        settled(publishing, VERSION)
    assert "was not published (2 of 3)" in caplog.text
    with pytest.raises(Unreachable, match="student-1: killed"):
        settled(publishing, VERSION)
    assert len(controller.reported) == 12


class Kept:
    """In the place of a SnapshotTransport: steps of what it published; it fails at first."""

    def __init__(self, failures: int = 0) -> None:
        self.published: list[int] = []
        self.failures = ["the store went away"] * failures

    def stage(self, version: Version, anchor: bool) -> Callable[[], None]:
        assert anchor

        def work() -> None:
            if self.failures:
                raise StoreError(self.failures.pop())
            self.published.append(version.step)

        return work


def keeping(store: Kept, every: int = 0, publish_every: int = 1) -> tuple[Any, Any]:
    """Of a run of seven steps: how versions go to `store`, and which."""
    run = {"run": "r", "run_dir": "r", "controller_url": "http://c", "student": {"path": "s"}, "steps": 7}
    more = {"trainer": {"deepspeed": "ds.json"}, "weights": {"publish_every": publish_every}}
    return store.stage, TrainerConfig.model_validate({**run, **more, "keep_every": every}).keeps


@pytest.mark.parametrize(
    ("every", "publish_every", "kept"),
    [(3, 1, [0, 3, 6, 7]), (3, 2, [0, 4, 6, 7]), (0, 1, [0, 7]), (1, 2, [0, 2, 4, 6, 7])],
)
def test_versions_to_evaluate_go_to_the_store_too(
    started: Started, every: int, publish_every: int, kept: list[int]
) -> None:
    """The first, the last, and the first to pass a multiple, each once, also where it is broadcast again."""
    store = Kept()
    publishing, _ = started(keep=keeping(store, every, publish_every))
    settled(publishing, Version(0, 0))
    for step in [*range(publish_every, 8, publish_every), 7]:
        for _ in range(2):
            settled(publishing, Version(0, step))
    assert store.published == kept


def test_a_version_that_no_replica_receives_goes_to_the_store_all_the_same(started: Started) -> None:
    store = Kept()
    publishing, _ = started(dead=4, keep=keeping(store))
    settled(publishing, VERSION)
    assert (store.published, publishing.arrived, publishing.anchor_due) == ([3], None, True)


def test_a_version_that_the_store_did_not_take_goes_there_when_broadcast_again(started: Started) -> None:
    store = Kept(failures=1)
    publishing, _ = started(keep=keeping(store))
    settled(publishing, Version(0, 0))
    for step in (0, 1):  # the first is broadcast again
        settled(publishing, Version(0, step))
    assert store.published == [0], "it went there when it was broadcast again"


# --- a stop while the controller is gone -------------------------------------------------------------------


@pytest.fixture(params=[refusing, silent])
def gone(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a controller whose process is gone, or hangs."""
    with request.param() as url:
        yield url


@pytest.fixture
def stopped(gone: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerClient]:
    """Of such a controller; half a second later the trainer is asked to stop."""
    monkeypatch.setattr(module, "FINAL_REPORT_SECONDS", 0.3)
    monkeypatch.setattr(module, "_AUDIENCE_SECONDS", 8.0)
    stopping = threading.Event()
    client = ControllerClient(BlockingPeer(gone, timeout=6.0), stopping=stopping)
    threading.Timer(0.5, stopping.set).start()
    yield client
    client.close(0.0)


def test_a_stop_ends_a_broadcast_whose_receivers_are_waited_for(
    sender: BroadcastSender, stopped: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    settled(Publishing(BroadcastTransport(sender, TwoTensors(), stopped).stage), VERSION)
    (said,) = caplog.messages
    assert re.match(rf"{VERSION} was not published \(1 of 3\).* of the stop signal the receivers", said)


# --- buckets put together on rank 0 from what two processes hold --------------------------------------------


WEIGHTS = {
    "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(40.0).to(torch.bfloat16),
    "first's": torch.ones(3),
    "second's": torch.full((2, 2), 2.0, dtype=torch.bfloat16),
}
HELD = [
    {"a": (0, 13), "b": (0, 40), "first's": (0, 3), "second's": (0, 0)},
    {"a": (13, 22), "b": (40, 0), "first's": (3, 0), "second's": (0, 4)},
]
"""First element and count of each, by rank."""
BUCKET_BYTES = 64
PLAN = plan_of(WEIGHTS, BUCKET_BYTES)


def slices(rank: int) -> list[Slice]:
    whole = {name: (tuple(tensor.shape), DTYPES[tensor.dtype]) for name, tensor in WEIGHTS.items()}
    return [Slice(name, *whole[name], *held) for name, held in HELD[rank].items()]


def shards(rank: int) -> dict[str, Any]:
    held = HELD[rank].items()
    return {name: copy_of(WEIGHTS[name].flatten()[start : start + count]) for name, (start, count) in held}


def joined(rank: int, meeting: str) -> Gathering:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    return Gathering(Ranks(rank, 2, torch.device("cpu")), slices(rank), BUCKET_BYTES)


def second_rank(meeting: str) -> None:
    """Answers for three versions."""
    gathering = joined(1, meeting)
    for _ in range(3):
        gathering.answer(shards(1))
    dist.destroy_process_group()


def test_every_byte_comes_from_the_rank_that_holds_it(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=second_rank, args=(meeting,))
    other.start()
    try:
        gathering = joined(0, meeting)
        assert gathering.plan.metas == PLAN.metas
        assert len(PLAN.buckets) == 4
        wanted = [*buckets_of(PLAN, WEIGHTS)]

        assert all(map(torch.equal, gathering.buckets(shards(0)), wanted))
        gathering.done()

        given_up = gathering.buckets(shards(0))
        next(given_up)
        again = gathering.buckets(shards(0))
        next(again)
        with pytest.raises(RuntimeError, match="given up"):
            next(given_up)
        assert all(map(torch.equal, again, wanted[1:]))
        gathering.done()

        late = gathering.buckets(shards(0))
        next(late)
        gathering.done()
        with pytest.raises(RuntimeError, match="given up"):
            next(late)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
        dist.destroy_process_group()


def test_elements_that_no_rank_or_two_ranks_hold_are_refused() -> None:
    for every in ([slices(0)], [slices(0), slices(1), slices(1)]):
        with pytest.raises(ConfigError, match=r"'a': \d+.*exactly one rank.*weights\.transport"):
            metas_of(every)
