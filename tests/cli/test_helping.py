from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter

import click
import pytest
from cli.conftest import Run

from flywheel.cli.examples import EXAMPLES
from flywheel.cli.helping import FLAT, HEADINGS, heading_of
from flywheel.cli.main import COMMANDS, GROUPS, cli


def options_of(name: str) -> list[click.Option]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return [each for each in command.get_params(click.Context(command)) if isinstance(each, click.Option)]


def sections(text: str) -> dict[str, list[str]]:
    """Heading -> its lines."""
    found: dict[str, list[str]] = {}
    for heading, body in re.findall(r"^([A-Z][A-Za-z ]+):\n((?:  .*\n|\n(?=  ))+)", text + "\n", re.MULTILINE):
        found[heading] = [line for line in body.split("\n") if line]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_each_option_once_and_many_under_headings(name: str, run: Run) -> None:
    shown = sections(run(name, "--help").stdout)
    options = options_of(name)
    headings = {heading_of(name, each) for each in options} if len(options) > FLAT else {"Options"}
    assert list(shown) == [*(each for each in (*HEADINGS, "Options") if each in headings), "Examples"]
    told = [flag for heading in headings for line in shown[heading]
            for flag in re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", line)]  # fmt: skip
    assert Counter(told) == Counter(next(flag for flag in each.opts if flag[:2] == "--") for each in options)


def test_search_has_its_options_under_six_headings(run: Run) -> None:
    shown = sections(run("search", "--help").stdout)
    assert list(shown) == ["Work", "Method", "Budget", "Processes", "Campaign and store", "Output", "Examples"]
    assert "--patience" in " ".join(shown["Budget"]) and "--sampler" in " ".join(shown["Method"])


def test_every_option_has_one_heading() -> None:
    flags = [flag for each in HEADINGS.values() for flag in each]
    assert len(flags) == len({*flags})
    of_some = {flag for name in COMMANDS for option in options_of(name) for flag in option.opts}
    assert [flag for flag in flags if flag not in of_some] == []


def test_help_lists_the_commands_in_groups_with_examples(run: Run) -> None:
    shown = sections(run("--help").stdout)
    assert list(shown) == ["Options", *GROUPS, "Examples"]
    for heading, group in GROUPS.items():
        assert [line.split()[0] for line in shown[heading] if line[2] != " "] == list(group)


def test_every_command_ends_its_help_with_two_or_three_examples_of_it(run: Run) -> None:
    assert EXAMPLES.keys() == {"flywheel", *COMMANDS}
    for name, lines in EXAMPLES.items():
        assert 2 <= len(lines) <= 3 and max(map(len, lines)) <= 100
        assert name == "flywheel" or all(f"flywheel {name}" in line for line in lines)
        told = run("--help") if name == "flywheel" else run(name, "--help")
        assert sections(told.stdout)["Examples"][: len(lines)] == [f"  {line}" for line in lines]


@pytest.mark.long
def test_examples_that_need_no_gpu_and_no_checkpoint_run_as_they_are(run: Run) -> None:
    ran = 0
    names = ("schedules", "lower", "validate", "simulate", "inspect", "diff", "evaluate", "models", "knobs", "targets")
    for name in names:
        for line in EXAMPLES[name]:
            text = None
            if "cuda" in line:
                continue
            for step in line.split(" | "):
                words = shlex.split(step, comments=True)[1:]
                done = run(*words, stdin=text)
                text, ran = done.stdout, ran + 1
                assert done.exit_code == 0, (line, done.stderr)
            if name == "lower":
                shutil.copy("program.json", "other.json")
    assert ran > 15
