"""A model of the Hugging Face hub, fetched into its cache after a look at the disk (before step 1 of the walk)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from eagle3.disk_room import free_bytes
from eagle3.errors import RequestError
from eagle3.progress import size_text

log = logging.getLogger("eagle3")


def fetch(name: str, revision: str | None, patterns: Sequence[str], where: str) -> Path:
    """The cached folder with the files of a hub model that fit `patterns`; what is absent is fetched.

    Its size is said before, and held against the disk's free space. Without a network what the cache has is taken.
    RequestError, naming `where`, when there is no such model, no access, no network and no copy, or no room.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    _check_space(name, revision, patterns, where)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        problem = f"{offline}, and {constants.HF_HUB_CACHE} has no whole copy of it"
        hint = "download it where there is a network (`hf download`) and give its folder"
        raise _unfetched(where, name, problem, hint) from error
    except HfHubHTTPError as error:
        hint = "check the spelling; for a private or gated model run `hf auth login`"
        raise _unfetched(where, name, _words(error), hint) from error
    except Exception as error:
        raise _unfetched(
            where, name, _words(error), "check the spelling and the network, or give its folder"
        ) from error


def cached(name: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """The folder of a hub model that was fetched before; None when there is none. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _check_space(name: str, revision: str | None, patterns: Sequence[str], where: str) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    try:
        model = HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # fetching tells what is wrong, or does without the hub
        log.debug("%s: the sizes of %s are unknown (%s)", where, name, _words(error))
        return
    files = {file.rfilename: file.size or 0 for file in model.siblings or ()}
    wanted = filter_repo_objects(files, allow_patterns=list(patterns))
    absent = [file for file in wanted if not isinstance(try_to_load_from_cache(name, file, revision=model.sha), str)]
    if not absent:
        return
    cache = Path(constants.HF_HUB_CACHE)
    needed, free = sum(files[file] for file in absent), free_bytes(cache.absolute())
    if needed > free:
        raise RequestError(
            f"{where}: {name} needs {size_text(needed)} more in {len(absent)} files, but only {size_text(free)} are "
            f"free in {cache}; make room, set HF_HOME to a folder on a larger disk, or give the folder where it lies"
        )
    log.info("%s: fetching %s, %s in %d files, into %s", where, name, size_text(needed), len(absent), cache)


def _unfetched(where: str, name: str, problem: str, hint: str) -> RequestError:
    return RequestError(
        f"{where}: {name} is neither a local folder nor a hub model that could be fetched: {problem}; expected a "
        f"checkpoint folder or a hub id; {hint}"
    )


def _words(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
