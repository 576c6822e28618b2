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
from typing import Any, Final

from flywheel.ir.show import escaped
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import KINDS, best_so_far
from flywheel.store.campaign import Campaign

MAX_VALUE: Final = 500
"""Most characters of a parameter: every MLflow server since 1.x takes that many."""

BEST: Final = "best_us"
FRACTION: Final = "floor_fraction"
"""Series of the best so far and of its share of the floor, by kind: `best_us/measured`. MLflow charts series in the
order of their names, so these come first."""

_WIDE: Final = 170
"""Pixels of a column in which its name fits."""

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
class Point:
    """One value of a series. `step` is a trial's number, `time_ms` the time of its row in ms since 1970, UTC."""

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class Views:
    """Functions that need the code of the search as well as the rows: `knobs` gives the knobs of each row, by name, or
    None where they are not known, and `files` the artifacts of a campaign, text by path.

    Both are pure: the same rows give the same text.
    """

    knobs: Callable[[Sequence[TrialRecord]], Sequence[Mapping[str, str | int] | None]]
    files: Callable[[Campaign, Sequence[TrialRecord]], Mapping[str, str]]


def campaign_key(campaign: Campaign) -> str:
    """An id of a campaign that no other campaign of any store has: 32 hexadecimal digits."""
    told = json.dumps([campaign.name, campaign.created_at, campaign.spec])
    return sha256(told.encode()).hexdigest()[:32]


def campaign_params(campaign: Campaign, records: Sequence[TrialRecord]) -> dict[str, str]:
    """The searched work and the environment of the first trial, as parameters. Absent values are left out."""
    described = {**json.loads(campaign.spec), **{name: getattr(campaign, name) for name in _CAMPAIGN}}
    described |= {name: getattr(records[0], name) for name in _ENVIRONMENT} if records else {}
    return to_params(dict(_flat(described)))


_CAMPAIGN: Final = ("model", "gpu", "dtype", "context", "batch", "weights", "measure", "sampler", "seed", "created_at")


def trial_params(record: TrialRecord, knobs: Mapping[str, str | int]) -> dict[str, str]:
    """A trial's knobs, and the ids of its config and its program, as parameters."""
    return to_params({**knobs, "config_id": record.config_id, "program_id": record.program_id})


def campaign_points(records: Sequence[TrialRecord]) -> Iterator[Point]:
    """The series of a campaign, row by row: latencies, the best so far, its floor fraction, counts of outcomes.

    Measured, imported and predicted latencies are separate series. The latencies of finals are a series, too, but a
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
        time_ms = to_ms(record.created_at)
        yield from (Point(name, value, record.trial, time_ms) for name, value in found.items() if value is not None)


def columns(names: Collection[str]) -> str:
    """The columns of MLflow's list of runs, as the JSON state of its page: best latency and floor fraction of each kind
    that occurs among the series `names`. Source: `selectedColumns` of the pages of MLflow 3."""
    kinds = [kind for kind in KINDS if f"{BEST}/{kind}" in names]
    shown = [f"metrics.`{series}/{kind}`" for kind in kinds for series in (BEST, FRACTION)]
    wide = dict.fromkeys(shown, _WIDE)
    shown += [f"params.`{name}`" for name in ("model", "gpu", "dtype", "context", "batch")]
    return json.dumps({"selectedColumns": shown, "columnOrder": shown, "columnWidths": wide}, separators=(",", ":"))


def trial_points(record: TrialRecord) -> list[Point]:
    """The numbers of one trial."""
    time_ms = to_ms(record.created_at)
    numbers = {name: getattr(record, name) for name in _NUMBERS}
    return [Point(name, value, record.trial, time_ms) for name, value in numbers.items() if value is not None]


def to_params(values: Mapping[str, Any]) -> dict[str, str]:
    """Names and values in the form that MLflow takes. Absent values are left out."""
    return {
        re.sub(r"[^\w .:/-]", "_", name)[:250]: str(value)[:MAX_VALUE]
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
