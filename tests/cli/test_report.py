from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from click.testing import Result

from flywheel.store.sql import open_store

Run = Callable[..., Result]


def test_a_report_is_one_file_named_after_its_campaign(run: Run, searched: Path) -> None:
    result = run("report", "small", "--store", searched)
    assert result.exit_code == 0, result.stderr
    text = Path("small.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "by the cost model" in text
    assert "flywheel search --model smollm2-135m" in text
    assert len(text.encode()) < 2_000_000


def test_stdout_takes_the_page_and_json_says_where_it_is(run: Run, searched: Path) -> None:
    page = run("report", "small", "--store", searched, "--output", "-").stdout
    said = json.loads(run("report", "small", "--store", searched, "--output", "r.html", "--json").stdout)
    assert said == {"campaign": "small", "path": "r.html", "trials": 5, "bytes": len(page.encode())}
    assert Path("r.html").read_text(encoding="utf-8") == page


def test_the_report_is_made_without_the_extras(run: Run, searched: Path) -> None:
    code = (
        "import sys; from flywheel.cli.main import cli; "
        "cli.main(['report', 'small', '--store', sys.argv[1], '--out', 'r.html'], standalone_mode=False); "
        "sys.exit(bool({'matplotlib', 'mlflow', 'torch', 'pandas', 'sklearn'} & sys.modules.keys()))"
    )  # scipy may be there: numba imports it where it is installed
    done = subprocess.run([sys.executable, "-c", code, str(searched)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_campaign_or_place_is_a_usage_error(run: Run, searched: Path) -> None:
    for arguments in (("smll",), ("small", "--output", "nowhere/r.html")):
        result = run("report", *arguments, "--store", searched)
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)


def test_a_campaign_whose_name_is_a_path_stays_in_the_directory(run: Run, store: str) -> None:
    with open_store(store) as opened:
        campaign = opened.campaign("small")
        assert campaign is not None
        opened.create_campaign(replace(campaign, name="../up"))
    result = run("report", "../up", "--store", store)
    assert result.exit_code == 0, result.stderr
    assert Path(".._up.html").exists()


def test_a_campaign_whose_name_no_file_can_have_needs_out(run: Run, searched: Path) -> None:
    rows = run("export", "--format", "tsv", "--store", searched).stdout
    assert run("import", "-", "--name", "n" * 300, "--store", "long.db", stdin=rows).exit_code == 0
    result = run("report", "n" * 300, "--store", "long.db")
    assert result.exit_code == 2
    assert "cannot be written: File name too long" in result.stderr
    assert run("report", "n" * 300, "--store", "long.db", "--output", "long.html").exit_code == 0
