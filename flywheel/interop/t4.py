"""Trials in T4, a results format for auto-tuners that Kernel Tuner writes.

Source: the T4 results schema 1.0.0, and the fields beyond it that Kernel Tuner 1.5 and autotuning_methodology 1.1 write
and read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import UsageError
from flywheel.ir.config import ScheduleConfig, config_from_dict, config_to_dict
from flywheel.measure.record import COMPARED_WITH, MEASURED_WITH, TrialRecord
from flywheel.measure.standing import trials_of

SCHEMA_VERSION: Final = "1.0.0"

INVALIDITY: Final = MappingProxyType(
    {
        "measured": "correct",
        "predicted": "correct",
        "rejected": "constraints",
        "incorrect": "correctness",
        "implausible": "correctness",  # faster than its weights can be read, so it did not read them all
        "timed_out": "timeout",
        "crashed": "runtime",
        "no_memory": "runtime",
    }
)
"""T4's word for each outcome."""

OBJECTIVES: Final = MappingProxyType({"measured": "time", "predicted": "predicted_time"})
"""Name of the measurement to minimise, by outcome. Readers of T4 take `time` for a time that a device took."""

_ERRORS: Final = MappingProxyType({"constraints": "InvalidConfig"})
_ERROR: Final = "RuntimeFailedConfig"
"""Kernel Tuner's word in place of the objective of a trial that has none."""

_WORK: Final = ("model", "gpu", "dtype", "context", "batch", "weights")

_MEASURED: Final = ("latency_us", *MEASURED_WITH, *COMPARED_WITH, "floor_fraction")


def to_t4(records: Iterable[TrialRecord], *, measured: bool) -> dict[str, Any]:
    """JSON-ready T4 results of trials of one model, GPU, dtype, context, batch and format of weights; times in
    milliseconds.

    A file has one objective. With `measured`, the measured trials are its valid results. Without it, the predicted
    trials are, but only those of the cost model that made the newest prediction. A trial without any latency is an
    invalid result; a trial with a latency of the other kind is left out. A final is no result of its own: its numbers
    replace those of the trials of its program. Each config appears once, by its first trial with a latency, else by its
    first trial. Raises UsageError for trials of different work.
    """
    rows = list(records)
    work = {tuple(getattr(row, name) for name in _WORK) for row in rows}
    if len(work) > 1:
        raise UsageError(f"t4: trials of {len(work)} different {', '.join(_WORK)}; a file holds those of one")
    kind = "measured" if measured else "predicted"
    last = max((row for row in rows if row.outcome == kind), key=lambda row: row.created_at, default=None)
    predictor = None if last is None or measured else last.predictor
    comparable = [
        row for row in _settled(rows)
        if row.objective_us is None or (row.outcome == kind and (measured or row.predictor == predictor))
    ]  # fmt: skip
    kept = _once(comparable)
    parameters = configurations([config_from_dict(json.loads(row.config)) for row in kept])
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "timeunit": "milliseconds",
            "latencies": kind,
            **({"predictor": predictor} if predictor is not None else {}),
            **{name: getattr(row, name) for row in rows[:1] for name in _WORK},
        },
        "results": [_result(row, found, OBJECTIVES[kind]) for row, found in zip(kept, parameters, strict=True)],
    }


def _settled(rows: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials, without finals. A measured trial takes the numbers of the last final of its program and campaign."""
    finals = {(row.campaign, row.program_id): row for row in rows if row.source == "final"}
    found = []
    for row in trials_of(rows):
        final = finals.get((row.campaign, row.program_id)) if row.outcome == "measured" else None
        found.append(row if final is None else replace(row, **{name: getattr(final, name) for name in _MEASURED}))
    return found


def _once(rows: Sequence[TrialRecord]) -> list[TrialRecord]:
    chosen: dict[str, TrialRecord] = {}
    for row in rows:
        known = chosen.get(row.config_id)
        if known is None or (known.objective_us is None and row.objective_us is not None):
            chosen[row.config_id] = row
    return list(chosen.values())


def dump_t4(document: Mapping[str, Any]) -> str:
    """The file's text; the same document always gives the same bytes."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def configurations(configs: Sequence[ScheduleConfig]) -> list[dict[str, int | str]]:
    """Each config as flat parameters. All configs have the same names: `tiling.<operation>.<size>`, 0 where a config
    sets no such size; `fuse.<op>+<op>` for each group that any config fuses, 1 where this config fuses it, else 0; and
    the other fields of a config."""
    flat = [_parameters(config) for config in configs]
    absent: dict[str, int | str] = dict.fromkeys(sorted({name for found in flat for name in found}), 0)
    return [{name: found.get(name, blank) for name, blank in absent.items()} for found in flat]


def _parameters(config: ScheduleConfig) -> dict[str, int | str]:
    fields = config_to_dict(config)
    tiling, groups = fields.pop("tiling"), fields.pop("fusion_grouping")
    found: dict[str, int | str] = {
        f"tiling.{op}.{name}": size for op, sizes in tiling.items() for name, size in sizes.items()
    }
    found |= {f"fuse.{'+'.join(group)}": 1 for group in groups}
    found |= {name: value if isinstance(value, int | str) else _compact(value) for name, value in fields.items()}
    return found


def _result(row: TrialRecord, configuration: Mapping[str, int | str], objective: str) -> dict[str, Any]:
    invalidity = INVALIDITY[row.outcome]
    valid = invalidity == "correct"
    measurements = [
        *([] if valid else [_measurement(objective, _ERRORS.get(invalidity, _ERROR))]),
        *(
            _measurement(name, value, unit)
            for name, value, unit in _numbers(row)
            if value is not None and (valid or name != objective)
        ),
        _measurement("config", row.config),
        _measurement("config_id", row.config_id),
        _measurement("trial", f"{row.campaign}/{row.trial}"),
        *([] if row.reason is None else [_measurement("reason", row.reason)]),
        *([] if row.imported_from is None else [_measurement("imported_from", row.imported_from)]),
    ]
    return {
        "timestamp": row.created_at,
        "configuration": dict(configuration),
        "times": _times(row),
        "invalidity": invalidity,
        "correctness": 1 if valid else 0,
        "measurements": measurements,
        "objectives": [objective],
    }


def _numbers(row: TrialRecord) -> list[tuple[str, float | None, str]]:
    return [
        ("time", _ms(row.latency_us), "ms"),
        ("time_p10", _ms(row.p10_us), "ms"),
        ("time_p90", _ms(row.p90_us), "ms"),
        ("predicted_time", _ms(row.predicted_us), "ms"),
        ("floor_time", _ms(row.floor_us), "ms"),
        ("floor_fraction", row.floor_fraction, ""),
    ]


def _times(row: TrialRecord) -> dict[str, Any]:
    """How long the steps of the trial took, in ms. `runtimes` holds times of the device only, so no prediction."""
    seconds = {
        "compilation": row.lower_s,
        "compilation_time": row.lower_s,  # the schema's name for it; Kernel Tuner writes and reads the other
        "validation": row.validate_s,
        "benchmark": row.measure_s,
        "search_algorithm": row.ask_s,
    }
    runtimes = [] if row.latency_us is None else [_ms(row.latency_us)]
    return {"runtimes": runtimes} | {name: value * 1e3 for name, value in seconds.items() if value is not None}


def _measurement(name: str, value: float | str, unit: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def _ms(value_us: float | None) -> float | None:
    return None if value_us is None else value_us / 1e3


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
