from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from cli.conftest import SEARCH, Run

from flywheel.cli import warming
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


@pytest.mark.parametrize(("source", "function"), warming.ENTRIES)
def test_every_entry_is_a_compiled_function(source: str, function: str) -> None:
    module = import_module(f"flywheel.{source.removesuffix('.py').replace('/', '.')}")
    assert hasattr(getattr(module, function), "py_func")


def test_an_empty_cache_is_cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not warming.is_compiled()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a pipe", "a device"])
def test_a_cache_of_no_plain_files_is_cold(
    make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for source, function in warming.ENTRIES:
        folder = warming._folder(warming._PACKAGE / source)
        folder.mkdir(parents=True, exist_ok=True)
        python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        make(folder / f"{Path(source).stem}.{function}-1.{python}.1.code")
    assert not warming.is_compiled()


def test_the_cache_is_where_numba_writes_it_and_is_of_the_text_not_of_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, stored = tmp_path / "pack", tmp_path / "stored"
    package.mkdir()
    source = package / "small.py"
    source.write_text("from flywheel.compiled import bare\n\n\n@bare\ndef once(n):\n    return n + 1\n")
    path = f"{package}{os.pathsep}{Path(__file__).parents[3]}"
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(stored), "PYTHONPATH": path}
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(stored))
    assert not warming._is_stored(source, "once")
    subprocess.run([sys.executable, "-c", "import small; small.once(1)"], env=environ, check=True, timeout=200)
    assert warming._is_stored(source, "once")
    later = source.stat().st_mtime + 1e6
    os.utime(source, (later, later))
    assert warming._is_stored(source, "once")
    source.write_text(f"{source.read_text()}\n")
    os.utime(source, (later, later))
    assert not warming._is_stored(source, "once")
