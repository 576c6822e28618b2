from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def racy(program: Path, tmp_path: Path) -> Path:
    """The program with a wait taken from its last task."""
    document = json.loads(program.read_text(encoding="utf-8"))
    document["tasks"][-1]["waits"] = []
    path = tmp_path / "racy.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_a_valid_program_is_accepted(run: Run, program: Path) -> None:
    result = run("validate", "--strict", str(program))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{program}: ACCEPTED")


def test_json_prints_one_line_a_file_and_checks_all_of_them(run: Run, program: Path, racy: Path) -> None:
    Path("junk.json").write_bytes(b"\xff{")
    Path("list.json").write_text("[]", encoding="utf-8")
    files = ["missing.json", str(racy), "junk.json", ".", "list.json", str(program)]
    result = run("validate", "--json", *files)
    assert result.exit_code == 3
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["path"] for line in lines] == files
    assert [line["ok"] for line in lines] == [False] * 5 + [True]
    assert all(list(line) == ["path", "ok", "errors", "warnings", "stats"] for line in lines)
    assert [error["code"] for line in lines for error in line["errors"]] == [
        "unreadable", "race-read", "unreadable", "unreadable", "unreadable",
    ]  # fmt: skip
    race = lines[1]["errors"][0]
    assert list(race) == ["code", "message", "task"]
    assert isinstance(race["task"], int)
    assert lines[-1]["stats"]["tasks"] > 0


def test_a_program_comes_from_stdin(run: Run, program: Path) -> None:
    result = run("validate", "--json", "-", stdin=program.read_text(encoding="utf-8"))
    assert json.loads(result.stdout)["path"] == "-"
    assert result.exit_code == 0


def test_the_human_report_names_the_file_and_the_finding(run: Run, racy: Path) -> None:
    result = run("validate", str(racy), "missing.json")
    assert f"{racy}: REJECTED" in result.stdout
    assert "[race-read]" in result.stdout
    assert "missing.json: REJECTED" in result.stdout
    assert "No such file" in result.stdout


def test_a_schedule_is_named_as_what_it_is(run: Run, searched: Path) -> None:
    assert run("export", "--format", "schedule", "--store", searched, "-o", "best.json").exit_code == 0
    document = json.loads(Path("best.json").read_text(encoding="utf-8"))
    Path("config.json").write_text(json.dumps(document["config"]), encoding="utf-8")

    result = run("validate", "best.json", "config.json")

    assert result.exit_code == 3
    assert "is an exported schedule of smollm2-135m on l4, bf16, context 512, not a program; flywheel " in result.stdout
    assert "a ScheduleConfig, not a program" in result.stdout


def test_a_program_that_asks_for_more_shared_memory_than_its_gpu_has_is_rejected_by_every_command(
    run: Run, program: Path
) -> None:
    """The specification's bound of ScheduleConfig, which a file may break: lowering never makes such a program."""
    document = json.loads(program.read_text(encoding="utf-8"))
    limit = document["target"]["smem_bytes_per_block_optin"]
    document["config"]["smem_bytes_per_block"] = limit + 1
    Path("greedy.json").write_text(json.dumps(document), encoding="utf-8")
    fact = f"smem_bytes_per_block={limit + 1} is not in 0..{limit}"
    proved = run("validate", "--json", "greedy.json")
    assert proved.exit_code == 3
    assert [error["code"] for error in json.loads(proved.stdout)["errors"]] == ["smem-limit"]
    simulated = run("simulate", "--json", "greedy.json")
    assert simulated.exit_code == 3
    assert json.loads(simulated.stdout)["prediction"] is None
    inspected = json.loads(run("inspect", "--json", "greedy.json").stdout)
    assert (inspected["valid"], inspected["predicted_us"]) == (False, None)
    assert all(fact in text for text in (proved.stdout, simulated.stdout, *inspected["errors"]))
    Path("config.json").write_text(json.dumps(document["config"]), encoding="utf-8")
    work = ("--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict")
    evaluated = run("evaluate", "config.json", *work, "--json")
    assert evaluated.exit_code == 3
    found = json.loads(evaluated.stdout)
    assert (found["outcome"], found["codes"]) == ("rejected", ["config"])
    assert fact in found["reason"]
