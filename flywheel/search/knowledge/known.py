"""The best row that a store has of a piece of work."""

from __future__ import annotations

from flywheel.measure.record import TrialRecord
from flywheel.search.workload import Workload
from flywheel.store.sql import Store


def best_of_work(
    store: Store, workload: Workload, *, measured: bool, campaign: str | None = None, predictor: str | None = None
) -> TrialRecord | None:
    """The best row of a workload by `Store.best`, from any campaign or from one; None where there is none."""
    return store.best(
        measured=measured, campaign=campaign, model=workload.model, gpu=workload.gpu, dtype=workload.dtype,
        context=workload.context, batch=workload.batch, weights=workload.stored, predictor=predictor,
    )  # fmt: skip
