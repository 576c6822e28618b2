"""A short form of experiments/fuzz.py, whose table of a long run is results/fuzz.txt."""

from __future__ import annotations

from pathlib import Path

import pytest
from strangers import Strangers

CASES = 12
"""Of each target; the files that were hard are in other tests, by name."""


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Strangers:
    return Strangers(tmp_path_factory.mktemp("strangers"))


@pytest.mark.parametrize(
    "target",
    ["program", "config", "schedule", "campaign", "machine", "table", "foreign", "model", "safetensors", "tokenizer",
     "store"],
)  # fmt: skip
def test_a_changed_file_is_read_or_refused_in_one_line(target: str, strangers: Strangers) -> None:
    assert [wrong for seed in range(CASES) for wrong in strangers.run(target, seed)[0]] == []


def test_the_same_case_is_the_same_file(strangers: Strangers) -> None:
    def made() -> bytes:
        strangers.run("program", 7)
        return (strangers.folder / "case" / "p.json").read_bytes()

    assert made() == made()


def test_every_target_is_fuzzed(strangers: Strangers) -> None:
    assert set(strangers.targets) == {
        "program", "config", "schedule", "campaign", "machine", "table", "foreign", "model", "safetensors", "tokenizer",
        "store",
    }  # fmt: skip


def test_the_harness_knows_a_command_that_went_wrong(strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise KeyError(path)

    monkeypatch.setattr("flywheel.cli.inspect.load_program", broken)
    wrong, _ = strangers.run("program", 1)
    assert any("flywheel inspect p.json: KeyError" in each for each in wrong), Path.cwd()
