"""The names and numbers that a mirror shows of a campaign. They depend on rows only, so a mirror can be rebuilt and
compared."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flywheel.ir.show import escaped
from flywheel.measure.latency import band_of, curtailed, tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import KINDS, best_so_far
from flywheel.store.campaign import DEFAULT_CONTEXT, Campaign, work_key

_MOST_NAME: Final = 250
"""Most characters of a name of a run or a parameter."""
MAX_VALUE: Final = 500
"""Most characters of a parameter: every MLflow server since 1.x takes that many."""

KEY: Final = "flywheel.key"
CAMPAIGNS: Final = f"tags.`{KEY}` LIKE '%'"
"""The tag with a campaign's key, and MLflow's query for runs that have it, which are not those of single trials."""

BEST: Final = "best_us"
FRACTION: Final = "floor_fraction"
RATE: Final = "tokens_per_s"
"""Series of the best so far, of its share of the floor and of its tokens a second, by kind: `best_us/measured`. MLflow
charts series in the order of their names, so the best comes first."""
GAINED: Final = "gained/percent"
"""What the search gained over the best that was known before it."""
KNOB: Final = "knob."
"""The names of parameters that hold a knob begin with it."""

_WIDTHS: Final = MappingProxyType(
    {BEST: 150, FRACTION: 172, GAINED: 115, "model": 100, "weights": 72, "batch": 60, "gpu": 70, "context": 72}
)
"""Pixels of a column, in which its name fits, by the name or by its part before the slash; in the order of columns."""
_DECIMALS: Final = MappingProxyType({"us": 1, "per_s": 1, "percent": 1, "s": 4, "fraction": 4})
"""Decimals of a number by its unit, which ends its name or the part of it before a slash."""
_UNIT: Final = re.compile(rf"[_/]({'|'.join(_DECIMALS)})(?:/|$)")

_ENVIRONMENT: Final = (
    "flywheel_version", "ir_version", "python", "optuna", "host", "commit", "gpu_name", "gpu_driver", "nvrtc",
    "kernels",
)  # fmt: skip
_NUMBERS: Final = (
    "predicted_us", "latency_us", "p10_us", "p90_us", "samples", "verdict_error", "verdict_bound", "batch_us",
    "sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c", "floor_us", "floor_fraction", "weight_bytes", "tasks",
    "ask_s", "lower_s", "validate_s", "measure_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of a series. `step` is a trial's number, `time_ms` the time of its row in ms since 1970, UTC."""

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class Views:
    """Functions that need the code of the search as well as the rows.

    `knobs` gives the knobs of each row, by name; None where they are not known. `files` gives the artifacts of a
    campaign, text by path. `gains` says what its search gained and what answers it: in sentences, None where that is
    not known, and what it gained as numbers by name.

    All are pure: the same rows give the same text.
    """

    knobs: Callable[[Sequence[TrialRecord]], Sequence[Mapping[str, str | int] | None]]
    files: Callable[[Campaign, Sequence[TrialRecord]], Mapping[str, str]]
    gains: Callable[[Campaign, Sequence[TrialRecord]], tuple[str | None, Mapping[str, float]]]


def campaign_key(campaign: Campaign) -> str:
    """An id of a campaign that no other campaign of any store has: 32 hexadecimal digits."""
    told = json.dumps([campaign.name, campaign.created_at, campaign.spec])
    return sha256(told.encode()).hexdigest()[:32]


def campaign_params(campaign: Campaign, records: Sequence[TrialRecord]) -> dict[str, str]:
    """The searched work, the environment of the first trial, and what the range of the first prediction rests on, as
    parameters. Absent values are left out."""
    described = {**json.loads(campaign.spec), **{name: getattr(campaign, name) for name in _CAMPAIGN}}
    described |= {name: getattr(records[0], name) for name in _ENVIRONMENT} if records else {}
    predictors = [record.predictor or "" for record in records if record.predicted_us is not None]
    for band in [band_of(campaign.gpu, predictor) for predictor in predictors[:1]]:
        described |= {"predicted.basis": band.basis, "predicted.why": band.why}
    return to_params(dict(_flat(described)))


_CAMPAIGN: Final = ("model", "gpu", "dtype", "context", "batch", "weights", "measure", "sampler", "seed", "created_at")


def run_name(campaign: Campaign) -> str:
    """The name of a campaign's run: the campaign's own. MLflow's list would cut one that a search derived from its work
    before it differs from others, so that one becomes `llama3-8b int4 b8 h200`: what is usual is left out."""
    work = campaign.model, campaign.gpu, campaign.dtype, campaign.context, campaign.batch, campaign.weights
    derived = f"{work_key(*work)}-{campaign.measure}-"
    if not campaign.name.startswith(derived):
        return campaign.name[:_MOST_NAME]
    words = [
        Path(campaign.model).name,
        campaign.dtype if campaign.dtype != "bf16" else "",
        campaign.weights if campaign.weights not in (None, campaign.dtype) else "",
        f"b{campaign.batch}" if campaign.batch > 1 else "",
        f"c{campaign.context}" if campaign.context != DEFAULT_CONTEXT else "",
        campaign.gpu,
        "predicted" if campaign.measure == "predict" else "",
        campaign.name.removeprefix(derived).removeprefix("descent-s0").strip("-."),
    ]
    return " ".join(word for word in words if word)[:_MOST_NAME]


def knob_params(knobs: Mapping[str, str | int] | None) -> dict[str, str]:
    """A row's knobs as parameters."""
    return to_params({f"{KNOB}{name}": value for name, value in (knobs or {}).items()})


def trial_params(record: TrialRecord, knobs: Mapping[str, str | int] | None) -> dict[str, str]:
    """A trial's knobs, and the ids of its config and its program, as parameters."""
    return knob_params(knobs) | to_params({"config_id": record.config_id, "program_id": record.program_id})


def campaign_points(records: Sequence[TrialRecord]) -> Iterator[MetricPoint]:
    """The series of a campaign, row by row: latencies, the best so far, its floor fraction, counts of outcomes.

    Measured, imported and predicted latencies are separate series. At each new predicted best are the two ends of the
    range in which a measurement is expected. The latencies of finals are a series, too, but a
    final counts as no outcome.
    """
    counts: Counter[str] = Counter()
    for record, best in best_so_far(records):
        found: dict[str, float | None]
        if record.source == "final":
            found = {f"{record.kind}/final_us": record.latency_us}
        else:
            counts[record.outcome] += 1
            found = {f"outcomes/{record.outcome}": counts[record.outcome]}
            found |= {"predicted/latency_us": record.predicted_us, f"{record.kind}/latency_us": record.objective_us}
        for kind, holder in best.items():
            found |= {f"{BEST}/{kind}": holder.objective_us, f"{FRACTION}/{kind}": holder.floor_fraction}
            assert holder.objective_us is not None  # it is the best
            found |= {f"{RATE}/{kind}": tokens_per_s(holder.objective_us, holder.batch)}
            if holder is record and holder.is_predicted:
                found |= {f"{BEST}/{kind}_{end}": us for end, us in _expected_us(holder).items()}
        yield from to_points(found, record)


def columns(names: Collection[str]) -> str:
    """MLflow's list of runs, as the JSON state of its page: its columns, their widths and its order.

    It has the runs of campaigns, with best latency and floor fraction of each kind that occurs among the series
    `names`, and is ordered by the first of these latencies. Source: `selectedColumns`, `orderByKey` and `searchFilter`
    of the pages of MLflow 3.
    """
    kinds = [kind for kind in KINDS if f"{BEST}/{kind}" in names]
    metrics = [f"{series}/{kind}" for kind in kinds for series in (BEST, FRACTION)] + [GAINED] * (GAINED in names)
    params = ("model", "weights", "batch", "gpu", "context")
    shown = [*(f"metrics.`{name}`" for name in metrics), *(f"params.`{name}`" for name in params)]
    widths = {
        column: _WIDTHS[name if name in _WIDTHS else name.partition("/")[0]]
        for column, name in zip(shown, (*metrics, *params), strict=True)
    }
    order = {"orderByKey": shown[0], "orderByAsc": True} if kinds else {}
    state = {"selectedColumns": shown, "columnOrder": shown, "columnWidths": widths, "searchFilter": CAMPAIGNS, **order}
    return json.dumps(state, separators=(",", ":"))


def trial_points(record: TrialRecord) -> Iterator[MetricPoint]:
    """The numbers of one trial."""
    numbers = {name: getattr(record, name) for name in _NUMBERS}
    return to_points(numbers | {f"predicted_{end}_us": us for end, us in _expected_us(record).items()}, record)


def to_points(numbers: Mapping[str, float | None], record: TrialRecord) -> Iterator[MetricPoint]:
    """Numbers by name as values of series at the step and time of a row, with as many decimals as their unit deserves,
    and as many digits as a prediction has. Absent ones are left out."""
    time_ms = to_ms(record.created_at)
    for name, value in numbers.items():
        if value is not None:
            yield MetricPoint(name, _rounded(name, value), record.trial, time_ms)


def _expected_us(record: TrialRecord) -> dict[str, float]:
    """`low` and `high`, between which a measurement of a predicted row is expected; nothing of a row without a
    prediction."""
    if record.predicted_us is None:
        return {}
    low, high = band_of(record.gpu, record.predictor or "").around(record.predicted_us)
    return {"low": curtailed(low), "high": curtailed(high)}


def _rounded(name: str, value: float) -> float:
    if "predicted" in name and not name.startswith("outcomes/"):
        return curtailed(value)
    unit = _UNIT.search(name)
    return value if unit is None else round(value, _DECIMALS[unit[1]])


def to_params(values: Mapping[str, Any]) -> dict[str, str]:
    """Names and values in the form that MLflow takes. Absent values are left out."""
    return {
        re.sub(r"[^\w .:/-]", "_", name)[:_MOST_NAME]: str(value)[:MAX_VALUE]
        for name, value in sorted(values.items())
        if value is not None and str(value)
    }


def code_span(text: str) -> str:
    """A name as Markdown that only shows the name, whatever it contains: unprintable characters are escaped, and the
    name stands between more backticks than it has in a row. Source: CommonMark 0.31, "Code spans"."""
    shown = escaped(text[:MAX_VALUE])
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if "`" in shown or not shown.strip() else f"{fence}{shown}{fence}"


def to_ms(moment: str) -> int:
    """An ISO 8601 time as milliseconds since 1970."""
    return round(datetime.fromisoformat(moment).timestamp() * 1000)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as `outer.inner`, lists as JSON."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value) if isinstance(value, list) else value
