from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from cli.conftest import MODEL, SEARCH, Run

from flywheel.cli.main import COMMANDS, cli
from flywheel.cli.options import OutputFile, check_writable
from flywheel.errors import UsageError

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


OVER_A_STORE = (
    ("export", "--format", "schedule", "--store", "trials.db"), ("report", "--store", "trials.db"),
    (*SEARCH, "--store", "trials.db"), ("campaigns", "--store", "trials.db"), ("schedules", "llama3-8b-h100-bf16-c512"),
)  # fmt: skip
"""The last one reads no store: there, a database is refused as such."""


@pytest.mark.parametrize("words", OVER_A_STORE, ids=lambda words: words[0])
@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_no_command_writes_over_a_trial_store(words: tuple[str, ...], end: str, store: str, run: Run) -> None:
    if words[0] == "schedules" and end:
        pytest.skip("only the store's own commands know the names of its other files")
    before = Path(store).read_bytes()
    result = run(*words, "--output", f"{store}{end}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{store}{end}: is a" in result.stderr and len(result.stderr.splitlines()) == 1
    assert Path(store).read_bytes() == before


def test_a_search_does_not_write_over_the_store_that_it_makes(run: Run) -> None:
    Path("link.db").symlink_to("new.db")
    result = run(*SEARCH, "--trials", "1", "--store", "new.db", "--output", "link.db")
    assert (result.exit_code, Path("new.db").exists()) == (2, False)
    assert result.stderr == "flywheel: link.db: is a file of the trial store; name another file\n"


def test_a_picture_does_not_replace_what_it_compares(searched: Path, run: Run) -> None:
    run("export", "--format", "schedule", "--store", searched, "--output", "best.json")
    before = Path("best.json").read_bytes()
    Path("hard.json").hardlink_to("best.json")
    result = run("compare", "best.json", "best.json", "--picture", "hard.json")
    assert (result.exit_code, Path("best.json").read_bytes()) == (2, before)
    assert result.stderr == "flywheel: hard.json: an argument names this file, too; name another one\n"


def _files_of(made: click.Command) -> list[str]:
    """The parameters that name files, by their metavars."""
    return [each.name or "" for each in made.params if "FILE" in (each.metavar or "") or each.name == "store"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_output_is_another_file_of_its_command(name: str) -> None:
    """Of every command: what it reads, and what it writes besides."""
    made = cli.get_command(click.Context(cli), name)
    assert made is not None
    for output in (each for each in made.params if isinstance(each.type, OutputFile)):
        for other in _files_of(made):
            if other == output.name:
                continue
            with click.Context(made) as ctx, pytest.raises(UsageError, match=r"this file, too|of the trial store"):
                ctx.params = {output.name or "": (path := Path("one.json")), other: "./one.json"}
                check_writable(path)
