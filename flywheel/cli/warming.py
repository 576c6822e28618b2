"""The line that says why the first use of an installation takes long."""

from __future__ import annotations

from flywheel.cli.text import note
from flywheel.search.trials.warmth import is_compiled

COMPILING = "flywheel: compiling the lowering and the cost model for this machine, once; it takes about half a minute"


def announce_compiling(engine: str = "local") -> None:
    """Say on stderr that numba is about to compile, where its cache has no code of this version.

    A Ray cluster's machines compile, each for itself.
    """
    if engine == "local" and not is_compiled():
        note(COMPILING)
