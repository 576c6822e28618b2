"""Several sequences at once, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.ir import load_program, program_from_json, program_to_json
from flywheel.plan import program_id

Run = Callable[..., Result]
MODEL = ("--model", "smollm2-135m", "--gpu", "l4")
SEARCH = ("search", *MODEL, "--measure", "predict", "--jobs", 1, "--trials", 3, "--store", "trials.db")


def test_lower_takes_a_batch(run: Run, program: Path, shallow: str) -> None:
    work = ("lower", "--model", shallow, "--gpu", "l4")
    for batch in (1, 4):
        assert run(*work, "--batch", batch, "--output", f"{batch}.json").exit_code == 0
    assert Path("1.json").read_bytes() == program.read_bytes()
    assert load_program("4.json").meta["batch"] == 4


@pytest.mark.parametrize("batch", [0, 9])
def test_a_batch_out_of_bounds_is_refused_in_one_line(run: Run, batch: int) -> None:
    result = run("lower", *MODEL, "--batch", batch)
    assert result.exit_code == 2
    assert f"batch {batch} is not in 1..8" in result.stderr
    assert run(*SEARCH, "--batch", batch).exit_code == 2


def test_verify_judges_every_sequence(run: Run, checkpoint: Path) -> None:
    work = ("--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 64)
    assert run("lower", *work, "--batch", 3, "--output", "program.json").exit_code == 0
    result = run("verify", "program.json", "--model", checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["passed"] is True
    refused = run("verify", "program.json", "--model", checkpoint, "--batch", 3)
    assert (refused.exit_code, "a program file has its own" in refused.stderr) == (2, True)


def test_a_schedule_is_verified_with_a_batch(run: Run, checkpoint: Path) -> None:
    Path("config.json").write_text('{"pipelining_depth": 4}', encoding="utf-8")
    work = ("--model", checkpoint, "--dtype", "f32", "--context", 64, "--config", "config.json", "--json")
    alone, three = (run("verify", *work, "--positions", "0,9", "--batch", batch) for batch in (1, 3))
    assert (alone.exit_code, three.exit_code) == (0, 0), three.stderr
    assert json.loads(alone.stdout)["program_id"] != json.loads(three.stdout)["program_id"]


def test_generate_knows_one_sequence_only(run: Run) -> None:
    result = run("generate", *MODEL, "--prompt-ids", "1", "--batch", 2)
    assert result.exit_code == 2
    assert "--batch" in result.stderr


def test_a_campaign_of_a_batch_is_one_of_its_own(run: Run) -> None:
    assert run(*SEARCH).exit_code == 0
    result = run(*SEARCH, "--batch", 4, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["campaign"] == "smollm2-135m-l4-bf16-c512-b4-predict-descent-s0"
    assert (document["batch"], document["new_trials"]) == (4, 3)
    clash = run(*SEARCH, "--batch", 2, "--name", document["campaign"])
    assert (clash.exit_code, "has batch=4, not 2" in clash.stderr) == (2, True)


def test_rows_of_a_batch_do_not_stand_for_one_sequence(run: Run) -> None:
    name = json.loads(run(*SEARCH, "--batch", 4, "--json").stdout)["campaign"]
    export = ("export", "--format", "schedule", "--store", "trials.db", *MODEL)
    refused = run(*export)
    assert (refused.exit_code, "no measured or predicted trial" in refused.stderr) == (2, True)
    assert "batch 1" in refused.stderr
    assert json.loads(run(*export, "--batch", 4).stdout)["provenance"]["campaign"] == name
    Path("config.json").write_text("{}", encoding="utf-8")
    result = run("evaluate", "config.json", *MODEL, "--store", "trials.db", "--measure", "predict", "--json")
    assert result.exit_code == 0, result.stderr
    assert name not in result.stdout
    options = ("--store", "trials.db", "--measure", "predict", "--json")
    document = json.loads(run("evaluate", "config.json", *MODEL, "--batch", 4, *options).stdout)
    assert (document["batch"], document["incumbent"]["campaign"]) == (4, name)


def test_what_people_read_of_a_campaign_says_its_batch(run: Run) -> None:
    name = json.loads(run(*SEARCH, "--batch", 4, "--json").stdout)["campaign"]
    work = "smollm2-135m on l4, bf16, context 512, batch 4"
    assert run("campaigns", name, "--store", "trials.db").stdout.startswith(f"{name}: {work}\n")
    header, row = run("campaigns", "--store", "trials.db").stdout.splitlines()
    assert row.split()[header.split().index("batch")] == "4"
    assert run("report", name, "--store", "trials.db", "--output", "page.html").exit_code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert f"{work}, sampler descent" in page
    assert "lowers its config to another program" not in page
    assert "The best schedule&#x27;s knobs" in page or "The best schedule's knobs" in page


def test_the_command_of_a_schedule_makes_the_batch_s_program_again(run: Run) -> None:
    name = json.loads(run(*SEARCH, "--batch", 4, "--json").stdout)["campaign"]
    export = ("export", "--store", "trials.db", "--campaign", name, "--format")
    assert run(*export, "schedule", "--output", "best.json").exit_code == 0
    document = json.loads(Path("best.json").read_text(encoding="utf-8"))
    assert "--batch 4" in document["command"] and "--batch 4" in document["provenance"]["search"]
    assert document["batch"] == 4
    made = program_from_json(run("lower", "--config", "best.json").stdout)
    assert made == program_from_json(run(*document["command"].split()[1:]).stdout)
    assert program_to_json(made) + "\n" == run(*export, "program").stdout
    assert program_id(made) == document["program_id"]
