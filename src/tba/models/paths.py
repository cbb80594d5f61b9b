"""model.path: it names a folder, a model of the package or a hub model. Nothing here imports torch or transformers: a name
that leads nowhere is refused at once, without the hub's retries."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

SHIPPED = {
    "tba:arithmetic": "tasks/arithmetic/start_model",
    "tba:tldr": "tasks/tldr/start_model",
    "tba:red_team": "tasks/red_team/start_model",
    "tba:tools": "tasks/environments/start_model",
}
"""Models inside the package, by the name used for model.path."""
LFS_POINTER = b"version https://git-lfs"  # beginning of what a clone without git-lfs has in the place of a large file
HUB_SECONDS = 4.0  # deadline for the hub to say whether it has a model


def resolve_path(path: str) -> str:
    if path in SHIPPED:
        return str(files("tba").joinpath(SHIPPED[path]))
    if path.startswith("tba:"):
        raise ValueError(f"model.path={path!r} is not shipped with the package: it has {', '.join(SHIPPED)}.")
    if looks_like_folder(path) and not Path(path).is_dir():
        found = "that is a file, not a folder" if Path(path).is_file() else "there is no such folder"
        raise ValueError(f"model.path={path!r}: {found}. Give a folder with config.json or a hub name.")
    return path


def check_named(key: str, path: str | None) -> None:
    """Refuse a folder that is not there as soon as it is named; hub names are known when they are loaded."""
    if path is not None and looks_like_folder(path) and not Path(path).expanduser().is_dir():
        raise ValueError(f"{key}={path!r}: there is no such folder. Give one with config.json, or a hub name.")


def looks_like_folder(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def check_there(what: str, path: str) -> None:
    """Refuse a model that is neither here nor on the hub; `what` begins the message. The hub is asked once: loading would
    ask again and again, for a minute, before it gives up."""
    if Path(path).expanduser().is_dir() or Path(resolve_path(path)).is_dir():
        return
    # Imported here: only names that may be on the hub need it.
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    here, parent = f"{what}: there is no such folder", Path(path).expanduser().parent
    if str(parent) != "." and parent.is_dir():
        beside = [entry.name for entry in parent.iterdir() if entry.is_dir()]
        if close := difflib.get_close_matches(Path(path).name, beside, n=1):
            here += f" (the nearest is {parent / close[0]})"
    try:
        # A download of earlier serves offline: one of the two files says that the model or adapter is there.
        kept = [try_to_load_from_cache(path, name) for name in ("config.json", "adapter_config.json")]
    except HFValidationError:
        raise ValueError(f"{here}, and it is no hub name (owner/name). Give one of them.") from None
    if any(isinstance(found, str) for found in kept):
        return
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{here}, and the hub may not be asked (HF_HUB_OFFLINE=1) for what was not downloaded before. Give a folder "
            "with config.json and weights, or allow downloads."
        )
    try:
        HfApi().model_info(path, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        raise ValueError(
            f"{here}, and the hub has no such model, or not for you. Correct the name, or `hf auth login` for a private one."
        ) from None
    except HfHubHTTPError:
        return  # the hub is there: what it thinks of the name shows when the model is loaded
    except Exception as error:  # each HTTP client has its own kinds of connections that fail
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{here}, and the hub cannot be reached ({message}). Give a folder with config.json and weights, or a hub name "
            "where the hub is in reach."
        ) from None
