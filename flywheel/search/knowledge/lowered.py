"""The best row of a store whose config this version still lowers: rows of older versions may say what none does now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from flywheel.errors import ConfigError, IrFormatError
from flywheel.ir import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import ranked
from flywheel.search.workload import Workload
from flywheel.store.sql import Store

Tell = Callable[[str], None]
"""Takes a line for people."""


def silent(line: str) -> None:
    """Tell nobody."""


def best_of_work(
    store: Store, workload: Workload, *, measured: bool, campaign: str | None = None, predictor: str | None = None,
    tell: Tell = silent,
) -> TrialRecord | None:  # fmt: skip
    """The best row of a workload by `Store.best`, from any campaign or from one; where this version does not lower its
    config, the next best row that it lowers. None where there is none. `tell` gets one line of what is passed over and
    why. Raises StoreError."""
    names = ("model", "gpu", "dtype", "context", "batch")
    work: dict[str, Any] = {**{name: getattr(workload, name) for name in names}, "weights": workload.stored}
    best = store.best(measured=measured, campaign=campaign, predictor=predictor, **work)
    why = None if best is None else _refusal(best, workload)
    if best is None or why is None:
        return best
    tell(f"{best.title} of campaign {best.campaign}, {best.took}, is passed over: {why}")
    campaigns = [
        each.campaign.name
        for each in store.campaigns()
        if campaign in (None, each.campaign.name)
        and all(getattr(each.campaign, name) == value for name, value in work.items())
    ]
    kept = [_first(ranked(store.trials(name)), workload, measured, predictor) for name in campaigns]
    return min((row for row in kept if row is not None), key=_rank, default=None)


def _first(
    rows: list[TrialRecord], workload: Workload, measured: bool, predictor: str | None
) -> TrialRecord | None:
    """The first row of that kind whose config is lowered."""
    wanted: Iterator[TrialRecord] = (
        row
        for row in rows
        if row.is_predicted is not measured and predictor in (None, row.predictor) and lowers(row, workload)
    )
    return next(wanted, None)


def _rank(row: TrialRecord) -> tuple[bool, bool, float]:
    """A sort key as that of `Store.best`."""
    assert row.objective_us is not None  # rows without one are not ranked
    return row.is_imported, row.is_doubtful, row.objective_us


def lowers(row: TrialRecord, workload: Workload) -> bool:
    """Whether this version lowers the row's config."""
    return _refusal(row, workload) is None


def _refusal(row: TrialRecord, workload: Workload) -> str | None:
    """Why this version does not lower the row's config; None where it does."""
    try:
        lower(workload.graph, config_from_dict(json.loads(row.config)), workload.target)
    except (ConfigError, IrFormatError) as error:
        return str(error)
    return None
