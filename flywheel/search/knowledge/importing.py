"""Imports into a store: trials as another store had them, or priors, which are configs that a campaign tries first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import isclose
from typing import Any, Final

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import FlywheelError, StoreError, UsageError
from flywheel.ir import TARGETS, ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.floor import floor_us
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import trials_of
from flywheel.models.catalog import resolve_model
from flywheel.search.knowledge.warm import choose_starts, described
from flywheel.search.space import make_space
from flywheel.search.spec import METHOD, CampaignSpec, to_campaign
from flywheel.search.workload import Workload
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store

_SAME: Final = ("model", "gpu", "dtype", "context", "batch", "weights")
_RAN: Final = frozenset({"measured", "incorrect", "implausible", "timed_out"})
"""Outcomes that only a GPU gives."""

_PRIORS: Final = "priors"
"""Where the JSON of a campaign's spec keeps its priors."""


def import_trials(store: Store, name: str, records: Sequence[TrialRecord]) -> tuple[Campaign, int]:
    """Import the trials of one campaign into the campaign `name`; return that campaign and the number of new trials.

    All trials are imported or none. They are marked with the campaign that they come from. Trials that the store has
    already stay as they are, so the same import may be repeated.

    Raises UsageError when

    - the trials come from several campaigns, or differ in model, GPU, dtype, context, batch or formats;
    - a trial's config cannot be read, or its id is another config's;
    - a trial's weight floor is not that of its GPU;
    - a trial's work is not the campaign's.

    Raises StoreError when the campaign has another trial of the same number, and when new trials would join trials that
    this store ran.
    """
    _check_one_campaign(records)
    for record in records:
        fault = _work_fault(record)
        if fault is not None:
            raise UsageError(f"{record.title} of campaign {record.campaign!r}: {fault}")
    campaign = _campaign_of(name, records)
    known = store.campaign(name)
    for field in (*_SAME, "measure") if known is not None else ():
        has, given = getattr(known, field), getattr(campaign, field)
        if has != given:
            raise UsageError(f"campaign {name!r} has {field}={has}, the trials have {given}")
    there = {record.trial: record for record in store.trials(name)}
    marked = [
        replace(record, campaign=name, imported_from=record.imported_from or record.campaign) for record in records
    ]
    for record in marked:
        before = there.get(record.trial)
        if before is not None and replace(before, imported_from=record.imported_from) != record:
            raise StoreError(f"store {store.name}: campaign {name!r} has another {record.title}")
    new = sorted((record for record in marked if record.trial not in there), key=lambda record: record.trial)
    own = sum(not record.is_imported for record in there.values())
    if new and own:
        raise StoreError(f"store {store.name}: campaign {name!r} has {own} own trials; imported ones cannot join them")
    store.append_all(new, campaign if known is None else None)
    return known or campaign, len(trials_of(new))


def import_priors(
    store: Store, name: str, workload: Workload, measure: str, configs: Sequence[ScheduleConfig]
) -> Campaign:
    """Create the campaign `name` without trials. A search of that name then tries `configs` first.

    `measure` is predict or cuda. Raises UsageError where the store has a campaign of that name.
    """
    if store.campaign(name) is not None:
        raise UsageError(f"campaign {name!r} already exists; schedules to try first need a new campaign")
    spec = CampaignSpec(
        workload.model, workload.gpu, workload.dtype, workload.context, workload.batch, workload.weights,
        measure, name=name,
    )  # fmt: skip
    priors = {_PRIORS: [config_to_dict(config) for config in configs]}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    starts = described(choose_starts(store, make_space(workload), measure))
    dimensions = asdict(workload.spec)
    campaign = to_campaign(spec, name, decoder=dimensions, created_at=now, undecided=METHOD, **priors, **starts)
    store.create_campaign(campaign)
    return campaign


def priors_of(campaign: Campaign) -> list[ScheduleConfig]:
    """The imported configs that a campaign tries first."""
    return [config_from_dict(config) for config in json.loads(campaign.spec).get(_PRIORS, [])]


def _check_one_campaign(records: Sequence[TrialRecord]) -> None:
    if not records:
        raise UsageError("no trials")
    names = sorted({record.campaign for record in records})
    if len(names) > 1:
        raise UsageError(f"trials of {len(names)} campaigns: {', '.join(names)}; --campaign picks one")
    for field in _SAME:
        values = sorted({str(getattr(record, field)) for record in records})
        if len(values) > 1:
            raise UsageError(f"campaign {names[0]!r} has trials of {field} {' and of '.join(values)}")
    numbers = [record.trial for record in records]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise UsageError(f"campaign {names[0]!r} has two trials {twice}")


def _work_fault(record: TrialRecord) -> str | None:
    """What is wrong with a row's floor; None where nothing is.

    The floor must be the time that the row's weights take on its GPU, since latencies are judged by it.
    """
    target = TARGETS.get(record.gpu)
    if target is None or record.floor_us is None or record.weight_bytes is None:
        return None
    wanted = floor_us(record.weight_bytes, target)
    if isclose(record.floor_us, wanted, rel_tol=1e-6):
        return None
    return (
        f"floor_us {record.floor_us} is not the {wanted:.6g} us that {record.weight_bytes:,} bytes take at "
        f"{target.name}'s {target.hbm_bandwidth_gbs:,.0f} GB/s"
    )


def _campaign_of(name: str, records: Sequence[TrialRecord]) -> Campaign:
    """The campaign of the trials, as far as their rows describe it."""
    first = records[0]
    outcomes = {record.outcome for record in records}
    measured = bool(outcomes & _RAN) or any(record.nvrtc is not None for record in records)
    # With a prefilter, a campaign that measures also has predicted rows, which name its compiler.
    if measured and any(record.outcome == "predicted" and record.nvrtc is None for record in records):
        raise UsageError(f"campaign {first.campaign!r} has measured and predicted trials")
    spec = CampaignSpec(
        first.model,
        first.gpu,
        first.dtype,
        first.context,
        first.batch,
        first.weights,
        measure="cuda" if measured else "predict",
        sampler=first.sampler,
        seed=first.seed,
        name=name,
    )
    started = min(record.created_at for record in records)
    predictor = next((record.predictor for record in records if record.is_predicted), MODEL_VERSION)
    dimensions = _decoder(first.model)
    return to_campaign(spec, name, decoder=dimensions, created_at=started, undecided=METHOD, predictor=predictor)


def _decoder(model: str) -> Mapping[str, Any] | None:
    """The model's dimensions; None where this machine does not know the model, so the campaign cannot continue."""
    try:
        return asdict(resolve_model(model))
    except FlywheelError:
        return None
