from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import Result

from flywheel.cli.exits import ABORTED, BROKEN_PIPE, DIFFERENT, FAILED, NO_GPU, REJECTED, STORE, USAGE, exit_code
from flywheel.cli.main import COMMANDS, _may_fork, cli
from flywheel.errors import (
    ConfigError,
    FlywheelError,
    InvalidProgramError,
    IrFormatError,
    MirrorError,
    MismatchError,
    NoGpuError,
    StoreError,
    TensorError,
    TrialExistsError,
    UnknownNameError,
    UnsupportedModelError,
    UsageError,
    WeightsError,
)
from flywheel.search.spec import CampaignSpec

Run = Callable[..., Result]
FLYWHEEL = (sys.executable, "-m", "flywheel")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_has_help_and_json(name: str, run: Run) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: flywheel {name}")
    assert "--json" in result.stdout


def test_help_lists_every_command_with_its_line(run: Run) -> None:
    result = run("--help")
    for name, (_, line) in COMMANDS.items():
        assert name in result.stdout
        assert line in " ".join(result.stdout.split())


def test_asking_a_command_for_help_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from flywheel.cli.main import COMMANDS, cli\n"
        "for name in COMMANDS:\n"
        "    cli.main([name, '--help'], standalone_mode=False)\n"
        "    slow = {'optuna', 'sqlalchemy', 'numpy', 'torch', 'pandas', 'rich.live'} & sys.modules.keys()\n"
        "    if slow:\n"
        "        sys.exit(f'{name} imports {slow}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: flywheel ") == len(COMMANDS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FlywheelError, 1),
        (MirrorError, 1),
        (UsageError, 2),
        (UnknownNameError, 2),
        (ConfigError, 2),
        (UnsupportedModelError, 2),
        (IrFormatError, 2),
        (WeightsError, 2),
        (TensorError, 2),
        (InvalidProgramError, 3),
        (MismatchError, 3),
        (NoGpuError, 4),
        (StoreError, 5),
        (TrialExistsError, 5),
    ],
)
def test_each_error_has_its_exit_code(error: type[FlywheelError], code: int) -> None:
    assert exit_code(error("why")) == code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serch",), "did you mean search?"),
        (("search", "--modle", "x"), "--model"),
        (("search",), "--model is missing"),
        (("search", "--model", "smollm2-135m"), "this machine has no NVIDIA GPU; give --gpu, one of a100"),
        (("search", "--model", "smollm2", "--gpu", "h100"), "smollm2-135m"),
        (("search", "--model", "smollm2-135m", "--gpu", "h1000"), "h100"),
        (("search", "--model", "smollm2-135m", "--gpu", "l4", "--context", "9999999"), "8192"),
        (("search", "--model", "smollm2-135m", "--gpu", "l4", "--time", "soon"), "not a duration"),
        (("search", "--model", "smollm2-135m", "--gpu", "l4", "--fix", "depth"), "NAME=VALUE"),
        (("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--fix", "deep=1"), "depth"),
        (("inspect", "missing.json"), "missing.json: No such file"),
        (("models", "--gpu", "h1000"), "h100"),
        (("export", "--format", "xml"), "schedule"),
        (("validate",), "FILE"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint_and_code_2(arguments: tuple[str, ...], expected: str, run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("flywheel: ")
    assert expected in lines[0]


def test_no_command_shows_the_help_on_stderr(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Search and results:" in result.stderr


def test_only_debug_shows_a_traceback(run: Run) -> None:
    assert "Traceback" not in run("inspect", "missing.json").stderr
    result = run("--debug", "inspect", "missing.json")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("flywheel: missing.json")


def test_a_bug_is_one_line_without_debug() -> None:
    code = "from flywheel.cli import main; main.COMMANDS['models'] = ('flywheel.cli.nowhere:x', ''); main.main()"
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("flywheel: internal error: ModuleNotFoundError")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_silent() -> None:
    process = subprocess.Popen([*FLYWHEEL, "targets"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, complaint = process.communicate()
    assert complaint == b""
    assert process.returncode == 141


def test_output_that_finds_no_room_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*FLYWHEEL, "targets"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "flywheel: output: cannot be written: No space left on device\n")


def test_version_is_one_line(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("flywheel ")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([*FLYWHEEL, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_group_is_a_click_command() -> None:
    assert isinstance(cli, click.Group)
    assert cli.list_commands(click.Context(cli)) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_from_the_variable_of_its_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        flag = next(flag for flag in option.opts if flag.startswith("--"))
        variable = f"FLYWHEEL_{name}_{flag[2:].replace('-', '_')}".upper()
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            ctx = click.Context(command, info_name=name, auto_envvar_prefix=f"FLYWHEEL_{name.upper()}")
            assert option.resolve_envvar_value(ctx) == "1", variable


def test_variables_act_as_their_options_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_MODELS_GPU", "l4 h100")
    monkeypatch.setenv("FLYWHEEL_SEARCH_TIME", "soon")
    monkeypatch.setenv("FLYWHEEL_EXPORT_FORMAT", "xml")
    assert "h100 floor" in run("models").stdout
    assert "not a duration" in run("search").stderr
    assert "xml" in run("export").stderr
    monkeypatch.setenv("FLYWHEEL_JSON", "1")
    assert run("targets").stdout.startswith("{")


def test_the_manual_lists_every_exit_code_and_every_name_of_an_options_file() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    for code in (0, FAILED, DIFFERENT, USAGE, REJECTED, NO_GPU, STORE, ABORTED, BROKEN_PIPE):
        assert f"| {code} |" in manual
    options_file = manual[manual.index("An options file") : manual.index("```toml")]
    for field in fields(CampaignSpec):
        assert f"`[{field.name}]`" in options_file or f"`{field.name}`" in options_file


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--trials 3", True), ("--jobs 2 --trials 3", True), ("--jobs 16", True), ("--jobs 1", False),
        ("--jobs=1 --trials 3", False), ("-h", False), ("--trials 3 --help", False),
    ],
)  # fmt: skip
def test_a_search_has_processes_unless_its_words_say_otherwise(
    words: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.cli.main.usable_cores", lambda: 2)
    monkeypatch.delenv("FLYWHEEL_SEARCH_JOBS", raising=False)
    assert _may_fork(["search", *words.split()]) is expected
    monkeypatch.setenv("FLYWHEEL_SEARCH_JOBS", "1")
    assert not _may_fork(["search", *words.split()])
