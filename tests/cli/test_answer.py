"""The answer of a search is the best that is known: a measurement goes before a prediction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flywheel.cli.main import cli
from flywheel.ir import program_from_json
from flywheel.measure.latency import RESOLUTION
from flywheel.measure.record import TrialRecord
from flywheel.plan import program_id
from flywheel.store.schedule import SHIPPED, load_schedule
from flywheel.store.sql import open_store
from flywheel.store.tsv import from_tsv

Run = Callable[..., Result]
SHIPPED_NAME = "llama3.2-1b-h100-bf16-c512-b1"
WORK = ("--model", "llama3.2-1b", "--gpu", "h100")
SEARCH = ("search", *WORK, "--measure", "predict", "--jobs", "1", "--trials", "3", "--name", "guess")


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a predicted campaign of a work whose schedule is shipped; tests read it only."""
    store = tmp_path_factory.mktemp("predicted") / "trials.db"
    assert CliRunner().invoke(cli, [*SEARCH, "--store", str(store)]).exit_code == 0
    return store


def shipped() -> bytes:
    return (SHIPPED / f"{SHIPPED_NAME}.json").read_bytes()


def test_a_predicted_search_answers_with_the_measured_schedule(run: Run) -> None:
    result = run(*SEARCH, "--output", "best.json")
    first, *lines = result.stdout.splitlines()
    assert first.startswith("llama3.2-1b on h100, bf16, context 512: measured ")
    assert first.endswith(f"by shipped schedule {SHIPPED_NAME}")
    assert ["next", "flywheel", "schedules", SHIPPED_NAME, "--output", "best.json"] in [line.split() for line in lines]
    (told,) = [line.strip() for line in lines if line.strip().startswith("predicted ")]
    assert re.search(r"us for the best of this search, measured perhaps [\d,]+ to [\d,]+ us; a prediction", told)
    known = result.stderr.splitlines()[1]
    assert known.startswith(f"Known: {load_schedule_us():,.1f} us a token ")
    assert re.search(rf"by shipped schedule {SHIPPED_NAME}, measured on NVIDIA H100 .*, kernels \w{{16}}\.$", known)
    assert Path("best.json").read_bytes() == shipped()


def test_every_command_that_predicts_says_how_sure_that_is(run: Run) -> None:
    lowered = run("lower", "--model", "smollm2-135m", "--gpu", "l4", "--output", "p.json")
    for result in (lowered, run("simulate", "p.json", "--orders", "1"), run("inspect", "p.json")):
        assert re.search(r"predicted +[\d,]+ us, measured perhaps [\d,]+ to [\d,]+ us", result.output), result.output


def test_a_search_of_a_work_that_nobody_measured_says_so_and_names_the_most_similar_shipped_schedule(run: Run) -> None:
    asked = ("search", "--measure", "predict", "--jobs", "1", "--trials", "1", "--model")
    work = "Known: nothing was measured of this work"
    near = run(*asked, "llama3.2-1b", "--gpu", "h100", "--context", "600").stderr.splitlines()[1]
    assert near.startswith(f"{work}. The most similar shipped schedule: {SHIPPED_NAME}, {load_schedule_us():,.1f} us")
    none = run(*asked, "smollm2-135m", "--gpu", "l4").stderr.splitlines()[1]
    assert none == f"{work}, and nothing is shipped for this GPU."


def test_the_document_has_the_answer_beside_the_best_prediction(run: Run) -> None:
    document = json.loads(run(*SEARCH, "--json").stdout)
    assert document["answer"]["shipped"] == SHIPPED_NAME
    assert document["answer"]["latency_us"] == load_schedule_us()
    assert document["best"]["latency_us"] is None
    events = [json.loads(line) for line in run(*SEARCH, "--jsonl").stdout.splitlines()]
    assert events[0]["best_known"] == document["answer"] == events[-1]["answer"]


def load_schedule_us() -> float:
    measured: float = json.loads(shipped())["measured"]["median_us"]
    return measured


def test_a_prediction_is_exported_only_if_asked_for(run: Run, predicted: Path) -> None:
    at = ("--store", str(predicted))
    usual = run("export", "--format", "schedule", *at)
    assert usual.stdout.encode() == shipped()
    assert "goes before the prediction of guess" in usual.stderr
    assert run("export", "--format", "schedule", "--campaign", "guess", *at).stdout.encode() == shipped()
    asked = json.loads(run("export", "--format", "schedule", "--predicted", *at).stdout)
    assert (asked["measured"], asked["provenance"]["campaign"]) == (None, "guess")
    program = run("export", "--format", "program", *at).stdout
    assert program_id(program_from_json(program)) == load_schedule(SHIPPED / f"{SHIPPED_NAME}.json").program_id


def test_a_faster_row_of_the_store_goes_before_the_shipped_one(run: Run, predicted: Path) -> None:
    with open_store(predicted) as source, open_store("mine.db") as store:
        row, campaign = source.trials("guess")[0], source.campaign("guess")
        assert campaign is not None
        store.create_campaign(replace(campaign, name="mine", measure="cuda"))
        store.append(measured(row))
    result = run(*SEARCH, "--store", "mine.db")
    assert "by trial 0 of campaign mine" in result.stdout.splitlines()[0]
    assert "--campaign mine" in result.stdout
    found = json.loads(run("export", "--format", "schedule", "--campaign", "guess", "--store", "mine.db").stdout)
    assert (found["provenance"]["campaign"], found["measured"]["median_us"]) == ("mine", 850.0)


def measured(row: TrialRecord) -> TrialRecord:
    """A predicted row as another campaign's measured one."""
    return replace(
        row, campaign="mine", outcome="measured", predicted_us=None, predictor=None, latency_us=850.0, p10_us=840.0,
        p90_us=860.0, samples=10, floor_fraction=None, gpu_name="a card",
    )  # fmt: skip


def test_a_search_says_what_it_gained_over_what_was_known_and_names_those_schedules(run: Run) -> None:
    work = ("--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict")
    document = json.loads(run("search", *work, "--jobs", "1", "--trials", "12", "--json").stdout)
    gained, best = document["gained"], document["best"]
    assert gained["best_us"] == best["predicted_us"] <= gained["seed_us"] <= gained["start_us"]
    over_seed, over_start = (gained[f"{row}_us"] / gained["best_us"] - 1 for row in ("seed", "start"))
    assert gained["over_seed"] == (0.0 if over_seed < RESOLUTION else pytest.approx(over_seed))
    assert gained["over_start"] == pytest.approx(over_start) and over_start > RESOLUTION
    assert gained["sure"] is None
    rows = {row.config_id: row for row in from_tsv(run("export", "--format", "tsv").stdout)}
    words = run("campaigns", document["campaign"]).stdout
    for what, least_us in (("the best schedule that was known", gained["seed_us"]),
                           ("the one that a search tries first", gained["start_us"])):  # fmt: skip
        over = rf"(?:%|that predictions can tell) over {what}"
        named = re.search(rf"{over} \([\d,]+ us, config ([0-9a-f]{{12}})\)", " ".join(words.split()))
        assert named is not None, words
        assert rows[named[1]].predicted_us == least_us
