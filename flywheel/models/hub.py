"""Checkpoints of the Hugging Face Hub: from its local cache, else downloaded by huggingface_hub if that is installed.

The layout of the cache is `models--OWNER--NAME/{refs/main, snapshots/COMMIT}`. Source: huggingface/huggingface_hub,
docs/source/en/guides/manage-cache.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from flywheel.errors import UnknownNameError
from flywheel.installing import install_line
from flywheel.models.tokenizer_files import PATTERNS

_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST_NAME: Final = 256
"""Most bytes of the file that names a commit."""
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")
_COPIES: Final = ("*/*.safetensors", "*/*.safetensors.index.json")
"""Patterns of files to leave out: folders of a repository hold copies of the weights in other formats."""


def is_repo(name: str) -> bool:
    """Whether `name` may be a repository's, OWNER/NAME."""
    return _REPO.fullmatch(name) is not None


def cached_repo(name: str) -> str | None:
    """The repository OWNER/NAME in the cache, whatever the case of `name`; None where the cache has none."""
    if not is_repo(name):
        return None
    wanted = f"models--{name.replace('/', '--')}"
    with suppress(OSError):
        for folder in sorted(_cache().iterdir()):
            if folder.name.lower() == wanted.lower() and _snapshot(folder) is not None:
                return folder.name.removeprefix("models--").replace("--", "/", 1)
    return None


def cached_folder(repo: str) -> Path | None:
    """The directory of the newest snapshot of a repository, with a config.json; None where the cache has none."""
    return _snapshot(_cache() / f"models--{repo.replace('/', '--')}") if is_repo(repo) else None


def repo_of(folder: Path) -> str | None:
    """The repository whose newest snapshot in the cache is this absolute directory; None for any other one."""
    owner = folder.parent.parent
    if folder.parent.name != "snapshots" or owner.parent != _cache().resolve() or _snapshot(owner) != folder:
        return None
    return owner.name.removeprefix("models--").replace("--", "/", 1)


def obtain(name: str, weights: bool, announce: Callable[[str], None]) -> None:
    """Make sure that the cache has the repository `name`, with its weights if `weights`.

    `announce` takes a line before a download. Raises UnknownNameError, which says what to do, where the cache has no
    config and none can be downloaded. Weights that cannot be downloaded are announced.
    """
    folder = cached_folder(cached_repo(name) or name)
    if folder is not None and not (weights and not any(folder.glob("*.safetensors*"))):
        return
    trouble = _download(name, weights, announce)
    if trouble is None:
        return
    if folder is None:
        raise UnknownNameError(f"model {name!r} is no directory and not in {_cache()}; {trouble}")
    announce(f"{name}: its weights are not in {_cache()}; {trouble}")


def _download(repo: str, weights: bool, announce: Callable[[str], None]) -> str | None:
    """Download a repository into the cache. Returns what is wrong and what to do, if that fails."""
    by_hand = f"on a machine with a network: hf download {repo}, then --model DIRECTORY"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"HF_HUB_OFFLINE forbids a download; {by_hand}"
    if find_spec("huggingface_hub") is None:
        return f"to download it: {install_line('hf')}"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    announce(f"downloading {repo} from the Hugging Face Hub{'' if weights else ', without its weights'}")
    wanted = [*PATTERNS, *(_WEIGHTS if weights else ())]
    try:
        snapshot_download(repo, allow_patterns=wanted, ignore_patterns=list(_COPIES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        return f"the download failed ({type(error).__name__}: {said}); {by_hand}"
    return None


def _snapshot(owner: Path) -> Path | None:
    """The snapshot of a repository's folder that `main` names, else the only one."""
    with suppress(OSError):
        found = sorted(each for each in (owner / "snapshots").iterdir() if (each / "config.json").is_file())
        reference = owner / "refs" / "main"
        commit = _first_words(reference) if reference.is_file() else ""
        named = [each for each in found if each.name == commit]
        chosen = named or (found if len(found) == 1 else [])
        return chosen[0].resolve() if chosen else None
    return None


def _first_words(reference: Path) -> str:
    with reference.open("rb") as file:
        return file.read(_MOST_NAME).decode("ascii", "replace").strip()


def _cache() -> Path:
    """The Hub's cache, as huggingface_hub finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"
