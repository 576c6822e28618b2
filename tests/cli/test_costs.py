"""A file under a megabyte costs a command at most 10 s of a core and 2 GB, whatever it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest
from costly_files import COSTLY, MOST_BYTES
from effort import FULL
from patience import HANG_S

MOST_S: Final = 10.0
MOST_KIB: Final = 2 * 10**9 // 1024
BRIEF: Final = (
    "config: heads and layers", "schedule: SMs", "campaign: dots", "campaign: dots on every line",
    "campaign: a long number", "validate: readers", "simulate: a ladder",
)  # fmt: skip
"""Those of a second or two, which always run."""
TWICE: Final = [name for name in COSTLY if name.startswith("validate: ")]
"""`simulate` validates the same files first."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BRIEF else pytest.mark.long if FULL and name not in TWICE
                          else pytest.mark.slow) for name in COSTLY]
)  # fmt: skip
def test_a_small_file_costs_little(name: str, tmp_path: Path) -> None:
    words = COSTLY[name](tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1.1 * MOST_BYTES
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-m", "flywheel", *words], cwd=tmp_path, stdout=said, stderr=said)
        late = threading.Timer(HANG_S, process.kill)
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        late.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    text = (tmp_path / "said").read_text()
    assert process.returncode in (0, 2, 3), text[-1000:]
    assert "internal error" not in text
    assert used.ru_utime + used.ru_stime <= MOST_S
    assert used.ru_maxrss <= MOST_KIB
