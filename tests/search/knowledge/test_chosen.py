from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.ir import TARGETS, ScheduleConfig, config_from_dict, config_to_dict
from flywheel.models.catalog import CATALOG
from flywheel.search.knowledge.chosen import ChosenConfig, choose_schedule
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

WORK = Workload("qwen3-0.6b", CATALOG["qwen3-0.6b"], TARGETS["h200"], "bf16", 512)


def test_the_shipped_schedule_of_a_work_is_taken() -> None:
    fit, chosen = find_shipped(WORK), choose_schedule(WORK)
    assert fit is not None
    assert chosen.config == fit.config
    assert chosen.words.startswith("shipped schedule qwen3-0.6b-h200-bf16-c512-b1, measured 671.2 us")


def test_a_shipped_schedule_that_does_not_fit_gives_way_to_what_a_search_tries_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = find_shipped(WORK)
    assert fit is not None
    misfit = config_from_dict({**dict(config_to_dict(fit.config)), "threads_per_block": 33})
    monkeypatch.setattr("flywheel.search.knowledge.chosen.find_shipped", lambda workload: replace(fit, config=misfit))
    chosen, space = choose_schedule(WORK), make_space(WORK)
    assert chosen.config == space.to_config(space.known_good()[0])
    assert "what a search tries first; the shipped schedule" in chosen.words
    assert "does not fit: " in chosen.words


def test_the_stores_best_goes_first_and_gives_way_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = find_shipped(WORK)
    assert fit is not None
    best = ChosenConfig(ScheduleConfig(), "trial 3 of campaign mine, measured 700.0 us")
    monkeypatch.setattr("flywheel.search.knowledge.chosen._best_of", lambda workload, url: best)
    assert choose_schedule(WORK, "trials.db") == best
    assert choose_schedule(WORK).config == fit.config
    misfit = config_from_dict({**dict(config_to_dict(fit.config)), "threads_per_block": 33})
    best = ChosenConfig(misfit, "trial 3 of campaign mine, measured 700.0 us")
    chosen = choose_schedule(WORK, "trials.db")
    assert chosen.config == fit.config
    assert chosen.words.startswith("shipped schedule qwen3-0.6b-h200-bf16-c512-b1, measured 671.2 us")
    assert "; the trial 3 of campaign mine does not fit: " in chosen.words
