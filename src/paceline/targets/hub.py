"""Looking a model up on the Hugging Face hub, with the ways to fail told apart."""

from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from paceline.errors import DownloadError, UnknownModel, UnsupportedModel

_TIMEOUT = 10  # seconds


def find(repo: str, revision: str | None = None) -> str:
    """`repo` itself if the hub has it; while the hub cannot be asked, its folder in the hub's own cache.

    Raises `UnknownModel` (no such repository or revision), `UnsupportedModel` (files that cannot be loaded here),
    `DownloadError` (gated; no network or hub out of order, and not cached).
    """
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT)
    except GatedRepoError as error:
        raise DownloadError(f"{repo} is gated: accept its terms on the hub, then run `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise UnknownModel(f"{repo} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModel(f"the hub has no model {repo!r}") from error
    except Exception as error:  # offline mode, or whatever the hub's HTTP library raises without an answer
        config = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(config, str):
            return str(Path(config).parent)
        answered = isinstance(error, HfHubHTTPError)
        reason = f"the hub is out of order ({str(error).splitlines()[0]})" if answered else "no network"
        raise DownloadError(f"{reason}: {repo} cannot be fetched, and the hub's cache does not have it") from error
    files = {file.rfilename for file in info.siblings or ()}
    if "config.json" not in files:
        raise UnsupportedModel(f"{repo} has no config.json: it is not a transformers model")
    if not any(file.endswith(".safetensors") for file in files):
        raise UnsupportedModel(f"{repo} has no weights as safetensors, the only format that is loaded")
    return repo
