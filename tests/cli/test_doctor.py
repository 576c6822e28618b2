from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from flywheel.cli.doctor import DEPENDENCIES, EXTRAS

Run = Callable[..., Result]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}


def test_doctor_knows_the_project_s_dependencies_and_extras() -> None:
    assert set(DEPENDENCIES) == names(PROJECT["dependencies"])
    extras = {extra: names(required) for extra, required in PROJECT["optional-dependencies"].items() if extra != "dev"}
    assert {extra: set(modules) for extra, modules in EXTRAS.items()} == extras


def test_doctor_finds_a_store_without_creating_one(run: Run, searched: Path) -> None:
    missing = json.loads(run("doctor", "--json").stdout)["store"]
    assert (missing["exists"], missing["writable"], missing["problem"]) == (False, True, None)
    assert not Path("flywheel.db").exists()
    found = json.loads(run("doctor", "--store", str(searched), "--json").stdout)["store"]
    assert (found["exists"], found["campaigns"], found["trials"]) == (True, 1, 5)
    assert found["schema_version"]


def test_doctor_exits_0_and_reports_a_store_in_trouble(run: Run) -> None:
    result = run("doctor", "--store", "nowhere/trials.db")
    assert result.exit_code == 0
    assert "PROBLEM" in result.stdout
    assert run("doctor", "--store", "mysql://x/y").exit_code == 0


def test_doctor_says_honestly_that_latencies_are_predicted(run: Run) -> None:
    assert "predicted" in run("doctor").stdout
