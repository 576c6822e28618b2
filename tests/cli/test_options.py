from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from cli.conftest import MODEL, SEARCH, Run

from flywheel.cli.main import COMMANDS, cli
from flywheel.cli.options import OutputFile

TABLES = (
    ("models",), ("targets",), ("knobs", *MODEL), ("campaigns", "--store", "STORE"),
    ("campaigns", "small", "--store", "STORE"), ("inspect", "PROGRAM"), ("simulate", "PROGRAM", "--orders", "1"),
)  # fmt: skip
EXPORTS = ("schedule", "program", "tsv", "csv", "t4")


def filled(words: tuple[str, ...], store: Path, program: Path) -> list[str]:
    return [str({"STORE": store, "PROGRAM": program}.get(word, word)) for word in words]


@pytest.mark.parametrize("words", TABLES, ids=lambda words: "-".join(words[:2]))
def test_output_takes_what_json_prints(words: tuple[str, ...], searched: Path, program: Path, run: Run) -> None:
    words_of = filled(words, searched, program)
    printed = run(*words_of, "--json").stdout
    written = run(*words_of, "-o", "made.json")
    assert (written.exit_code, written.stdout, written.stderr) == (0, "", "wrote made.json\n")
    assert json.loads(Path("made.json").read_text(encoding="utf-8")) == json.loads(printed)
    assert run(*words_of, "--output", "-").stdout == printed


@pytest.mark.parametrize("form", EXPORTS)
def test_an_export_to_a_dash_is_one_to_stdout(form: str, searched: Path, run: Run) -> None:
    words = ("export", "--format", form, "--store", searched, *(MODEL if form == "t4" else ("--campaign", "small")))
    result = run(*words, "-o", "-")
    assert (result.exit_code, result.stdout) == (0, run(*words).stdout)
    assert result.stdout and not Path("-").exists()


@pytest.mark.parametrize("form", ["bundle", "optuna"])
def test_what_is_no_text_is_not_exported_to_stdout(form: str, searched: Path, run: Run) -> None:
    result = run("export", "--format", form, "--store", searched, "--campaign", "small", "--output", "-")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "is stdout" in result.stderr and not Path("-").exists()


def test_a_checkpoint_is_not_written_to_stdout(run: Run) -> None:
    result = run("quantize", "--model", "x", "--weights", "int8", "-o", "-")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "is stdout" in result.stderr


def test_a_file_on_stdout_sends_the_text_to_stderr(program: Path, run: Run) -> None:
    result = run("simulate", program, "--orders", 1, "--trace", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["traceEvents"]
    assert "of the floor" in result.stderr and "wrote" not in result.stderr


def test_a_search_writes_its_schedule_to_stdout(run: Run) -> None:
    result = run(*SEARCH, "--trials", 2, "-o", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["format"] == "flywheel-schedule"
    assert "all trials are done" in result.stderr


def test_lower_writes_its_program_to_a_dash(shallow: str, run: Run) -> None:
    words = ("lower", "--model", shallow, "--gpu", "l4")
    assert run(*words, "-o", "-").stdout == run(*words).stdout


def test_two_of_them_on_stdout_are_refused_in_one_line(
    program: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in (("--json",), ("-o", "-")):
        result = run("simulate", program, "--orders", 1, "--trace", "-", *more)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert "stdout" in result.stderr and "give one" in result.stderr
    monkeypatch.setenv("FLYWHEEL_JSON", "1")  # a wish of every command, which this one does not contradict
    assert "traceEvents" in run("simulate", program, "--orders", 1, "--trace", "-").stdout


def test_a_file_that_is_called_dash_has_a_path(program: Path, run: Run) -> None:
    assert run("inspect", program, "-o", "./-").exit_code == 0
    assert json.loads(Path("-").read_text(encoding="utf-8"))["valid"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_output_but_a_directory_may_be_stdout(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for option in command.params:
        if "--output" in option.opts and option.metavar != "DIR":
            assert isinstance(option.type, OutputFile)
