from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import SEARCH, Run

from flywheel.cli.warming import COMPILING


def test_a_search_says_once_that_it_compiles_where_nothing_is_compiled_yet(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "none"))
    done = run(*SEARCH, "--trials", 1)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("compiling") == 1 and COMPILING in done.stderr
    assert done.stderr.index(COMPILING) < done.stderr.index("Latencies are predicted")


def test_a_search_says_nothing_of_it_where_the_code_is_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.cli.warming.is_compiled", lambda: True)
    assert "compiling" not in run(*SEARCH, "--trials", 1).stderr
