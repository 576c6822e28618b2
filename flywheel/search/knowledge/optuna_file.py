"""Writes a campaign as an Optuna study in an SQLite file, for optuna-dashboard and other readers of such files."""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from flywheel.errors import UsageError
from flywheel.ir import config_from_dict
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import compared, trials_of
from flywheel.search.space import Dimension, Space, make_space, pins_of
from flywheel.search.workload import make_workload
from flywheel.store.campaign import Campaign

_ATTRIBUTES: Final = (
    "trial", "outcome", "reason", "source", "config", "config_id", "program_id", "latency_us", "p10_us", "p90_us",
    "predicted_us", "floor_fraction", "tasks",
)  # fmt: skip
"""Columns of a row that become attributes of its trial."""


def write_study(campaign: Campaign, records: Sequence[TrialRecord], path: Path) -> int:
    """Write the trials among a campaign's rows as a study into a new SQLite file; return the number of trials.

    The study has the campaign's name. Parameters are knobs with their own values. A trial's value is its latency in us,
    measured or predicted as the campaign compares them; a trial without one has failed. Raises UsageError where the
    file exists, UnknownNameError and UnsupportedModelError where the campaign's model or GPU is not known here.
    """
    if path.exists():
        raise UsageError(f"{path}: already exists; a study needs a new file")
    workload = make_workload(campaign.model, campaign.gpu, campaign.dtype, campaign.context, campaign.batch,
                             campaign.weights, any_size=True)  # fmt: skip
    space = make_space(workload, pins_of(campaign))
    kind, trials = compared(records), trials_of(records)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    open_file = partial(sqlite3.connect, path, factory=_Unhurried)  # no URL: the name may hold its special characters
    storage = RDBStorage("sqlite:///study", engine_kwargs={"creator": open_file})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study = optuna.create_study(storage=storage, study_name=campaign.name, direction="minimize")
            study.set_user_attr("work", campaign.work)
            study.set_metric_names([f"{kind}_latency_us"])
            study.add_trials([_trial(record, space, kind) for record in trials])
    finally:
        storage.engine.dispose()
    return len(trials)


class _Unhurried(sqlite3.Connection):
    """Does not wait for the disk after each of a trial's many transactions. An interrupted export starts over."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.execute("PRAGMA journal_mode = MEMORY")
        self.execute("PRAGMA synchronous = OFF")


def _trial(record: TrialRecord, space: Space, kind: str) -> FrozenTrial:
    choice = space.to_choice(config_from_dict(json.loads(record.config))) or {}
    value = record.objective_us if record.outcome == kind else None
    trial = create_trial(
        state=TrialState.COMPLETE if value is not None else TrialState.FAIL,
        value=value,
        params=dict(choice),
        distributions={each.name: _distribution(each) for each in space.dimensions if each.name in choice},
        user_attrs=_attributes(record),
    )
    ended = datetime.fromisoformat(record.created_at).replace(tzinfo=None)
    trial.datetime_start = ended - timedelta(seconds=_seconds(record))
    trial.datetime_complete = ended
    return trial


def _distribution(dimension: Dimension) -> BaseDistribution:
    """The distribution of a knob's own values, not of indices, so that a dashboard's axes show them."""
    if dimension.ordered:
        values = [int(value) for value in dimension.values]
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(dimension.values)


def _attributes(record: TrialRecord) -> dict[str, Any]:
    return {name: value for name in _ATTRIBUTES if (value := getattr(record, name)) is not None}


def _seconds(record: TrialRecord) -> float:
    """The wall seconds of a trial, as far as its row has them."""
    return sum(part or 0.0 for part in (record.ask_s, record.lower_s, record.validate_s, record.measure_s))
