from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.ir import program_from_json, validate
from flywheel.measure.record import COLUMNS
from flywheel.plan import program_id
from flywheel.store.schedule import load_schedule
from flywheel.store.sql import open_store
from flywheel.store.tsv import from_tsv

Run = Callable[..., Result]


@pytest.fixture
def export(run: Run, searched: Path) -> Run:
    def exported(form: str, *options: str) -> Result:
        return run("export", "--format", form, "--store", str(searched), *options)

    return exported


@pytest.mark.parametrize("form", ["schedule", "program", "tsv", "csv", "t4"])
def test_the_same_rows_give_the_same_bytes_on_stdout_and_in_a_file(form: str, export: Run) -> None:
    first = export(form, "--campaign", "small")
    assert first.exit_code == 0, first.stderr
    written = export(form, "--campaign", "small", "--output", "out")
    assert written.stdout == ""
    assert Path("out").read_text(encoding="utf-8") == first.stdout == export(form, "--campaign", "small").stdout


def test_the_schedule_is_the_best_row_and_says_predicted(export: Run, searched: Path) -> None:
    document = json.loads(export("schedule", "--campaign", "small").stdout)
    with open_store(searched) as store:
        best = min(store.trials("small"), key=lambda record: record.predicted_us or 0.0)
    assert document["config_id"] == best.config_id
    assert document["predicted"]["latency_us"] == best.predicted_us
    assert document["measured"] is None
    assert document["provenance"]["search"].startswith("flywheel search --model smollm2-135m --gpu l4 ")
    assert "--name small" in document["provenance"]["search"]


def test_the_program_is_the_row_s_program_and_valid(export: Run) -> None:
    document = json.loads(export("schedule", "--campaign", "small").stdout)
    program = program_from_json(export("program", "--campaign", "small").stdout)
    assert program_id(program) == document["program_id"]
    assert validate(program, strict=True).ok


def test_the_command_of_a_schedule_makes_its_program_again(export: Run, run: Run) -> None:
    assert export("schedule", "--campaign", "small", "--output", "best.json").exit_code == 0
    command = json.loads(Path("best.json").read_text(encoding="utf-8"))["command"].split()
    lowered = run(*command[1:])
    assert lowered.stdout == export("program", "--campaign", "small").stdout
    assert run("lower", "--config", "best.json").stdout == lowered.stdout
    assert program_id(program_from_json(lowered.stdout)) == load_schedule("best.json").program_id


def test_tables_hold_every_trial_under_the_documented_columns(export: Run, searched: Path) -> None:
    with open_store(searched) as store:
        rows = store.trials("small")
    assert from_tsv(export("tsv").stdout) == rows
    header, *cells = csv.reader(io.StringIO(export("csv").stdout))
    assert header == [column.name for column in COLUMNS]
    assert len(cells) == len(rows)


def test_a_table_as_json_has_nulls_where_cells_are_empty(export: Run) -> None:
    document = json.loads(export("tsv", "--json").stdout)
    assert document["trials"][0]["latency_us"] is None
    assert json.loads(export("tsv", "--json", "--output", "t.tsv").stdout)["trials"] == 5


def test_a_model_and_a_gpu_name_the_best_row_too(export: Run) -> None:
    by_name = export("schedule", "--campaign", "small").stdout
    assert export("schedule", "--model", "smollm2-135m", "--gpu", "l4").stdout == by_name


def test_the_environment_does_not_narrow_a_named_campaign(export: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_MODEL", "llama3-8b")
    assert export("schedule", "--campaign", "small").exit_code == 0
    assert export("schedule", "--campaign", "small", "--model", "llama3-8b").exit_code == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpu", "l4"), "--model is missing"),
        (("--model", "smollm2-135m"), "--gpu is missing"),
        (("--campaign", "smll"), "did you mean small?"),
        (("--campaign", "small", "--measured"), "no measured trial"),
        (("--model", "smollm2-135m", "--gpu", "l4", "--context", "64"), "context 64"),
    ],
)
def test_a_row_that_is_not_there_is_a_usage_error(options: tuple[str, ...], expected: str, export: Run) -> None:
    result = export("schedule", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


def test_measured_tables_hold_no_predictions(export: Run) -> None:
    assert len(export("tsv", "--measured").stdout.splitlines()) == 1
    assert len(export("tsv", "--predicted").stdout.splitlines()) == 6


def test_a_store_that_is_not_there_is_code_5_and_not_created(run: Run) -> None:
    assert run("export", "--format", "tsv").exit_code == 5
    assert not Path("flywheel.db").exists()


def test_a_directory_is_no_output(export: Run) -> None:
    result = export("tsv", "--output", ".")
    assert result.exit_code == 2
    assert "is a directory" in result.stderr


def test_a_row_whose_program_has_changed_is_store_trouble(export: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.plan.program_id", lambda _: "another")
    result = export("program", "--campaign", "small")
    assert (result.exit_code, result.stdout) == (5, "")
    assert "program another" in result.stderr


def test_t4_holds_one_kind_of_latency_and_says_which(export: Run) -> None:
    result = export("t4", "--campaign", "small")
    assert (result.exit_code, result.stderr) == (0, "5 configs, 5 of them predicted\n")
    document = json.loads(result.stdout)
    assert document["metadata"]["latencies"] == "predicted"
    assert {tuple(found["objectives"]) for found in document["results"]} == {("predicted_time",)}
    assert export("t4", "--campaign", "small", "--predicted").stdout == result.stdout
    measured = export("t4", "--campaign", "small", "--measured")
    assert (measured.exit_code, measured.stdout) == (2, "")
    assert "no measured trial" in measured.stderr


def test_t4_of_different_work_is_a_usage_error(run: Run, searched: Path) -> None:
    rows = run("export", "--format", "tsv", "--store", searched).stdout
    assert run("import", "-", "--name", "a", "--store", "two.db", stdin=rows).exit_code == 0
    other = rows.replace("\tbf16\t512\t", "\tbf16\t64\t")
    assert run("import", "-", "--name", "b", "--store", "two.db", stdin=other).exit_code == 0
    result = run("export", "--format", "t4", "--store", "two.db")
    assert (result.exit_code, result.stdout) == (2, "")
    assert run("export", "--format", "t4", "--store", "two.db", "--context", "64").exit_code == 0


def test_a_model_of_a_short_context_is_found_by_its_name_alone(run: Run, shallow: str) -> None:
    usual = json.loads((Path(shallow) / "config.json").read_text(encoding="utf-8"))
    Path("short.json").write_text(json.dumps({**usual, "max_position_embeddings": 256}), encoding="utf-8")
    work = ("--model", "short.json", "--gpu", "l4")
    assert run("search", *work, "--measure", "predict", "--jobs", "1", "--trials", "1").exit_code == 0
    assert json.loads(run("export", "--format", "schedule", *work).stdout)["context"] == 256
