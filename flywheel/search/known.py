"""The best that a store knows of a piece of work."""

from __future__ import annotations

from flywheel.measure.record import TrialRecord
from flywheel.search.workload import Workload
from flywheel.store.sql import Store


def best_of_work(
    store: Store, workload: Workload, *, measured: bool, campaign: str | None = None, predictor: str | None = None
) -> TrialRecord | None:
    """The best row of a workload as `Store.best` has it, of any campaign or of one; None where there is none.

    Rows do not tell batches apart, campaigns do: only those of the workload's batch count.
    """
    model, gpu = workload.model, workload.target.name
    found = [
        store.best(
            measured=measured, campaign=each.campaign.name, model=model, gpu=gpu, dtype=workload.dtype,
            context=workload.context, predictor=predictor,
        )
        for each in store.campaigns()
        if campaign in (None, each.campaign.name)
        and (each.campaign.model, each.campaign.gpu, each.campaign.batch) == (model, gpu, workload.batch)
    ]  # fmt: skip
    best = [record for record in found if record is not None]
    return min(best, key=lambda record: record.objective_us or 0.0, default=None)
