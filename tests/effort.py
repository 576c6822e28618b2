"""How many examples a law gets: all of them in .ci/run, a part of them by default. Every test runs either way."""

from __future__ import annotations

import os
from typing import Final

FULL: Final = os.environ.get("TEST_EFFORT") == "full"


def examples(full: int, quick: int | None = None) -> int:
    """`full`, or without TEST_EFFORT=full `quick`: a third unless it is given."""
    return full if FULL else -(-full // 3) if quick is None else quick
