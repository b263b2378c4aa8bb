"""What is asked of the Hub before its libraries, which ask six times for every file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Literal

from sync.base.errors import ConfigError, Overloaded
from sync.base.retry import pause_told, retrying

log = logging.getLogger(__name__)
WAIT_SECONDS: Final = 900.0
"""Longest wait for a Hub that asks to come back later; its rate limits count over five minutes."""


def check_reachable(name: str, revision: str | None, kind: Literal["model", "dataset"]) -> None:
    """Wait while the Hub says when to come back for an id of which nothing is in the cache. Raises
    ConfigError when it cannot be reached, or asks for more than WAIT_SECONDS. Whoever loads the id reads any
    other answer."""
    import httpx2
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    cache, file = constants.HF_HUB_CACHE, "config.json" if kind == "model" else "README.md"

    def ask() -> None:
        try:
            if not Path(cache, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
                get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind, revision=revision))
        except HfHubHTTPError as error:
            status = error.response.status_code
            pause = pause_told(error.response.headers.get("retry-after"))
            if status in (429, 503) and pause is not None:
                told = f"{constants.ENDPOINT} answers {status} and asks to come back in {pause:g} s"
                raise Overloaded(f"{kind} {name!r}: {told}", max(1.0, pause)) from None
        except HFValidationError:
            return
        except httpx2.HTTPError as error:
            raise ConfigError(
                f"{kind} {name!r} is no folder here, nothing of it is in {cache}, and {constants.ENDPOINT}"
                f" cannot be reached ({error}): correct the path, or let this machine reach it"
            ) from None

    if constants.HF_HUB_OFFLINE or Path(name).is_dir():
        return
    try:
        retrying(Overloaded, within=WAIT_SECONDS, note=lambda error: log.warning("%s", error))(ask)
    except Overloaded as error:
        raise ConfigError(
            f"{error}, more than the {WAIT_SECONDS:g} s that are waited: start again then, or log in to the "
            "Hub (HF_TOKEN), whose limits are higher"
        ) from None


def optional_file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a model on the Hub, from the cache or asked for once; None: there is none within reach."""
    import httpx2
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        log.debug("%s of %s is not in the cache: %s", file, name, error)
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_hf_file_metadata(hf_hub_url(name, file, revision=revision))
        return Path(hf_hub_download(name, file, revision=revision))
    except (OSError, httpx2.HTTPError, ValueError) as error:
        log.debug("%s of %s is not read: %s", file, name, error)
        return None
