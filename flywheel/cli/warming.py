"""The line that says why the first use of an installation takes long: numba compiles what searches need, for about half
a minute, once.

It asks the files of numba's cache, since importing numba takes 0.3 s, and a search's first process never does.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha1, sha256
from pathlib import Path
from typing import Final

from flywheel.cli.text import note
from flywheel.sealed import open_plain, read_plain

ENTRIES: Final = (("lowering/spreading.py", "_deal"), ("cost_model/events.py", "run"))
"""(source, function) of the compiled functions that Python calls; the rest are inlined there."""

_PACKAGE: Final = Path(__file__).resolve().parents[1]


def is_compiled() -> bool:
    """Whether the machine code of all ENTRIES is stored, and of their present sources. A guess: numba has the last
    word, which also compiles again for another CPU."""
    return all(_is_stored(_PACKAGE / source, function) for source, function in ENTRIES)


def _is_stored(source: Path, function: str) -> bool:
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    try:
        folder, digest = _folder(source), sha256(source.read_bytes()).hexdigest()
        stored = folder.glob(f"{source.stem}.{function}-*.{python}{sys.abiflags}.*.code")
        return any(_holds(file, digest.encode()) for file in stored)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return False


def _holds(path: Path, digest: bytes) -> bool:
    with open_plain(path) as file:
        return digest in read_plain(file)


def _folder(source: Path) -> Path:
    """Where numba stores the code of a source: in NUMBA_CACHE_DIR, beside the source, or in the user's cache."""
    own = f"{source.parent.name}_{sha1(str(source.parent).encode(), usedforsecurity=False).hexdigest()}"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen) / own
    beside = source.parent / "__pycache__"
    if os.access(beside if beside.is_dir() else source.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba" / own


COMPILING = "flywheel: compiling the lowering and the cost model for this machine, once; it takes about half a minute"


def announce_compiling(engine: str = "local") -> None:
    """Say on stderr that numba is about to compile, where its cache has no code of this version.

    A Ray cluster's machines compile, each for itself.
    """
    if engine == "local" and not is_compiled():
        note(COMPILING)
