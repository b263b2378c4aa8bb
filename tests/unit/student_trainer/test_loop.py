"""The loop's order of events, its endings, and the ways that versions leave; all in memory."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_step import by_two_ranks, flat_rows
from trainer_fakes import ALONE, RecordedClient, RecordedLearner
from waiting import until

from student_trainer.__main__ import _exit_code as exit_code
from student_trainer.config import TrainerConfig
from student_trainer.controller_client import ControllerClient
from student_trainer.ledger import Ledger, read
from student_trainer.loop import Outcome, Trainer, checkpoint, checkpoint_due, finish, run, train
from student_trainer.ranks import Ranks
from student_trainer.transports import Publishing, SnapshotTransport, Work
from sync import wire
from sync.base import durable
from sync.base.errors import DataError, RemoteError, StoreError, Unreachable
from sync.weights.snapshots.admin import Collected
from sync.wire import Published, StepReport, Stop, TrainBatch, Version, Wait, pack

OVER = Stop(reason="over", checkpoint=False)
TWO_STEPS = ["step 0", "publish 1", "step 1", "publish 2"]


def batch(step: int) -> TrainBatch:
    """Two rollouts, apart; the first one's second token is an environment's."""
    rows = flat_rows([f"r{step}"], [[]], [[5, 6, 7]], own=pack(np.array([1, 0, 1], np.uint8)))
    parts = [rows, flat_rows([f"s{step}"], [[]], [[5, 6, 7]])]
    return TrainBatch(version=Version(0, step), denominator=1, micro_batches=parts)


class Story:
    """Records what the loop does, in order."""

    def __init__(
        self, run_dir: Path, steps: int = 0, checkpoint: bool = False, publish_every: int = 1, **trainer: Any
    ) -> None:
        """`steps`: batches that the controller has; `checkpoint`: whether its stop asks for one."""
        settings = {"deepspeed": "ds.json", "checkpoint_minutes": 0.0, **trainer}
        run = {"run": "r", "run_dir": run_dir, "controller_url": "http://c", "steps": 1}
        weights = {"publish_every": publish_every}
        config = TrainerConfig(**run, student={"path": "s"}, trainer=settings, weights=weights)
        batches = [batch(step) for step in range(steps)]
        self.client, self.learner = RecordedClient(batches, checkpoint), RecordedLearner()
        self.lines, self.folder = self.learner.lines, run_dir / "ledger"
        ledger = Ledger(self.folder, Version(0, 0), None, 0)
        self.trainer = Trainer(config, ALONE, self.learner, self.client, Publishing(self.stage), ledger)

    def stage(self, version: Version, anchor: bool) -> Work:
        """A transport to nowhere."""
        self.lines.append(f"publish {version.step}")
        return lambda: False

    def reported(self) -> list[str]:
        return [f"{type(event).__name__} {event.version.step}" for event in self.client.reported]


def test_a_step_is_trained_recorded_published_saved_and_then_reported(tmp_path: Path) -> None:
    story = Story(tmp_path, 2, checkpoint_every=2)
    assert train(story.trainer) is Outcome.STOP
    assert story.lines == [*TWO_STEPS, "save 2"]
    assert story.reported() == ["StepReport 1", "CheckpointSaved 2", "StepReport 2"]
    lineage = read(story.folder)[0]
    assert (lineage.steps, lineage.tokens) == ({1: ["r0", "s0"], 2: ["r1", "s1"]}, {1: 5, 2: 5})
    report = story.client.reported[0]
    assert list(report.seconds) == ["wait", "train", "publish", "checkpoint"]
    assert report.parts == {"forward": 0.5}


def test_of_ranks_that_share_rows_the_first_names_them(tmp_path: Path) -> None:
    story = Story(tmp_path, 1, sequence_parallel=2)
    story.trainer.ranks = Ranks(1, 1, torch.device("cpu"))
    train(story.trainer)
    found = read(story.folder)[0]
    assert (found.steps, found.tokens) == ({1: []}, {1: 0})


@pytest.mark.parametrize(
    ("steps", "options", "outcome", "lines"),
    [
        (3, {"publish_every": 2}, Outcome.STOP, ["step 0", "step 1", "publish 2", "step 2"]),
        (1, {"checkpoint": True}, Outcome.STOP_AND_CHECKPOINT, ["step 0", "publish 1", "save 1"]),
        (2, {"checkpoint": True, "checkpoint_every": 2}, Outcome.STOP_AND_CHECKPOINT, [*TWO_STEPS, "save 2"]),
    ],
    ids=["versions between", "stop decides whether to save", "the last step is saved once"],
)
def test_what_is_published_and_saved(
    tmp_path: Path, steps: int, options: dict[str, Any], outcome: Outcome, lines: list[str]
) -> None:
    story = Story(tmp_path, steps, **options)
    assert train(story.trainer) is outcome
    assert story.lines == lines


def test_a_waiting_trainer_publishes_again_on_request(tmp_path: Path) -> None:
    story = Story(tmp_path)
    answers: list[Any] = [Wait(), Wait(publish=True), Wait(), batch(0), OVER]
    story.client.poll = lambda version: answers.pop(0)
    assert train(story.trainer) is Outcome.STOP
    assert story.lines == ["publish 0", "step 0", "publish 1"]


def test_a_checkpoint_is_saved_when_rank_0s_clock_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("student_trainer.loop.time.monotonic", lambda: now[0])
    story = Story(tmp_path, 6, checkpoint_every=4, checkpoint_minutes=25 / 60)

    def stepping(part: TrainBatch) -> None:
        now[0] += 10.0

    story.learner.on_step, story.trainer.saved_at = stepping, now[0]
    train(story.trainer)
    assert [line for line in story.lines if line.startswith("save")] == ["save 3", "save 4"]


@pytest.mark.parametrize(("rank", "due"), [(0, True), (1, False)])
def test_the_clock_of_rank_0_alone_decides_for_every_rank(tmp_path: Path, rank: int, due: bool) -> None:
    votes: list[float] = []

    class Voting(Ranks):
        def highest(self, value: float) -> float:
            votes.append(value)
            return 1.0

    story = Story(tmp_path, checkpoint_minutes=1e-9)
    story.trainer.ranks = Voting(rank, 2, torch.device("cpu"))
    story.trainer.saved_at = 0.0
    assert checkpoint_due(story.trainer), "what the ranks agreed on"
    assert votes == [due]


def test_a_signal_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    story = Story(tmp_path, 5)

    def stepping(part: TrainBatch) -> None:
        if part.version.step == 1:
            story.client.stopping.set()

    story.learner.on_step = stepping
    assert train(story.trainer) is Outcome.INTERRUPTED
    assert story.lines == [*TWO_STEPS, "save 2"]
    assert isinstance(story.client.reported[-1], wire.CheckpointSaved)


def test_a_trainer_that_was_rolled_back_saves_no_checkpoint(tmp_path: Path) -> None:
    """It would push out the oldest one, where the next trainer may begin."""
    story = Story(tmp_path, 2)

    def confirm(version: Version) -> None:
        raise RemoteError(f"{version} is not of the current lineage")

    story.client.confirm = confirm
    with pytest.raises(RemoteError, match="not of the current lineage"):
        checkpoint(story.trainer)
    assert story.lines == []


def test_a_batch_for_other_weights_is_refused(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.client.poll = lambda version: batch(7)
    with pytest.raises(DataError, match="batch is for L000-v00000007, the trainer is at L000-v00000000"):
        train(story.trainer)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), "another rank ended"),
        (ConnectionResetError(104, "Connection reset by peer"), "unexpected ConnectionResetError"),
    ],
)
def test_the_end_of_another_rank_is_told_from_a_socket_that_was_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Any, said: str
) -> None:
    def fail(config: TrainerConfig) -> None:
        raise error

    monkeypatch.setattr("student_trainer.loop.run", fail)
    path = tmp_path / "trainer.json"
    path.write_text(Story(tmp_path).trainer.config.model_dump_json())
    assert exit_code(path) == 1
    (line,) = caplog.records
    assert line.message.startswith(said)
    assert (line.exc_info is None) == isinstance(error, RuntimeError)


# --- HTTP, with a peer in memory -----------------------------------------------------------------------


class FakePeer:
    """Answers in order, as soon as `may_answer` is set; keeps what it was asked."""

    def __init__(self, answers: list[wire.Message | Exception], at_once: bool = True) -> None:
        self.asked: list[tuple[str, wire.Message | None]] = []
        self.may_answer = threading.Event()
        self._answers = answers
        if at_once:
            self.may_answer.set()

    def call(self, path: str, body: Any, kind: Any, timeout: float | None = None, max_bytes: int = 0) -> Any:
        assert self.may_answer.wait(600)
        self.asked.append((path, body))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_next_batch_is_fetched_while_a_step_trains_and_a_controller_that_is_gone_raises() -> None:
    peer = FakePeer([batch(0), batch(1), Wait(), Unreachable("gone")])
    source = ControllerClient(peer, 1, 2)
    assert source.poll(Version(0, 0)) == batch(0)
    source.expect(Version(0, 1))
    until(lambda: len(peer.asked) == 2, 600)
    assert source.poll(Version(0, 1)) == batch(1)
    assert source.poll(Version(0, 2)) == Wait()
    with pytest.raises(Unreachable, match="gone"):
        source.poll(Version(0, 2))
    assert [body.version.step for _, body in peer.asked] == [0, 1, 2, 2]
    assert {(body.rank, body.world_size) for _, body in peer.asked} == {(1, 2)}
    source.close()


def test_a_signal_ends_the_wait_for_a_batch() -> None:
    peer, asked = FakePeer([Wait()], at_once=False), threading.Event()
    source = ControllerClient(peer, stopping=asked)
    threading.Timer(0.05, asked.set).start()
    assert source.poll(Version(0, 0)) == Wait()
    assert peer.asked == [], "the answer had not come"
    peer.may_answer.set()
    source.close()


def test_events_arrive_in_order_and_a_lost_one_is_raised() -> None:
    events = [StepReport(version=Version(0, step), metrics={}, seconds={}) for step in range(3)]
    peer = FakePeer([wire.Ok(), wire.Ok(), Unreachable("gone")])
    controller = ControllerClient(peer)
    for event in events:
        controller.report(event)
    with pytest.raises(Unreachable, match="gone"):
        controller.close()
    assert [body for _, body in peer.asked] == events


def test_heartbeats_of_rank_0_say_what_it_does_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, saves, publishes = 100.0, "it saves the checkpoint of L000-v00000004", "it publishes L000-v00000004"
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clients = [ControllerClient(FakePeer([]), rank) for rank in range(2)]  # type: ignore[arg-type]
    for client in clients:
        client.does(saves)
        client.publishing = lambda: publishes
    now = 103.0
    clients[0].does(saves)
    first, second = (client.heartbeat(Version(0, 0)).does for client in clients)
    assert (first, second) == ({"trainer": (saves, 3.0), "publisher": (publishes, 0.0)}, {})


def test_a_publication_is_said_to_wait_for_disk_space_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "RETRY_SECONDS", 0.01)
    space = threading.Event()

    def write() -> bool:
        if not space.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return False

    publishing = Publishing(lambda version, anchor: lambda: durable.until_disk_space(write, "shard 0"))
    assert publishing.words() == ""
    publishing.publish(Version(0, 3), anchor=False)
    told = "it publishes L000-v00000003; shard 0 waits for disk space"
    until(lambda: publishing.words() == told)
    space.set()
    publishing.settle()
    assert publishing.words() == ""
    assert durable.waiting_for_space == []


def test_a_start_is_confirmed_behind_its_events_and_by_a_silent_controller_too() -> None:
    event = StepReport(version=Version(0, 3), metrics={}, seconds={})
    peer = FakePeer([wire.Ok(), wire.Ok(), Unreachable("gone"), RemoteError("rolled back")])
    controller = ControllerClient(peer)
    controller.report(event)
    controller.confirm(Version(0, 4))
    assert [body for _, body in peer.asked] == [event, wire.Heartbeat(version=Version(0, 4), rank=0)]
    controller.confirm(Version(0, 4))
    with pytest.raises(RemoteError, match="rolled back"):
        controller.confirm(Version(0, 4))
    controller.close()


def test_a_stopped_trainer_does_not_wait_for_a_controller_that_is_gone() -> None:
    peer = FakePeer([wire.Ok()], at_once=False)
    controller = ControllerClient(peer)
    controller.report(StepReport(version=Version(0, 1), metrics={}, seconds={}))
    controller.close(0.05)
    assert peer.asked == [], "it was not waited for"
    peer.may_answer.set()


# --- publishing ------------------------------------------------------------------------------------------


class FakePublisher:
    """Publishes into a list; fails as often as told."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.failures = 0

    def anchor(
        self, version: Version, parent: Version | None, folder: Path | None, shards: Any, kind: Any
    ) -> Published:
        assert folder.is_dir()
        return self._report(kind, version)

    def delta(self, version: Version, shards: Any) -> Published:
        return self._report("delta", version)

    def _report(self, kind: Any, version: Version) -> Published:
        if self.failures:
            self.failures -= 1
            raise StoreError("disk full")
        self.done.append((kind, version.step))
        self.anchor_due = version.step == 2 or kind == "lora"
        return Published(version=version, kind=kind, bytes=5, full_bytes=10, seconds=0.1)


def nothing_collected() -> Collected:
    return Collected([], [], 0)


def to_a_store(
    folder: Path, publisher: Any, learner: Any = None, client: Any = None, collect: Any = nothing_collected
) -> Publishing:
    learner, client = learner or RecordedLearner(), client or RecordedClient()
    return Publishing(SnapshotTransport(publisher, learner, client, folder / "scratch", None, collect).stage)


def go(publishing: Publishing, *steps: int) -> None:
    for step in steps:
        publishing.settle()
        publishing.publish(Version(0, step), publishing.anchor_due)
    publishing.settle()


@pytest.mark.parametrize(
    ("adapters", "failures", "published"),
    [
        (False, 0, [("full", 0), ("delta", 1), ("delta", 2), ("full", 3), ("delta", 4)]),
        (False, 1, [("full", 0), ("full", 2), ("full", 3), ("delta", 4)]),
        (True, 0, [("lora", 0), ("lora", 1), ("lora", 2), ("lora", 3), ("lora", 4)]),
    ],
    ids=["an anchor first and when due", "an anchor behind a version that failed", "adapters are whole"],
)
def test_versions_are_anchors_or_deltas(
    tmp_path: Path, adapters: bool, failures: int, published: list[tuple[str, int]]
) -> None:
    publisher, client = FakePublisher(), RecordedClient()
    path = to_a_store(tmp_path, publisher, RecordedLearner(adapters), client)
    go(path, 0)
    publisher.failures = failures
    go(path, 1, 2, 3, 4)
    assert publisher.done == published
    told = [(event.kind, event.version.step) for event in client.reported if isinstance(event, Published)]
    assert told == published
    assert list((tmp_path / "scratch").iterdir()) == []


def test_rank_0_alone_votes_for_an_anchor(tmp_path: Path) -> None:
    client, learner, publisher = RecordedClient(), RecordedLearner(), FakePublisher()
    learner.ranks = Ranks(1, 2, torch.device("cpu"))
    transport = SnapshotTransport(publisher, learner, client, tmp_path, None, nothing_collected)
    assert transport.stage(Version(0, 2), False)() is False
    assert publisher.anchor_due
    assert client.reported == []


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"L000-v00000001": "is damaged"}, "garbage collection left L000-v00000001: is damaged"),
        (None, "the store was not collected: the store went away"),
    ],
)
def test_garbage_is_collected_every_ten_minutes_at_most_and_what_it_leaves_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: dict[str, str] | None, said: str
) -> None:
    going_on = threading.Event()

    def collect() -> Collected:
        assert going_on.wait(600)
        if left is None:
            raise StoreError("the store went away")
        return Collected([], [], 0, left)

    path = to_a_store(tmp_path, FakePublisher(), collect=collect)
    go(path, 0)
    go(path, 1, 2, 3, 4)
    (collecting,) = (thread for thread in threading.enumerate() if thread.name == "collect")
    going_on.set()
    collecting.join()
    assert caplog.text.count(said) == 1


def begun(tmp_path: Path, steps: int, failures: int) -> tuple[Story, FakePublisher]:
    """A run after its first version; so many publications fail from then on."""
    story, publisher = Story(tmp_path, steps), FakePublisher()
    story.trainer.publishing = to_a_store(tmp_path, publisher, story.learner, story.client)
    go(story.trainer.publishing, 0)
    publisher.failures = failures
    return story, publisher


@pytest.mark.parametrize(
    ("pause", "answers", "failures", "published"),
    [
        (0.0, [batch(0), *[Wait()] * 3, batch(1), OVER], 2, [("full", 0), ("full", 1), ("delta", 2)]),
        (60.0, [batch(0), *[Wait(), Wait(publish=True)] * 4, OVER], 1, [("full", 0)]),
        (0.0, [batch(0), *[Wait()] * 9], 3, [("full", 0)]),
    ],
    ids=["no later version comes", "after a pause, also where it is asked for", "its failures end the run"],
)
def test_a_trainer_that_waits_publishes_again_what_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pause: float,
    answers: list[Any],
    failures: int,
    published: list[tuple[str, int]],
) -> None:
    """No rollouts may be started until it is there. The next answer comes when nothing is on its way."""
    monkeypatch.setattr("student_trainer.transports.REPEAT_SECONDS", pause)
    monkeypatch.setattr("student_trainer.loop._PAUSE_SECONDS", 0.0)
    story, publisher = begun(tmp_path, 0, failures)
    publishing, left = story.trainer.publishing, iter(answers)
    story.client.poll = lambda version: publishing.settle() and next(left)
    with pytest.raises(StoreError, match="disk full") if failures == 3 else nullcontext():
        assert train(story.trainer) is Outcome.STOP
        publishing.settle()
    assert publisher.done == published


def test_no_rank_goes_on_while_the_first_version_waits_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait in the next collective, which has a limit; the others vote meanwhile."""
    votes, gone_on, here, highest = [], [], threading.local(), Ranks.highest
    run_id = wire.RunIdentity("r", "aa")
    welcome = wire.TrainerWelcome(version=Version(0, 0), parent=None, teachers=[], run=run_id)
    learner, client = RecordedLearner(), RecordedClient()
    vars(learner).update(hello=None, vocab=9, ends=(), begin=lambda *_: None)
    vars(client).update(hello=lambda *_: welcome, teacher=None, head=None)

    def publish() -> bool:
        until(lambda: len(votes) > 5 or gone_on)
        return False

    def caught(*_: Any) -> None:
        gone_on.append(len(votes))
        raise DataError("far enough")

    def started(one: Ranks) -> None:
        here.ranks = one
        with pytest.raises(DataError, match="far enough"):
            run(Story(tmp_path / str(one.rank)).trainer.config)

    def transport(*_: Any) -> Any:
        return lambda version, anchor: publish if here.ranks.rank == 0 else lambda: False

    fakes = {"join": lambda _: here.ranks, "Learner": lambda *_: learner, "open_transport": transport}
    fakes |= {"ControllerClient": lambda *_: client, "catch_stop_signals": caught, "SETTLE_SECONDS": 0.01}
    for name, fake in fakes.items():
        monkeypatch.setattr(f"student_trainer.loop.{name}", fake)
    monkeypatch.setattr(Ranks, "highest", lambda *given: votes.append(1) or highest(*given))
    by_two_ranks(started)
    assert min(gone_on) > 5


def test_a_version_is_published_again_once_it_is_over_and_without_a_pause_after_a_success() -> None:
    may_end = threading.Event()
    publishing = Publishing(lambda version, anchor: lambda: not may_end.wait(600))
    publishing.publish(Version(0, 1), anchor=True)
    assert not publishing.repeats(due=True), "it is on its way"
    may_end.set()
    publishing.settle()
    assert publishing.repeats(due=True)
    assert not publishing.repeats(due=False)


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("outcome", [Outcome.STOP, Outcome.STOP_AND_CHECKPOINT, Outcome.INTERRUPTED])
def test_the_last_version_has_its_digests_reported_and_is_an_error_where_it_failed(
    tmp_path: Path, outcome: Outcome, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    story, _ = begun(tmp_path, 1, failures)
    interrupted = outcome is Outcome.INTERRUPTED
    train(story.trainer)
    with pytest.raises(StoreError) if failures and not interrupted else nullcontext():
        finish(story.trainer, outcome)
    digests = wire.FinalDigests(version=Version(0, 1), digests={"a": "digest"})
    assert (story.client.reported[-1] == digests) is (digests in story.client.reported) is (not failures)
    assert (tmp_path / "final").is_dir() is not interrupted, "what was trained is there"
    loud = "the last version L000-v00000001 was not published, so no replica can be compared with it"
    assert (loud in caplog.text) is bool(failures and interrupted)


def test_an_export_that_fails_is_not_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, folder: Path) -> None:
        raise DataError("the disk is full")

    story = Story(tmp_path, 1)
    monkeypatch.setattr(RecordedLearner, "export", full)
    train(story.trainer)
    with pytest.raises(DataError, match="full"):
        finish(story.trainer, Outcome.STOP)
    assert story.reported() == ["StepReport 1"], "what has reported the end is not started again"


def test_other_errors_of_a_publication_end_the_run(tmp_path: Path) -> None:
    publisher = FakePublisher()
    publisher.delta = lambda version, shards: [][1]
    path = to_a_store(tmp_path, publisher)
    path.publish(Version(0, 1), anchor=False)
    with pytest.raises(IndexError):
        path.settle()
