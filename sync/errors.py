"""Every error that a user of this project can meet.

DistillError(ValueError)     root: always "value, rule, remedy" in one message
├── ConfigError              a setting that cannot be used
├── DataError                prompts, tokens or scores that cannot be used
├── WireError                a message of another schema, or one that is not a message
├── RemoteError              a peer answered that it cannot do what was asked
│   ├── Overloaded           the peer is full; `retry_after` seconds says when to come back
│   └── WrongServer          the peer serves another run, or another model
├── Unreachable              a peer is really gone, after all retries
├── StoreError               a store cannot be read or written
│   └── AlreadyPublished     another writer was first under this name
├── SnapshotError            a snapshot that must not be applied (altered, cut, wrong base, wrong run)
└── Interrupted              the run was asked to stop, or must stop
"""


class DistillError(ValueError):
    """Root of the errors meant for people; the message names value, rule and remedy."""


class ConfigError(DistillError):
    """A setting that cannot be used."""


class DataError(DistillError):
    """Prompts, tokens or scores that cannot be used."""


class WireError(DistillError):
    """A message of another schema, or bytes that are no message at all."""


class RemoteError(DistillError):
    """A peer understood the request and refused it."""


class Overloaded(RemoteError):
    """A peer's queue is full; ask again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WrongServer(RemoteError):
    """A peer serves another run, or scores with another model, than the one that asks."""


class Unreachable(DistillError):
    """A peer did not answer within the deadline, after every retry."""


class StoreError(DistillError):
    """A store cannot be read or written."""


class AlreadyPublished(StoreError):
    """Another writer created this key first; nothing was changed."""


class SnapshotError(DistillError):
    """A snapshot that must not be applied: altered, cut, on another base, or of another run."""


class Interrupted(DistillError):
    """The run was asked to stop, or has to stop, before its work was done."""
