"""Whether the Hub can be asked: once, before its libraries ask six times for every file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sync.base.errors import ConfigError


def check_reachable(name: str, revision: str | None, kind: Literal["model", "dataset"]) -> None:
    """Raise ConfigError for a Hub id of which nothing is in the cache while the Hub cannot be reached."""
    import httpx2
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if constants.HF_HUB_OFFLINE or Path(name).is_dir():
        return
    cache, file = constants.HF_HUB_CACHE, "config.json" if kind == "model" else "README.md"
    try:
        if not Path(cache, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind, revision=revision))
    except (HfHubHTTPError, HFValidationError):
        return  # an answer, which whoever loads it reads
    except httpx2.HTTPError as error:
        raise ConfigError(
            f"{kind} {name!r} is no folder here, nothing of it is in {cache}, and {constants.ENDPOINT}"
            f" cannot be reached ({error}): correct the path, or let this machine reach it"
        ) from None
