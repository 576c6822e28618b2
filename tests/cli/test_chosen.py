from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.cli.chosen import known
from flywheel.errors import UnknownNameError
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
