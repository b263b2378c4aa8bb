"""A saved view of a wandb project: what to look at first, by section; `distill overview`."""

from __future__ import annotations

from typing import Any, Final

from distill.config import RunConfig
from sync.base.errors import ConfigError, RemoteError

NAME: Final = "Overview"
PANELS: Final = {
    "Quality": ("eval/reverse_kl", "eval/pass_rate", "eval/reward", "train/reverse_kl", "train/reward_mean"),
    "Optimizer": ("train/lr", "train/grad_norm", "train/student_entropy", "train/truncation_rate"),
    "Off-policy": ("buffer/age_mean", "train/mismatch_kl", "train/effective_sample_size", "buffer/depth"),
    "Speed": ("train/tokens_total", "train/tokens_share", "perf/wait_seconds", "perf/train_seconds"),
    "Weight sync": ("sync/bytes", "sync/seconds", "sync/pause_seconds"),
}
"""Section → figures (`distill.metrics.names`), a curve over the steps for each; samples and report follow."""


def save(config: RunConfig) -> str:
    """Save the view in the project that `[tracking]` names, a new one each time; its URL.

    Raises ConfigError without the package or a key, RemoteError when wandb does not take it.
    """
    try:
        import wandb
        from wandb_workspaces import workspaces
    except ImportError:
        raise ConfigError(
            "an overview needs the package wandb-workspaces: pip install 'onpolicy-distill[overview]'"
        ) from None
    tracking = config.tracking
    try:
        wandb.setup(wandb.Settings(silent=True))
        entity = tracking.entity or wandb.Api().default_entity
        view = workspaces.Workspace(
            name=NAME, entity=entity, project=tracking.project, sections=_sections(workspaces.Section)
        )
        return str(view.save().url)
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ConfigError(f"wandb refuses the view: {error}; correct WANDB_API_KEY or [tracking]") from None
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise RemoteError(f"wandb does not take the view: {error}") from None


def _sections(section: Any) -> list[Any]:
    from wandb_workspaces.reports.v2 import LinePlot, MediaBrowser

    curves = {
        name: [LinePlot(x="step", y=[metric], title=metric) for metric in of] for name, of in PANELS.items()
    }
    media = [MediaBrowser(media_keys=["samples"]), MediaBrowser(media_keys=["report"])]
    sections = {**curves, "Samples and report": media}
    return [section(name=name, panels=panels, is_open=True) for name, panels in sections.items()]
