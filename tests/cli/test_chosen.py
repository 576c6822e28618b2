from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flywheel.cli.chosen import known
from flywheel.cli.decoding import _lower_shipped
from flywheel.errors import UnknownNameError
from flywheel.ir import config_from_dict
from flywheel.search.shipped import Fit, find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, make_workload
from flywheel.store.sql import open_store


def qwen(gpu: str = "h200") -> Workload:
    return make_workload("qwen3-0.6b", gpu, "bf16", 512)


def test_without_a_store_the_shipped_schedule_is_taken_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    (chosen,) = known([qwen()], None, None)

    assert chosen.origin["file"] == "shipped qwen3-0.6b-h200-bf16-c512-b1.json"
    assert (chosen.origin["config_id"], chosen.origin["exact"]) == (chosen.config.config_id, True)
    assert "shipped schedule qwen3-0.6b-h200-bf16-c512-b1.json" in capsys.readouterr().err


def test_a_store_that_knows_nothing_of_the_work_falls_back_to_it_unless_a_campaign_is_named(
    tmp_path: Path, searched: Path
) -> None:
    with open_store(tmp_path / "empty.db"):
        pass
    (chosen,) = known([qwen()], str(tmp_path / "empty.db"), None)
    assert chosen.origin["file"].startswith("shipped ")
    with pytest.raises(UnknownNameError, match=r"no measured schedule of qwen3-0\.6b on h200"):
        known([qwen()], str(searched), "small")


def test_work_without_a_shipped_schedule_names_the_search_that_finds_one() -> None:
    with pytest.raises(UnknownNameError, match=r"find one with: flywheel search --model qwen3-0\.6b --gpu h100"):
        known([qwen("h100")], None, None)


def test_a_model_is_lowered_by_the_shipped_schedule_of_its_work(capsys: pytest.CaptureFixture[str]) -> None:
    fit = find_shipped(qwen())
    assert fit is not None

    assert _lower_shipped(qwen()).config == fit.config
    assert "shipped schedule qwen3-0.6b-h200-bf16-c512-b1.json, measured 748.0 us" in capsys.readouterr().err


def test_a_shipped_schedule_that_does_not_fit_gives_way_to_what_a_search_tries_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = find_shipped(qwen())
    assert fit is not None
    misfit = config_from_dict({**_plain(fit), "threads_per_block": 33})
    monkeypatch.setattr("flywheel.search.shipped.find_shipped", lambda workload: replace(fit, config=misfit))

    space = make_space(qwen())
    assert _lower_shipped(qwen()).config == space.to_config(space.known_good()[0])
    assert "does not fit: " in capsys.readouterr().err


def _plain(fit: Fit) -> dict[str, object]:
    from flywheel.ir import config_to_dict

    return dict(config_to_dict(fit.config))
