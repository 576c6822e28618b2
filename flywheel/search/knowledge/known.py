"""What was measured of a piece of work before: the best row of a store, or the schedule that comes with flywheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.ir.show import escaped
from flywheel.measure.latency import tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.workload import Workload
from flywheel.store.schedule import Shipped
from flywheel.store.sql import Store


@dataclass(frozen=True, slots=True, repr=False)
class Known:
    """The best schedule that was measured for exactly one piece of work. `origin` is its row, or its shipped file."""

    config: ScheduleConfig
    latency_us: float
    origin: TrialRecord | Shipped

    def __repr__(self) -> str:
        return f"<Known: measured {self.latency_us:,.1f} us, {escaped(self.words)}>"

    @property
    def words(self) -> str:
        """Where the schedule is: `trial 7 of campaign NAME`, or `shipped schedule NAME`."""
        match self.origin:
            case TrialRecord(trial=trial, campaign=campaign):
                return f"trial {trial} of campaign {campaign}"
            case Shipped(stem=stem):
                return f"shipped schedule {stem}"

    @property
    def measured_on(self) -> str:
        """The GPU that measured it, the day and the kernels: `NVIDIA H100 80GB HBM3, 2026-11-26, kernels abe5`."""
        gpu = self.origin.gpu_name or "a GPU that the row does not name"
        kernels = "" if self.origin.kernels is None else f", kernels {self.origin.kernels}"
        return f"{gpu}, {self.origin.created_at[:10]}{kernels}"


def known_document(known: Known, batch: int) -> dict[str, Any]:
    """A measured schedule of a work of `batch` sequences, JSON-ready. `shipped` is its name if it comes with flywheel;
    `campaign` and `trial` are those of its row."""
    origin = known.origin
    return {
        "config_id": known.config.config_id,
        "latency_us": known.latency_us,
        "tokens_per_s": tokens_per_s(known.latency_us, batch),
        "shipped": None if isinstance(origin, TrialRecord) else origin.stem,
        "campaign": origin.campaign,
        "trial": origin.trial,
        **{name: getattr(origin, name) for name in ("gpu_name", "kernels", "created_at")},
    }


def answer_of(best: TrialRecord | None, before: Known | None) -> Known | None:
    """The measured schedule that answers a search with the `best` row: that row, or for a search that only predicted,
    the best one that was known `before` of this very work. None where none was measured: then the best prediction is
    all there is."""
    if best is None or best.latency_us is None:
        return before
    return Known(config_from_dict(json.loads(best.config)), best.latency_us, best)


def best_of_work(
    store: Store, workload: Workload, *, measured: bool, campaign: str | None = None, predictor: str | None = None
) -> TrialRecord | None:
    """The best row of a workload by `Store.best`, from any campaign or from one; None where there is none."""
    return store.best(
        measured=measured, campaign=campaign, model=workload.model, gpu=workload.gpu, dtype=workload.dtype,
        context=workload.context, batch=workload.batch, weights=workload.stored, predictor=predictor,
    )  # fmt: skip


def best_known(workload: Workload, store: Store | None) -> Known | None:
    """The store's best measured schedule of the workload, else the shipped one of exactly this workload; None where
    nothing was measured. Raises StoreError."""
    row = None if store is None else best_of_work(store, workload, measured=True)
    if row is not None:
        assert row.latency_us is not None
        return Known(config_from_dict(json.loads(row.config)), row.latency_us, row)
    fit = find_shipped(workload)
    return Known(fit.config, fit.shipped.median_us, fit.shipped) if fit is not None and fit.exact else None
