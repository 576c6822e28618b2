"""What was measured of a piece of work before: the best row of a store, or the schedule that comes with flywheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.ir.show import escaped
from flywheel.measure.latency import tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.search.knowledge.lowered import Tell, best_of_work, silent
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
            case TrialRecord(title=title, campaign=campaign):
                return f"{title} of campaign {campaign}"
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


def best_known(
    workload: Workload, store: Store | None, *, campaign: str | None = None, tell: Tell = silent
) -> Known | None:
    """The fastest schedule that was measured of exactly this workload: the store's best row that this version lowers,
    or the shipped one. With a `campaign`, only its rows count. None where nothing was measured.

    The row stays the best, though the shipped schedule is faster elsewhere, if its campaign measured that one, too.
    `tell` gets a line for each measurement that is passed over, with the reason. Raises StoreError.
    """
    row = None if store is None else best_of_work(store, workload, measured=True, campaign=campaign, tell=tell)
    own, fit = None if row is None else _of_row(row), find_shipped(workload) if campaign is None else None
    if fit is None or not fit.exact:
        return own
    shipped = Known(fit.config, fit.shipped.median_us, fit.shipped)
    if own is None or store is None:
        return shipped
    wins, took = _goes_before(shipped, own, store), f"{shipped.latency_us:,.1f} us"
    if wins:
        tell(f"{shipped.words}, measured {took}, goes before {own.words}, {own.latency_us:,.1f} us")
    elif shipped.latency_us < own.latency_us and shipped.config != own.config:
        tell(f"{shipped.words}, measured {took} where it was found, was no faster than {own.words} in that campaign")
    return shipped if wins else own


def answer_of(workload: Workload, store: Store, campaign: str, before: Known | None) -> Known | None:
    """The measured schedule that answers the search `campaign`: its best row that this version lowers, or the best one
    that was known `before`, if that is faster and the campaign did not measure it. None where nothing was measured:
    then the best prediction is all there is. Raises StoreError."""
    own = best_known(workload, store, campaign=campaign)
    if own is None or before is None:
        return own or before
    return before if _goes_before(before, own, store) else own


def _goes_before(other: Known, own: Known, store: Store) -> bool:
    """Whether a schedule is faster than a row of the store. What the row's own campaign measured of it counts for more:
    that was on the same GPU and kernels."""
    assert isinstance(own.origin, TrialRecord)
    if other.latency_us >= own.latency_us:
        return False
    same = other.config.config_id
    rows = store.trials(own.origin.campaign)
    return own.origin.is_doubtful or not any(each.config_id == same and each.latency_us is not None for each in rows)


def _of_row(row: TrialRecord) -> Known:
    assert row.latency_us is not None
    return Known(config_from_dict(json.loads(row.config)), row.latency_us, row)
