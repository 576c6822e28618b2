from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import click
import pytest
from cli.conftest import MODEL, SEARCH, Run

from flywheel.cli.main import COMMANDS, cli
from flywheel.cli.wording import OLD, renewed

RENAMED = [(name, old, new) for name, flags in OLD.items() for old, new in flags.items()]
KINDS = {"FILE.toml": "FILE", "FILE.json": "FILE", "FILE.svg": "FILE", "FILE.html": "FILE", "[URL]": "URL"}


def command_of(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def options_of(name: str) -> list[click.Option]:
    return [each for each in command_of(name).params if isinstance(each, click.Option)]


def test_an_option_takes_the_same_kind_of_value_in_every_command() -> None:
    kinds: dict[str, list[set[str]]] = defaultdict(list)
    for name in COMMANDS:
        for option in options_of(name):
            if not (name == "quantize" and "--output" in option.opts):  # a checkpoint is a directory
                shown = "flag" if option.is_flag else option.make_metavar(click.Context(command_of(name)))
                parts = re.split(r"[|,]", shown.removesuffix("[,ROLE=FORMAT]").strip("[]"))
                kinds[option.opts[-1]].append({KINDS.get(part, part) for part in parts} - {"-", "...", "shipped"})
    assert len(kinds["--config"]) > 6 and len(kinds["--campaign"]) > 4
    assert {flag: found for flag, found in kinds.items() if set.union(*found) not in found} == {}
    assert [found for found in (*kinds["--campaign"], *kinds["--name"]) if found != {"NAME"}] == []
    assert [found for flag in ("--config", "--options", "--machine", "--picture") for found in kinds[flag]
            if found != {"FILE"}] == []  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), RENAMED)
def test_an_old_spelling_means_the_new_option(name: str, old: str, new: str) -> None:
    command = command_of(name)
    assert all(old not in option.opts for option in options_of(name))
    assert renewed(command, [old, "x"]) == ([new, "x"], [f"{old} is now {new}"])
    assert renewed(command, [f"{old}=x"]) == ([f"{new}=x"], [f"{old} is now {new}"])
    assert renewed(command, ["--", old]) == (["--", old], [])
    assert f"{old} " not in command.get_help(click.Context(command, info_name=name)).replace(f"{new} ", "")


def test_a_value_that_looks_like_an_old_spelling_stays() -> None:
    words = ["--prompt", "--schedule", "--schedule", "--schedule"]
    assert renewed(command_of("generate"), words)[0] == ["--prompt", "--schedule", "--config", "--schedule"]


def test_a_search_takes_its_old_words_and_says_the_new_ones(run: Run) -> None:
    Path("c.toml").write_text("trials = 1\n", encoding="utf-8")
    found = run(*SEARCH, "--campaign", "c.toml", "--schedule=best.json")
    assert found.exit_code == 0
    assert found.stderr.splitlines()[:2] == [
        "flywheel: --campaign is now --options", "flywheel: --schedule is now --output",
    ]  # fmt: skip
    assert Path("best.json").is_file()
    renewed_words = run(*SEARCH, "--options", "c.toml", "--output", "best.json")
    assert " is now " not in renewed_words.stderr


def test_other_commands_take_their_old_words(run: Run, searched: Path, program: Path) -> None:
    exported = run("export", "--format", "tsv", "--store", searched, "--campaign", "small").stdout
    lines = [
        run("simulate", program, "--seeds", "1"),
        run("report", "small", "--store", searched, "--out", "page.html"),
        run("import", "-", "--as", "again", "--store", "new.db", stdin=exported),
        run("compare", "h100", "h200", "--model", "llama3-8b", "-o", "both.svg"),
    ]
    assert [each.exit_code for each in lines] == [0, 0, 0, 0]
    assert [each.stderr.splitlines()[0].removeprefix("flywheel: ") for each in lines] == [
        "--seeds is now --orders", "--out is now --output", "--as is now --name", "-o is now --picture",
    ]  # fmt: skip
    assert Path("page.html").is_file() and Path("both.svg").is_file()


def test_an_old_variable_is_read_and_says_the_new_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.toml").write_text("trials = 1\n", encoding="utf-8")
    monkeypatch.setenv("FLYWHEEL_SEARCH_CAMPAIGN", "c.toml")
    found = run(*SEARCH, "--json")
    assert found.exit_code == 0 and '"trials": 1,' in found.stdout
    assert found.stderr.splitlines()[0] == "flywheel: FLYWHEEL_SEARCH_CAMPAIGN is now FLYWHEEL_SEARCH_OPTIONS"
    monkeypatch.setenv("FLYWHEEL_SEARCH_OPTIONS", "other.toml")
    assert "other.toml: No such file" in run(*SEARCH).stderr


def test_help_says_nothing_of_old_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYWHEEL_SEARCH_CAMPAIGN", "c.toml")
    assert " is now " not in run("search", *MODEL, "--help").stdout
