"""What others build on is pinned: commands, messages, errors and entry points change on purpose only."""

from importlib.metadata import entry_points

import typer

import distill
import sync.base.errors as errors
import sync.wire as wire
from distill.cli.main import app
from distill.prompts.stream import Prompt
from distill.record.rollout import Rollout
from distill.record.store import FORMAT

FUNCTIONS = "Config DistillError evaluate load_config load_run plan preflight run"
COMMANDS = (
    "audit chat compare control environment evaluate evaluator export init kubernetes logs "
    "overview plan preflight prune quickstart report run samples servers slurm sql student sync teacher "
    "trace train version why"
)
MESSAGES = (
    "Audience BatchRequest BroadcastMembers CheckpointSaved "
    "EnvironmentInfo EpisodeBegin EpisodeContinue EpisodeEnd EpisodeFailed EpisodeOver "
    "EvalReply EvalReport EvalRequest FinalDigests "
    "GenerateFailed GenerateRequest Generated Head Heartbeat KeyReply KeyRequest Ok "
    "ProbeReply ProbeRequest Published "
    "ReplicaState ScoreReply ScoreRequest ScoresRelease ServerLease ServerLeaves ServerRegisters Servers "
    "StepReport Stop "
    "TeacherGenerateReply TeacherGenerateRequest TeacherInfo TeacherServers TrainBatch TrainerHello "
    "TrainerWelcome Turn UpdateReply UpdateRequest Wait Why"
)
ERRORS = (
    "AlreadyPublished ConfigError DataError DistillError Interrupted Overloaded RemoteError Replaced "
    "SnapshotError StoreError TooLarge Unreachable WireError WrongServer"
)
BY_PLACE = {
    Rollout: "id number prompt tokens logprob spans truncated teacher scored topk_ids reward by_teacher "
    "attempts since issued teacher_prompt own earned continues mask routes routes_from",
    Prompt: "id token_ids source answer text environment task messages",
    wire.Array: "dtype shape data",
    wire.Kept: "url key size digest",
    wire.SamplingMask: "sizes ids",
    wire.VersionSpan: "version start end",
}
"""What the arrays of a run hold, each field by its place, as of FORMAT 2."""


def test_the_functions_are_these() -> None:
    assert " ".join(distill.__all__) == FUNCTIONS
    assert all(getattr(distill, name).__doc__ for name in distill.__all__)


def test_the_commands_are_these() -> None:
    group = typer.main.get_command(app)
    assert " ".join(sorted(group.commands)) == COMMANDS  # type: ignore[attr-defined]


def test_the_messages_are_these() -> None:
    assert " ".join(sorted(kind.__name__ for kind in wire.Message.__subclasses__())) == MESSAGES


def test_what_a_run_on_disk_has_by_its_place_stays_there() -> None:
    """A new field goes to the end, with a default; any other change takes another FORMAT."""
    assert FORMAT == 2
    assert {kind: " ".join(kind.__struct_fields__) for kind in BY_PLACE} == BY_PLACE


def test_every_error_is_drawn_in_the_tree_above_its_module() -> None:
    names = sorted(name for name, kind in vars(errors).items() if isinstance(kind, type))
    assert " ".join(names) == ERRORS
    assert all(name in (errors.__doc__ or "") for name in names)


def test_the_entry_points_lead_somewhere() -> None:
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "distill")
    (plugin,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "onpolicy_distill")
    assert script.value == "distill.cli.main:main"
    assert plugin.value == "sync.vllm.plugin:register"
    assert callable(script.load())
