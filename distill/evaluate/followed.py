"""The evaluator's own copy of the weights: any published version as a model or adapter folder."""

from __future__ import annotations

from distill.config import RunConfig
from distill.launch.roles import followed
from sync.claims import Claim
from sync.errors import ConfigError
from sync.weights.followed import Followed


def follow(config: RunConfig, claim: Claim) -> Followed:
    """The versions of the run that claims this process.

    Raises ConfigError when they do not go through the store.
    """
    if config.weights.road != "snapshot":
        raise ConfigError(
            f'weights.road is "{config.weights.road}" and the evaluator reads the store: '
            'set weights.road = "snapshot", or evaluation = false'
        )
    return Followed(followed(config, "evaluator"), claim)
