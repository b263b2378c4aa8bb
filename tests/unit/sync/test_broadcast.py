"""Weights over gloo between threads and processes: groups last while their members do, and nothing hangs."""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta

import psutil
import pytest
import torch
from flat_tensors import buckets_of, plan_of
from waiting import until

from sync.base.errors import SnapshotError, Unreachable
from sync.weights import rendezvous
from sync.weights.broadcast import BroadcastSender, Receiver, Reception
from sync.weights.snapshots.checkpoint import tensor_digest as digest
from sync.wire import Audience, BroadcastTicket, server

WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "b": torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scalar": torch.tensor(-0.0, dtype=torch.float16),
}
PLAN = plan_of(WEIGHTS, bucket_bytes=1024)
"""Of three buckets: a tensor begins in one and ends in another."""
DIGESTS = {name: digest(tensor) for name, tensor in WEIGHTS.items()}


PATIENCE = 3600.0
"""No test waits for so long: what ends a wait is what it shows."""
OPEN = ExitStack()
"""Senders and receivers of a test."""


@pytest.fixture(autouse=True)
def all_closed():
    yield
    OPEN.close()


def open_sender(timeout: float = PATIENCE, device: str = "cpu", token: str | None = None) -> BroadcastSender:
    return OPEN.enter_context(closing(BroadcastSender("127.0.0.1", timeout, device, token=token)))


@pytest.fixture
def sender():
    return open_sender()


def receiver(timeout: float = PATIENCE, device: str = "cpu", token: str | None = None) -> Receiver:
    return OPEN.enter_context(closing(Receiver(timeout, device, token)))


def receive(sender: BroadcastSender, group: str, rank: int, size: int) -> Reception:
    return receiver().receive(BroadcastTicket(sender.address, group, rank, size))


def send(
    sender: BroadcastSender, group: str, size: int, lost: Callable[[], str | None] = lambda: None
) -> None:
    sender.send(Audience(group=group, world_size=size), PLAN, buckets_of(PLAN, WEIGHTS), lost)


def test_a_member_waits_for_the_senders_word_as_long_as_the_sender_answers():
    """A slow second member must not cost the first, which the sender counts as there already."""
    served = rendezvous.Served("127.0.0.1", None)
    meeting = rendezvous.Meeting(served.ask, "group", timedelta(0))
    slow = threading.Timer(1.5, meeting.set, ("go", "formed"))
    with pytest.raises(RuntimeError, match="go did not come within 0 s"):
        meeting.get("go")
    slow.start()
    try:
        assert meeting.get("go", seconds=math.inf) == b"formed"
        with pytest.raises(RuntimeError, match="digests did not come: the broadcast was given up"):
            meeting.get("digests", lambda: True, math.inf)
    finally:
        slow.join()
        served.close()
    with pytest.raises(Unreachable, match="the sender is closed"):
        meeting.get("digests", seconds=math.inf)


@pytest.fixture
def formed(monkeypatch) -> list[tuple[int, int]]:
    """(rank, size) of every group that a member formed."""
    found, form = list[tuple[int, int]](), rendezvous._backend

    def backend(store, rank, size, *rest):
        found.append((rank, size))
        return form(store, rank, size, *rest)

    monkeypatch.setattr(rendezvous, "_backend", backend)
    return found


def described(named: tuple[str, torch.Tensor]) -> tuple[object, ...]:
    return named[0], named[1].dtype, named[1].shape, digest(named[1])


def sent(sender: BroadcastSender, group: str, *members: Receiver) -> None:
    """Send the weights to members, in the order of ranks, which then hold exactly those bits."""
    size = 1 + len(members)
    tickets = [BroadcastTicket(sender.address, group, rank, size) for rank in range(1, size)]
    receptions = [one.receive(ticket) for one, ticket in zip(members, tickets, strict=True)]
    send(sender, group, size)
    for received in (reception.result() for reception in receptions):
        assert received.digests == DIGESTS
        assert [*map(described, received.tensors.items())] == [*map(described, WEIGHTS.items())]


def test_a_group_lasts_as_long_as_all_its_members_keep_their_places(sender, formed):
    one, two, three = receiver(), receiver(), receiver()
    for version in range(3):
        sent(sender, f"v{version}", one, two)
    assert sorted(formed) == [(0, 3), (1, 3), (2, 3)]
    for members in ((one, two, three), (three, two, one), (three, two), (receiver(), two)):
        formed.clear()
        for version in range(2):
            sent(sender, f"{id(members)}-{version}", *members)
        size = 1 + len(members)
        assert sorted(formed) == [(rank, size) for rank in range(size)]


def test_of_a_lost_member_the_store_keeps_the_news_alone_and_the_next_broadcast_has_its_own_group(
    sender, formed
):
    one, two = receiver(), receiver()
    keys = sender._served._values
    sent(sender, "v0", one, two)
    of_the_group = {*keys}
    assert not [key for key in keys if key.split("/")[1] in ("backend", "plan", "here", "go", "received")]
    sent(sender, "v1", one, two)
    assert {*keys} == of_the_group

    reception = one.receive(BroadcastTicket(sender.address, "v2", 1, 3))
    news = iter([None, None, "student-1: it was killed"])  # without it, every wait here would take an hour
    with pytest.raises(Unreachable, match=r"broadcast v2 to 2 workers .*student-1: it was killed"):
        send(sender, "v2", 3, lambda: next(news))
    until(lambda: "v2/plan" not in keys, 600)
    for told in (reception, two.receive(BroadcastTicket(sender.address, "v2", 2, 3))):
        with pytest.raises(SnapshotError, match="student-1: it was killed"):
            told.result()
    formed.clear()
    for version in (3, 4):
        sent(sender, f"v{version}", one)
    assert sorted(formed) == [(0, 2), (1, 2)]


def test_a_trainer_that_starts_again_forms_a_new_group(sender, formed):
    one, names = receiver(), ("v0", "v1")
    for name in names:
        sent(sender, name, one)
    again = open_sender()
    for name in names:
        sent(again, name, one)
    assert sorted(formed) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_without_an_audience_nothing_is_sent(sender):
    send(sender, "nobody", 1)


def test_buckets_that_were_not_announced_are_refused_and_the_receiver_is_told(sender):
    reception = receive(sender, "wrong", 1, 2)
    with pytest.raises(SnapshotError, match="announced"):
        sender.send(Audience(group="wrong", world_size=2), PLAN, [torch.zeros(1)])
    with pytest.raises(SnapshotError, match="not received"):
        reception.result()


def test_a_replica_that_never_comes_ends_the_broadcast_within_the_time_out():
    sender = open_sender(1.0)
    reception = receive(sender, "half", 1, 3)
    with pytest.raises(Unreachable, match="half"):
        send(sender, "half", 3)
    with pytest.raises(SnapshotError, match="not received"):
        reception.result()


TRAINER = """
from sync.weights.broadcast import BroadcastSender
from sync.weights.buckets import Plan
from sync.wire import Audience
sender = BroadcastSender("127.0.0.1", timeout=3600.0)
print(sender.address, flush=True)
sender.send(Audience(group="g", world_size=3), Plan([]), [])
"""


def test_a_trainer_that_is_killed_ends_what_waits_for_its_word():
    """The second member never comes: the first would wait for an hour."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    reception = receiver().receive(BroadcastTicket(trainer.stdout.readline().strip(), "g", 1, 3))
    time.sleep(1.0)
    assert not reception.done
    trainer.kill()
    with pytest.raises(SnapshotError, match=r"the sender at .* does not answer"):
        reception.result()
    trainer.communicate()


STRANGER = """
import sys
from datetime import timedelta
from sync.weights.rendezvous import Visitor
from sync.wire import KeyRequest
asks = [
    KeyRequest(do="set", key="g/given up", value=b"by a stranger"),
    KeyRequest(do="delete", key="g/plan"),
    KeyRequest(do="get", key="g/plan"),
]
for token in (None, "a guess"):
    for ask in asks:
        try:
            Visitor(sys.argv[1], token, timedelta(seconds=600)).ask(ask)
            sys.exit("it was answered")
        except RuntimeError as error:
            print(error)
"""


class Obliging:
    """In the place of the guard: whatever the token, all are admitted."""

    def __init__(self, app, **_) -> None:
        self._app = app

    async def __call__(self, *asgi) -> None:
        await self._app(*asgi)


def test_a_stranger_on_this_machine_neither_ends_nor_reads_nor_replaces_a_broadcast(monkeypatch, caplog):
    """It comes in the middle: one receiver waits for the other. Then it poses as the sender."""
    sender = open_sender(token="of the run")
    first = receiver(token="of the run").receive(BroadcastTicket(sender.address, "g", 1, 3))
    audience = Audience(group="g", world_size=3)
    sending = threading.Thread(target=sender.send, args=(audience, PLAN, buckets_of(PLAN, WEIGHTS)))
    sending.start()
    line = [sys.executable, "-c", STRANGER, sender.address]
    stranger = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert stranger.returncode == 0, stranger.stderr
    assert stranger.stdout.count("does not answer") == stranger.stdout.count("needs the bearer token") == 6
    assert caplog.text.count("127.0.0.1 was refused: it does not hold the run's token") == 6
    second = receiver(token="of the run").receive(BroadcastTicket(sender.address, "g", 2, 3))
    for reception in (first, second):
        assert reception.result().digests == DIGESTS
    sending.join()
    for gate, message in ((server.Gate, "the same token"), (Obliging, "does not hold this run's")):
        monkeypatch.setattr(server, "Gate", gate)
        ticket = BroadcastTicket(open_sender(token="a guess").address, "g", 1, 2)
        with pytest.raises(SnapshotError, match=message):
            receiver(token="of the run").receive(ticket).result()


def test_nothing_of_a_broadcast_listens_beyond_its_own_address(sender):
    """Seen while a group is up: the tensors are asked for then."""
    reception, seen = receive(sender, "seen", 1, 2), set[str]()

    def buckets():
        listening = [one for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
        seen.update(one.laddr.ip for one in listening)
        assert len(listening) >= 3, "the store's and the group's two"
        yield from buckets_of(PLAN, WEIGHTS)

    sender.send(Audience(group="seen", world_size=2), PLAN, buckets())
    assert set(reception.result().tensors) == set(WEIGHTS)
    assert seen == {"127.0.0.1"}


@pytest.mark.parametrize(("trainer", "replica", "by"), [("cuda", "cpu", "nccl"), ("cpu", "cuda", "gloo")])
def test_a_replica_that_could_never_meet_the_trainer_says_so_and_is_no_member(trainer, replica, by):
    """No GPU is needed: neither side gets as far as a group."""
    message = rf"broadcasts with {by} and this replica is on a {replica} device.*weights\.transport"
    sender = open_sender(device=trainer)
    reception = receiver(device=replica).receive(BroadcastTicket(sender.address, "mixed", 1, 2))
    with pytest.raises(Unreachable, match=message):
        send(sender, "mixed", 2, lambda: reception.error)
    with pytest.raises(SnapshotError, match=message):
        reception.result()


VICTIM = """
import sys, time
from sync.weights.broadcast import Receiver
from sync.wire import BroadcastTicket
reception = Receiver(600.0).receive(BroadcastTicket(sys.argv[1], "dying", 1, 3))
while not reception.bytes_received:
    time.sleep(0.001)
print("receiving", flush=True)
time.sleep(600)
"""


def test_a_replica_that_is_killed_on_the_way_fails_the_broadcast_and_the_next_one_works():
    sender = open_sender()
    weights = {"w": torch.ones(1 << 20, dtype=torch.float32)}
    plan = plan_of(weights, bucket_bytes=1 << 18)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, sender.address], stdout=subprocess.PIPE)
    survivor = receive(sender, "dying", 2, 3)

    def killing_on_the_way():
        for at, bucket in enumerate(buckets_of(plan, weights)):
            if at == 2:  # asked for when the first has left
                assert victim.stdout.readline() == b"receiving\n"
                while not survivor.bytes_received:
                    time.sleep(0.001)
                victim.kill()
                assert victim.wait(60) == -signal.SIGKILL
            yield bucket

    audience, killed = Audience(group="dying", world_size=3), lambda: victim.poll() and "it was killed"
    with pytest.raises(Unreachable, match="dying"):
        sender.send(audience, plan, killing_on_the_way(), killed)
    victim.stdout.close()
    with pytest.raises(SnapshotError):
        survivor.result()
    assert 0 < survivor.bytes_received < plan.nbytes
    sent(sender, "after", receiver())


class LikeNccl:
    """gloo's group under NCCL's name; notes how it ends, and a broadcast of it hangs when asked to."""

    def __init__(self, inner, rank: int, ends: list[str], hang: threading.Event | None) -> None:
        self._inner, self._rank, self._ends, self._hang = inner, rank, ends, hang

    def name(self) -> str:
        return "nccl"

    def broadcast(self, tensors, options):
        if self._hang is not None:
            assert self._hang.wait(600.0), "the group was not aborted"
            raise RuntimeError("the group was aborted")
        return self._inner.broadcast(tensors, options)

    def abort(self) -> None:
        self._ends.append(f"{self._rank} aborted")
        if self._hang is not None:
            self._hang.set()


def like_nccl(monkeypatch, ends: list[str], hanging: int | None = None) -> None:
    gloo = rendezvous._backend

    def backend(store, rank, *rest):
        return LikeNccl(gloo(store, rank, *rest), rank, ends, threading.Event() if rank == hanging else None)

    monkeypatch.setattr(rendezvous, "_backend", backend)


def test_a_group_that_did_its_work_is_cut_off_only_when_it_is_let_go_of(monkeypatch, sender):
    ends: list[str] = []
    like_nccl(monkeypatch, ends)
    members = receiver(), receiver()
    sent(sender, "whole", *members)
    assert ends == []
    for member in members:
        member.close()
    assert sorted(ends) == ["1 aborted", "2 aborted"]


def test_a_receiver_that_hears_of_the_end_aborts_the_group_it_waits_in(monkeypatch, sender):
    """Left in it, torch would end the whole replica when the group's time-out is over."""
    ends: list[str] = []
    like_nccl(monkeypatch, ends, hanging=1)
    reception = receive(sender, "hangs", 1, 2)
    news = iter([None, None, "student-2: it was killed"])
    with pytest.raises(Unreachable, match="student-2"):
        send(sender, "hangs", 2, lambda: next(news))
    with pytest.raises(SnapshotError, match="student-2: it was killed"):
        reception.result()
    until(lambda: "1 aborted" in ends)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of its two ranks")
def test_the_same_bits_arrive_over_nccl():
    sender = open_sender(60.0, "cuda:0")
    reception = receiver(60.0, "cuda:1").receive(BroadcastTicket(sender.address, "nccl", 1, 2))
    send(sender, "nccl", 2)
    assert reception.result().digests == DIGESTS
