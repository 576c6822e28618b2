"""A short form of experiments/fuzz.py, whose table of a long run is results/fuzz.txt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from effort import LONG, examples
from strangers import TARGETS, Strangers

CASES = examples(12)
"""Of each target; the files that were hard are in other tests, by name."""


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    return Strangers(tmp_path_factory.mktemp("strangers"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_changed_file_is_read_or_refused_in_one_line(target: str, strangers: Strangers) -> None:
    assert [wrong for seed in range(CASES) for wrong in strangers.run(target, seed)[0]] == []


def test_the_same_case_is_the_same_file(strangers: Strangers) -> None:
    def made() -> bytes:
        strangers.run("program", 7)
        return (strangers.folder / "case" / "p.json").read_bytes()

    assert made() == made()


@LONG
def test_processes_share_their_cases_and_say_what_went_wrong_in_one_table(tmp_path: Path) -> None:
    words = ("--processes", "2", "--minutes", "5", "--cases", "2", "--seed", "7", "--targets", "machine,model")
    fuzz = Path(__file__).parents[2] / "experiments" / "fuzz.py"
    command = [sys.executable, str(fuzz), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Cases from number 7 on; 2 processes of ")
    assert [line.split()[:3] for line in lines[4:6]] == [["machine", "4", "4"], ["model", "4", "4"]]
    assert lines[7:] == ["8 cases, 8 commands, 0 went wrong"]


def test_the_harness_knows_a_command_that_went_wrong(strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise KeyError(path)

    monkeypatch.setattr("flywheel.cli.inspect.load_program", broken)
    wrong, _ = strangers.run("program", 1)
    assert any("flywheel inspect p.json: KeyError" in each for each in wrong), Path.cwd()
