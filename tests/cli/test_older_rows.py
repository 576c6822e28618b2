"""Rows and schedules whose program ids are of an earlier version: their configs say which programs they are of."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.plan import is_current
from flywheel.store.sql import open_store

Run = Callable[..., Result]
MODEL = ("--model", "smollm2-135m", "--gpu", "l4")
SMALL = ("--campaign", "small", "--store", "trials.db")


@pytest.fixture
def older(store: str) -> str:
    """The store of one campaign, as an earlier version wrote it: its ids are 16 hex digits."""
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE trials SET program_id = substr(program_id, 3)")
    with open_store(store) as opened:
        ids = [record.program_id for record in opened.trials("small")]
    assert not any(map(is_current, ids))
    assert {len(each or "") for each in ids} == {16}
    return store


def test_a_campaign_of_older_rows_goes_on_and_tries_no_config_again(run: Run, older: str) -> None:
    result = run("search", *MODEL, "--measure", "predict", "--jobs", "1", "--trials", "8", "--name", "small",
                 "--store", older)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    with open_store(older) as store:
        records = store.trials("small")
    assert [is_current(record.program_id) for record in records] == [False] * 5 + [True] * 3
    assert len({record.config_id for record in records}) == 8


def test_the_best_older_row_is_where_a_new_campaign_of_its_work_starts(run: Run, older: str) -> None:
    best = json.loads(run("export", "--format", "schedule", *SMALL).stdout)
    result = run("search", *MODEL, "--measure", "predict", "--jobs", "1", "--trials", "2", "--name", "next",
                 "--store", older)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    with open_store(older) as store:
        first = store.trials("next")[0]
    assert (first.source, first.config_id) == ("seed", best["config_id"])
    assert first.program_id == f"2-{best['program_id']}"


def test_an_older_row_is_exported_compared_reported_and_imported(run: Run, older: str) -> None:
    made = run("export", "--format", "schedule", *SMALL, "--output", "best.json")
    assert made.exit_code == 0, made.stderr
    program = run("export", "--format", "program", *SMALL, "--output", "program.json")
    assert program.exit_code == 0, program.stderr
    said = json.loads(run("inspect", "program.json", "--json").stdout)
    assert said["program_id"] == f"2-{json.loads(Path('best.json').read_text(encoding='utf-8'))['program_id']}"
    assert run("compare", "best.json", "small", "--store", older).exit_code == 0
    report = run("report", "small", "--store", older, "--output", "-")
    assert (report.exit_code, "another program" in report.stdout) == (0, False)
    assert run("export", "--format", "tsv", *SMALL, "--output", "rows.tsv").exit_code == 0
    again = run("import", "rows.tsv", "--name", "copied", "--store", "again.db")
    assert again.exit_code == 0, again.stderr
    with open_store("again.db") as store, open_store(older) as first:
        assert [row.program_id for row in store.trials("copied")] == [row.program_id for row in first.trials("small")]


def test_a_row_of_this_version_of_ids_is_not_exported_as_another_program(run: Run, store: str) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE trials SET program_id = '2-0123456789abcdef'")
    result = run("export", "--format", "program", *SMALL)
    assert (result.exit_code, "the row has 2-0123456789abcdef" in result.stderr) == (5, True)
