"""Formats of weights, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.store.schedule import load_schedule
from flywheel.store.sql import open_store

Run = Callable[..., Result]
MODEL = ("--model", "qwen3-0.6b", "--gpu", "l4")
SEARCH = ("search", *MODEL, "--measure", "predict", "--jobs", 1, "--trials", 3, "--store", "trials.db")


def test_a_campaign_of_a_format_is_one_of_its_own_and_its_rows_and_schedules_say_so(run: Run) -> None:
    plain = run(*SEARCH, "--json")
    quantised = run(*SEARCH, "--weights", "int8-row", "--json", "--output", "best.json")
    assert (plain.exit_code, quantised.exit_code) == (0, 0), quantised.stderr
    wide, small = json.loads(plain.stdout), json.loads(quantised.stdout)
    assert small["campaign"] == "qwen3-0.6b-l4-bf16-int8-c512-predict-descent-s0"
    assert (wide["weights"], small["weights"]) == ("bf16", "int8")
    assert small["best"]["floor_us"] < 0.7 * wide["best"]["floor_us"]
    assert small["best"]["predicted_us"] < wide["best"]["predicted_us"]
    with open_store("trials.db") as store:
        assert [summary.campaign.weights for summary in store.campaigns()] == ["bf16", "int8"]
        assert {record.weights for record in store.trials(small["campaign"])} == {"int8"}
        best = store.best(measured=False, model="qwen3-0.6b", gpu="l4", weights="bf16")
        assert best is not None
        assert best.campaign == wide["campaign"]
    assert load_schedule("best.json").weights == "int8"
    lowered = run("lower", "--config", "best.json", "--output", "p.json", "--json")
    assert json.loads(lowered.stdout)["program_id"] == small["best"]["program_id"]
    assert run("validate", "p.json").exit_code == 0
    exported = run("export", *MODEL, "--weights", "int8", "--store", "trials.db", "--format", "schedule")
    assert json.loads(exported.stdout)["provenance"]["campaign"] == small["campaign"]
    resumed = run(*SEARCH, "--weights", "int8", "--json")
    assert json.loads(resumed.stdout)["new_trials"] == 0
    renamed = run(*SEARCH, "--weights", "fp8", "--name", small["campaign"])
    assert (renamed.exit_code, "has weights=int8, not fp8" in renamed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("int4-g96", "qwen3-0.6b: q_proj: groups of 96 do not divide K=1024"),
        ("int2", "weights 'int2': 'int2' is not one of bf16, fp8, int8, int4"),
        ("int8,embed=int8", "'embed=int8' is not ROLE=FORMAT"),
    ],
)
def test_a_format_that_cannot_be_is_refused_in_one_line(run: Run, weights: str, message: str) -> None:
    for command in (SEARCH, ("lower", *MODEL)):
        result = run(*command, "--weights", weights)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not Path("trials.db").exists()


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("smollm2-135m", ("int8",), "weights int8: q_proj: DEQUANT of rows of 576 columns, not a multiple of 128"),
        ("qwen3-0.6b", ("int4-g32",), "weights int4-g32: q_proj: DEQUANT by groups of 32, not a multiple of 128"),
        ("qwen3-0.6b", ("int8", "--dtype", "f32"), "q_proj: a product of a quantised matrix and an F32 vector has"),
    ],
)
def test_a_prediction_is_refused_where_the_vm_has_no_kernel(
    run: Run, model: str, weights: tuple[str, ...], message: str
) -> None:
    work = ("--model", model, "--gpu", "l4", "--weights", *weights)
    searched = run("search", *work, "--measure", "predict", "--jobs", 1, "--trials", 3, "--store", "trials.db")
    assert (searched.exit_code, searched.stdout) == (2, "")
    assert message in searched.stderr
    assert not Path("trials.db").exists()
    assert run("lower", *work, "--output", "p.json").exit_code == 0


def test_models_counts_the_bytes_of_a_format(run: Run) -> None:
    found = []
    for text in ((), ("--weights", "int4-g32"), ("--weights", "int4-g32,lm_head=int4-g32")):
        models = json.loads(run("models", "--json", *text).stdout)["models"]
        found.append(next(each["bytes_per_token"] for each in models if each["name"] == "llama3.2-1b"))
    plain, quantised, all_of_it = found
    assert all_of_it < quantised < plain / 2


def test_a_quantised_program_is_verified_by_its_format(run: Run, checkpoint: Path) -> None:
    work = ("--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 48, "--weights", "int8")
    assert run("lower", *work, "--output", "p.json").exit_code == 0
    result = run("verify", "p.json", "--model", checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["passed"] is True
    same = run("generate", "--model", checkpoint, "--dtype", "f32", "--context", 48, "--weights", "int8",
               "--prompt-ids", "1,2,3", "--max-tokens", 4, "--verify", "--json")  # fmt: skip
    assert same.exit_code == 0, same.stderr
    assert json.loads(same.stdout)["verified"] is True
