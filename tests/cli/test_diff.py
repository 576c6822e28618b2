from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def other(run: Run, shallow: str) -> str:
    result = run("lower", "--model", shallow, "--gpu", "l4", "--set", "depth=2", "--output", "other.json",
                 "--set", "fuse.down=0")  # fmt: skip
    assert result.exit_code == 0
    return "other.json"


def test_a_program_is_the_same_as_itself(run: Run, program: Path) -> None:
    result = run("diff", str(program), str(program))
    assert (result.exit_code, result.stdout) == (0, "same\n")


def test_two_programs_differ_in_config_tasks_and_prediction(run: Run, program: Path, other: str) -> None:
    result = run("diff", str(program), other, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["same"] is False
    assert document["config"]["pipelining_depth"][1] == 2
    assert document["target"] == {}
    assert document["tasks"]["mlp_add (ADD)"][0] is None
    before, after = document["totals"]["predicted_us"]
    assert 0 < before != after > 0
    assert "program_id" in document["totals"]


def test_the_text_shows_both_sides(run: Run, program: Path, other: str) -> None:
    result = run("diff", str(program), other)
    assert result.exit_code == 1
    assert "pipelining_depth" in result.stdout
    assert "B - A" in result.stdout


def test_a_file_that_cannot_be_read_is_code_2_not_a_difference(run: Run, program: Path) -> None:
    assert run("diff", str(program), "missing.json").exit_code == 2


def test_records_are_compared_by_value(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8")) | {"target": None}
    Path("a.json").write_text(json.dumps(document), encoding="utf-8")
    document["tasks"][3]["params"]["source"] = "elsewhere"
    document["counters"][0]["note"] = "renamed"
    Path("b.json").write_text(json.dumps(document), encoding="utf-8")
    result = run("diff", "a.json", "b.json", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["records"] == {"tasks only here": [1, 1], "counters only here": [1, 1]}
    text = run("diff", "a.json", "b.json").stdout
    assert "tasks only here" in text
    assert "the same" not in text


def test_programs_in_another_order_are_said_to_be_so(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["counters"].reverse()
    Path("b.json").write_text(json.dumps(document), encoding="utf-8")
    result = run("diff", str(program), "b.json", "--json")
    assert (result.exit_code, json.loads(result.stdout)["records"]) == (1, {})


def test_buffers_are_rows_of_numbers(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["buffers"][0]["shape"][0] += 64
    Path("b.json").write_text(json.dumps(document), encoding="utf-8")
    text = run("diff", str(program), "b.json").stdout
    assert "buffers." in text
    assert "{" not in text


def test_a_number_that_json_lacks_is_null_and_equals_itself(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["meta"]["odd"] = float("nan")
    Path("nan.json").write_text(json.dumps(document), encoding="utf-8")
    result = run("diff", str(program), "nan.json", "--json")
    assert (result.exit_code, json.loads(result.stdout)["meta"]) == (1, {"odd": [None, None]})
    assert run("diff", "nan.json", "nan.json").stdout == "same\n"
    assert json.loads(run("inspect", "nan.json", "--json").stdout)["meta"]["odd"] is None


def test_lines_fit_a_terminal_and_nothing_is_cut(
    run: Run, program: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(Path(other).read_text(encoding="utf-8"))
    document["meta"] |= {"note": "long " * 60, "words": [1] * 90}
    Path("long.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr("flywheel.cli.text.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("diff", str(program), "long.json").stdout.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("long long") >= 29
    assert any(line.split()[:2] == ["totals", "predicted_us"] for line in lines)
    assert "…" not in "".join(lines)
