"""How a life of a rollout ends before the buffer. None is an error: none leaves the controller's stages."""

from __future__ import annotations

from distill.record.rollout import DropReason, RequeueReason


class Lost(Exception):
    """The completion is lost: the prompt is requeued, until it has spent rollout.max_attempts."""

    def __init__(self, reason: RequeueReason, tokens: int = 0) -> None:
        """`tokens`: what is known to have been generated for nothing."""
        super().__init__(reason)
        self.reason: RequeueReason = reason
        self.tokens = tokens


class Unusable(Exception):
    """It must not be trained on: it is quarantined, and dropped."""

    quarantined = True

    def __init__(self, reason: DropReason, detail: str, tokens: int = 0) -> None:
        """`tokens`: what was generated for nothing and is not in the rollout."""
        super().__init__(detail)
        self.reason: DropReason = reason
        self.detail, self.tokens = detail, tokens


class Unneeded(Unusable):
    """It cannot be trained on, and there is nothing to look at: it is dropped alone."""

    quarantined = False


class Dropped(Exception):
    """It was dropped when a turn of it was requeued: nothing is left to do."""
