from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RUNNER = ROOT / "experiments" / "run_notebook.py"


@pytest.fixture
def runner() -> dict[str, Any]:
    """The script that runs notebooks."""
    return runpy.run_path(str(RUNNER))


def test_the_tour_runs_and_shows_an_output_wherever_there_is_one(
    runner: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)

    outputs = list(runner["run"](notebook))

    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = [[each["output_type"] for each in cell["outputs"]] for cell in cells]
    made = [[each["output_type"] for each in runner["as_outputs"](*output, 1)] for output in outputs]
    assert shown == made
    values = [value for _, value in outputs]
    assert values[-3:-1] == ["True", "False"]  # the proof of the program, and of the one without its waits


def test_a_cell_prints_and_its_last_expression_is_its_value(runner: dict[str, Any]) -> None:
    names: dict[str, Any] = {}
    assert runner["run_cell"]("x = 2\nprint(x)\nx + 1", names) == ("2\n", "3")
    assert runner["run_cell"]("y = x", names) == ("", None)
    assert runner["as_outputs"]("", None, 1) == []
