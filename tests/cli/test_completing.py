from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from flywheel.cli.completing import ARGUMENTS, OPTIONS
from flywheel.cli.main import COMMANDS, cli
from flywheel.ir.target import TARGETS
from flywheel.models.formats import parse_formats
from flywheel.search.knobs import KNOBS
from flywheel.store.schedule import shipped_schedules


def asked(words: str, *, last: str | None = None) -> list[str]:
    """What click's protocol answers Bash for a command line whose last word is incomplete; `last`: it is that."""
    count = len(words.split()) - (last is None)
    asking = {"_FLYWHEEL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    done = CliRunner().invoke(cli, [], env=asking)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout.splitlines() if done.stdout.strip() else []


def plain(words: str, *, last: str | None = None) -> list[str]:
    found = asked(words, last=last)
    assert all(each.startswith("plain,") for each in found), found
    return [each.removeprefix("plain,") for each in found]


@pytest.mark.parametrize("command", ["search", "generate", "bench", "serve", "knobs", "mpk"])
def test_models_are_completed_in_any_case_and_else_directories(command: str) -> None:
    assert plain(f"flywheel {command} --model LLAMA3.2") == ["llama3.2-1b", "llama3.2-3b"]
    assert asked(f"flywheel {command} --model ./x") == ["dir,./x"]


def test_gpus_dtypes_and_shipped_schedules_are_completed() -> None:
    assert plain("flywheel search --gpu", last="") == list(TARGETS)
    assert plain("flywheel models --gpu h2") == ["h200", "h200-nvl"]
    assert plain("flywheel lower --dtype b") == ["bf16"]
    assert plain("flywheel schedules llama3-70b") == [
        each.stem for each in shipped_schedules() if each.stem.startswith("llama3-70b")
    ]  # fmt: skip


def test_formats_of_weights_are_completed_and_are_formats() -> None:
    found = plain("flywheel search --weights int4")
    assert {"int4", "int4-g64-zeros"} <= {*found}
    assert plain("flywheel search --weights int4,lm") == ["int4,lm_head="]
    of_head = plain("flywheel search --weights int4,lm_head = f")
    assert "fp8-block" in of_head
    for each in (*found, *plain("flywheel search --weights", last=""), *(f"int4,lm_head={each}" for each in of_head)):
        if not each.endswith("="):
            parse_formats(each, "bf16")


def test_knobs_are_completed_and_then_their_values() -> None:
    assert {f"{knob.name}=" for knob in KNOBS} <= {*plain("flywheel search --fix", last="")}
    assert plain("flywheel search --fix rows.") == [f"{k.name}=" for k in KNOBS if k.name.startswith("rows.")]
    assert plain("flywheel lower --model llama3-8b --set dep") == [f"depth={each}" for each in (0, 1, 2, 3, 4, 6, 8)]
    assert plain("flywheel search --fix placement = r") == ["round_robin"]


def test_campaigns_of_the_store_are_completed(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ("export --campaign", "bench --campaign", "report", "campaigns", "mlflow sync", "compare h100")
    there = sorted(Path().iterdir())
    assert [plain(f"flywheel {words} sm") for words in commands[:5]] == [[]] * 5
    assert sorted(Path().iterdir()) == there
    assert plain(f"flywheel report --store {store} sm") == ["small"]
    monkeypatch.setenv("FLYWHEEL_STORE", store)
    assert [plain(f"flywheel {words} small") for words in commands] == [["small"]] * 6
    assert not Path("flywheel.db").exists()


def test_a_store_that_cannot_be_read_or_has_names_that_do_not_print_completes_nothing() -> None:
    Path("text.db").write_text("no database", encoding="utf-8")
    with closing(sqlite3.connect("odd.db")) as file:
        file.execute("CREATE TABLE campaigns (name, created_at)")
        file.execute("INSERT INTO campaigns VALUES ('s\x1b[2J', 1), ('s\nplain,rm', 2), (7, 3), ('safe', 4)")
        file.commit()
    for store in ("text.db", "nowhere/x.db", "postgresql://127.0.0.1:1/none", "mysql://x", "."):
        assert plain(f"flywheel report --store {store} s") == []
    assert plain("flywheel report --store odd.db s") == ["safe"]


def test_files_are_completed_where_a_file_is_taken() -> None:
    for words in (
        "lower --config", "search --output", "search --options", "search --machine", "validate", "serve --config",
        "simulate --trace", "export --output", "serve --api-key-file", "import",
    ):  # fmt: skip
        assert asked(f"flywheel {words} b") == ["file,b"], words


def test_bash_itself_gets_the_words(tmp_path: Path) -> None:
    script = """
        eval "$(_FLYWHEEL_COMPLETE=bash_source flywheel)"
        for words in "--model llama3-7" "--fix depth =" "--fix depth = 8" "--sampler gr" "--pati"; do
            COMP_WORDS=(flywheel search $words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            COMPREPLY=(); _flywheel_completion flywheel; echo "${COMPREPLY[*]}"
        done
    """
    command = tmp_path / "flywheel"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flywheel "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "--norc", "-c", script]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["llama3-70b", "0 1 2 3 4 6 8", "8", "grid", "--patience"]


def test_completing_names_imports_nothing_slow() -> None:
    code = (
        "import os, sys\n"
        "from flywheel.cli.main import cli\n"
        "for words in ('search --model l', 'search --gpu h', 'search --weights i', 'search --fix d', 'schedules l'):\n"
        "    line = f'flywheel {words}'\n"
        "    os.environ |= {'_FLYWHEEL_COMPLETE': 'bash_complete', 'COMP_WORDS': line,\n"
        "                   'COMP_CWORD': str(len(line.split()) - 1)}\n"
        "    try:\n"
        "        cli.main([], standalone_mode=False)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    slow = {'optuna', 'sqlalchemy', 'numpy', 'torch', 'pandas', 'numba', 'rich.live'} & sys.modules.keys()\n"
        "    if slow:\n"
        "        sys.exit(f'{words} imports {slow}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plain,h100" in done.stdout and "plain,depth=4" in done.stdout


def test_every_completed_option_and_argument_is_there() -> None:
    flags, arguments = set(), set()
    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        flags |= {flag for param in command.params for flag in param.opts}
        arguments |= {(name, param.name or "") for param in command.params}
    assert OPTIONS.keys() <= flags and ARGUMENTS.keys() <= arguments
