from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from flywheel.api.searching import search
from flywheel.errors import UsageError
from flywheel.measure.record import TrialRecord
from flywheel.search.knowledge.optuna_file import write_study
from flywheel.store.campaign import Campaign
from flywheel.store.sql import read_store


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, list[TrialRecord]]:
    """A campaign of four predictions with a pinned knob."""
    store = tmp_path_factory.mktemp("optuna") / "trials.db"
    search(model="smollm2-135m", gpu="h100", measure="predict", trials=4, fix={"depth": 2}, name="small", store=store)
    with read_store(store) as opened:
        campaign = opened.campaign("small")
        assert campaign is not None
        return campaign, opened.trials("small")


def test_optuna_loads_the_study_with_every_trial(
    searched: tuple[Campaign, list[TrialRecord]], tmp_path: Path
) -> None:
    campaign, rows = searched
    assert write_study(campaign, rows, tmp_path / "study.db") == 4

    study = optuna.load_study(study_name="small", storage=f"sqlite:///{tmp_path / 'study.db'}")

    assert [trial.value for trial in study.trials] == [row.predicted_us for row in rows]
    assert study.best_value == min(row.predicted_us or 0.0 for row in rows)
    assert study.metric_names == ["predicted_latency_us"]
    assert study.direction is optuna.study.StudyDirection.MINIMIZE
    for trial, row in zip(study.trials, rows, strict=True):
        assert trial.params["depth"] == 2 and trial.params["placement"] in ("idle_first", "round_robin")
        assert trial.params["threads"] == int(row.config.partition('"threads_per_block":')[2].split(",")[0].strip("} "))
        assert trial.user_attrs["config_id"] == row.config_id
        assert trial.datetime_start <= trial.datetime_complete
    assert optuna.importance.get_param_importances(study)


def test_a_trial_without_a_latency_is_a_failed_one(
    searched: tuple[Campaign, list[TrialRecord]], tmp_path: Path
) -> None:
    campaign, rows = searched
    crashed = replace(rows[1], outcome="crashed", predicted_us=None, predictor=None, floor_fraction=None, reason="died")

    assert write_study(campaign, [rows[0], crashed], tmp_path / "study.db") == 2
    study = optuna.load_study(study_name="small", storage=f"sqlite:///{tmp_path / 'study.db'}")

    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.FAIL]
    assert study.trials[1].user_attrs["reason"] == "died"


def test_no_file_is_written_over(searched: tuple[Campaign, list[TrialRecord]], tmp_path: Path) -> None:
    (tmp_path / "mine.db").write_text("precious")
    with pytest.raises(UsageError, match=r"mine\.db: already exists; a study needs a new file$"):
        write_study(*searched, tmp_path / "mine.db")
    assert (tmp_path / "mine.db").read_text() == "precious"
