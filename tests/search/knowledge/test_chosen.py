from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.ir import TARGETS, config_from_dict, config_to_dict
from flywheel.models.catalog import CATALOG
from flywheel.search.knowledge.chosen import choose_schedule
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

WORK = Workload("qwen3-0.6b", CATALOG["qwen3-0.6b"], TARGETS["h200"], "bf16", 512)


def test_the_shipped_schedule_of_a_work_is_taken() -> None:
    fit, chosen = find_shipped(WORK), choose_schedule(WORK)
    assert fit is not None
    assert chosen.config == fit.config
    assert chosen.words.startswith("shipped schedule qwen3-0.6b-h200-bf16-c512-b1, measured 671.2 us")


def test_a_carried_schedule_that_does_not_fit_gives_way_to_what_a_search_tries_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(WORK, context=600)
    fit = find_shipped(other)
    assert fit is not None and not fit.exact
    assert choose_schedule(other).config == fit.config
    misfit = config_from_dict({**dict(config_to_dict(fit.config)), "threads_per_block": 33})
    monkeypatch.setattr("flywheel.search.knowledge.chosen.find_shipped", lambda workload: replace(fit, config=misfit))
    chosen, space = choose_schedule(other), make_space(other)
    assert chosen.config == space.to_config(space.known_good()[0])
    assert "what a search tries first; the shipped schedule" in chosen.words
    assert "does not fit: " in chosen.words
