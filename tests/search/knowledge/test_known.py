"""What is known of a work: the fastest schedule that was measured and that this version lowers, wherever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from flywheel.cli.chosen import known
from flywheel.cli.main import cli
from flywheel.cli.trace import _best
from flywheel.errors import UnknownNameError
from flywheel.ir import ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import TrialRecord
from flywheel.search.appraise import appraise
from flywheel.search.knowledge.chosen import choose_schedule
from flywheel.search.knowledge.known import answer_of, best_known
from flywheel.search.knowledge.warm import choose_starts
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.schedule import Shipped, shipped_schedules
from flywheel.store.sql import open_store

NAME = "llama3.2-1b-h100-bf16-c512-b1"
WORK = make_workload("llama3.2-1b", "h100", "bf16", 512)
SPACE = make_space(WORK)
SHIPPED = next(each for each in shipped_schedules() if each.stem == NAME)
FASTER, FAST, SLOW = SHIPPED.median_us * 0.9, SHIPPED.median_us * 0.95, SHIPPED.median_us * 1.1


def refused() -> ScheduleConfig:
    """What older versions ran, and this one refuses."""
    plain = config_to_dict(lowered())
    return config_from_dict({**plain, "tiling": {**plain["tiling"], "stream": {**plain["tiling"]["stream"],
                                                                              "pause_cycles": 3000}}})  # fmt: skip


def lowered(number: int = 1) -> ScheduleConfig:
    """Known good schedules."""
    return SPACE.to_config(SPACE.known_good()[number])


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrialRecord]:
    """A store with a predicted campaign of WORK, and its first row."""
    store = tmp_path_factory.mktemp("known") / "trials.db"
    words = ["search", "--model", WORK.model, "--gpu", WORK.gpu, "--measure", "predict", "--jobs", "1", "--trials", "1",
             "--name", "guess", "--cold", "--store", str(store)]  # fmt: skip
    assert CliRunner().invoke(cli, words).exit_code == 0
    with open_store(store) as opened:
        return store, opened.trials("guess")[0]


Make = Callable[..., str]


@pytest.fixture
def measured(row: tuple[Path, TrialRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the store trials.db, with a measured campaign `mine` of rows (config, latency in us)."""
    monkeypatch.chdir(tmp_path)

    def make(*rows: tuple[ScheduleConfig, float]) -> str:
        source, first = row
        with open_store(source) as given, open_store("trials.db") as store:
            campaign = given.campaign("guess")
            assert campaign is not None
            store.create_campaign(replace(campaign, name="mine", measure="cuda"))
            for number, (config, took_us) in enumerate(rows):
                text = json.dumps(config_to_dict(config), sort_keys=True)
                store.append(
                    replace(
                        first, campaign="mine", trial=number, config=text, config_id=config.config_id,
                        program_id=f"program{number}", outcome="measured", predicted_us=None, predictor=None,
                        latency_us=took_us, p10_us=took_us, p90_us=took_us, samples=10, gpu_name="a card",
                        floor_fraction=None,
                    )
                )  # fmt: skip
        return "trials.db"

    return make


def run(*words: str) -> tuple[str, str]:
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == 0, done.stderr
    return done.stdout, done.stderr


def exported(*words: str) -> str:
    found: str = json.loads(run("export", "--format", "schedule", *words)[0])["config_id"]
    return found


PASSED = "trial 0 of campaign mine, measured {:,.1f} us, is passed over: tiling.stream.pause_cycles=3000"


def test_a_row_that_this_version_refuses_is_no_answer_seed_or_choice_and_one_line_says_so(measured: Make) -> None:
    """Every reader of a store's best row takes the next best one instead."""
    url = measured((refused(), FASTER), (lowered(1), FAST), (lowered(2), FAST + 1))
    own, said = lowered(1).config_id, PASSED.format(FASTER)
    told: list[str] = []
    with open_store(url) as store:
        best = best_known(WORK, store, tell=told.append)
        answer = answer_of(WORK, store, "mine", None)
        (start,) = choose_starts(store, SPACE, "predict")
        beside = appraise(lowered(2), WORK, "predict", store)
    assert best is not None and answer is not None
    assert (best.config.config_id, answer.config.config_id, start.trial) == (own, own, 1)
    assert beside.incumbent is None  # nothing was predicted there
    assert len(told) == 1 and told[0].startswith(said)
    (chosen,) = known([WORK], url, None)
    assert chosen.origin["config_id"] == own and said in chosen.notes[0].text
    (of_campaign,) = known([WORK], url, "mine")
    assert of_campaign.origin["config_id"] == own
    words = choose_schedule(WORK, url).words
    assert words.startswith("trial 1 of campaign mine, measured ") and said in words
    assert _best(url, "mine").config_id == own
    for asked in ((), ("--campaign", "mine"), ("--model", WORK.model, "--gpu", WORK.gpu)):
        assert exported(*asked, "--store", url) == own


def test_a_search_says_which_row_it_passes_over_and_answers_with_the_next(measured: Make) -> None:
    url = measured((refused(), FASTER), (lowered(1), FAST))
    out, err = run("search", "--model", WORK.model, "--gpu", WORK.gpu, "--measure", "predict", "--jobs", "1",
                   "--trials", "1", "--store", url)  # fmt: skip
    assert out.splitlines()[0].endswith("by trial 1 of campaign mine")
    (line,) = [line for line in err.splitlines() if "passed over" in line]
    assert line.startswith(f"flywheel: {PASSED.format(FASTER)}")


def test_where_this_version_lowers_no_row_the_shipped_schedule_is_taken(measured: Make) -> None:
    url = measured((refused(), FASTER))
    assert choose_schedule(WORK, url).words.startswith(f"shipped schedule {NAME}")
    assert exported("--store", url) == SHIPPED.schedule.config_id
    done = CliRunner().invoke(cli, ["export", "--format", "schedule", "--campaign", "mine", "--store", url])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("export: this version lowers no measured schedule of mine\n")
    with pytest.raises(UnknownNameError, match=r"^trace: this version lowers no measured schedule of mine$"):
        _best(url, "mine")


def test_the_faster_of_the_stores_best_and_the_shipped_schedule_wins_everywhere(measured: Make) -> None:
    url = measured((lowered(1), SLOW))
    shipped, said = SHIPPED.schedule.config_id, f"shipped schedule {NAME}, measured {SHIPPED.median_us:,.1f} us, goes "
    with open_store(url) as store:
        best = best_known(WORK, store)
        assert best is not None and isinstance(best.origin, Shipped)
        assert answer_of(WORK, store, "mine", best) == best
    (chosen,) = known([WORK], url, None)
    assert chosen.config.config_id == shipped and said in chosen.notes[0].text
    assert choose_schedule(WORK, url).config.config_id == shipped
    work = ("--model", WORK.model, "--gpu", WORK.gpu)
    for asked in ((), work):
        assert exported(*asked, "--store", url) == shipped
    assert exported("--campaign", "mine", "--store", url) == lowered(1).config_id  # asked for by name
    compared, err = run("compare", "h100", "h200", "--model", WORK.model, "--store", url, "--json")
    assert json.loads(compared)["a"]["config_id"] == shipped and said in err
    out, err = run("search", *work, "--measure", "predict", "--jobs", "1", "--trials", "1", "--store", url)
    assert out.splitlines()[0].endswith(f"by shipped schedule {NAME}")
    assert f"Known: {SHIPPED.median_us:,.1f} us" in err and said in err


def test_a_faster_row_of_the_store_goes_before_the_shipped_schedule(measured: Make) -> None:
    url = measured((lowered(1), FAST))
    with open_store(url) as store:
        best = best_known(WORK, store)
    assert best is not None and best.latency_us == FAST
    assert exported("--store", url) == lowered(1).config_id


def test_a_campaign_that_measured_the_shipped_schedule_itself_is_believed(measured: Make) -> None:
    """A slower GPU measured both: what another one took says nothing of which is faster here."""
    url = measured((SHIPPED.schedule.config, SLOW + 9), (lowered(1), SLOW))
    with open_store(url) as store:
        before, told = best_known(WORK, None), list[str]()
        for found in (best_known(WORK, store, tell=told.append), answer_of(WORK, store, "mine", before)):
            assert found is not None and found.latency_us == SLOW
    assert told == [f"shipped schedule {NAME}, measured {SHIPPED.median_us:,.1f} us where it was found, was no faster "
                    "than trial 1 of campaign mine in that campaign"]  # fmt: skip
