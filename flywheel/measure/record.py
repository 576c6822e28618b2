"""TrialRecord: one append-only row of what is known, and the one order and meaning of its columns."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import sha256
from math import isclose
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

from flywheel.errors import IrFormatError
from flywheel.ir.config import config_from_dict
from flywheel.ir.files import parse_json
from flywheel.ir.show import html_table, show
from flywheel.measure.columns import fault_of
from flywheel.measure.latency import rounded
from flywheel.measure.outcome import OUTCOME_NAMES
from flywheel.measure.tenants import is_spread

SOURCES: Final = ("search", "seed", "store", "final")
"""The origin of a row: proposed by the sampler, enqueued as known good, answered from an earlier row, or measured again
in a final."""


MEASURED_WITH: Final = (
    "p10_us", "p90_us", "samples", "l2_state", "batch_us", "sm_clock_mhz", "mem_clock_mhz", "power_w", "temperature_c",
    "throttle", "strangers",
)  # fmt: skip
"""Columns that only a row with a measured latency may have."""

COMPARED_WITH: Final = ("rival_us", "gain_low_us", "gain_high_us")
"""Columns of a measured latency with a rival: all or none."""

JUDGED_WITH: Final = ("verdict_error", "verdict_bound", "verdict_where")
"""Columns of a row whose numbers were compared with an oracle's: of measured and incorrect rows."""

_ROUNDING: Final = 1e-9
"""Relative tolerance of a fraction to its quotient, and of a latency below its floor: both were divided and written in
decimals."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name (with its unit, if it has one), Python type, and meaning."""

    name: str
    python_type: type
    nullable: bool
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialRecord:
    """One trial of one campaign. Searches, imports and stores make rows only as this class.

    Raises ValueError in three cases. A column cannot hold its value (`columns.fault_of`). The config is no
    ScheduleConfig, or not that of its id. The numbers contradict the outcome or each other, as in MeasuredLatency,
    Implausible and Verdict. `latency_us` belongs to measured rows alone, with p10 and p90 around it and at least one
    sample. `predicted_us` may stand beside it. Neither is below the floor, and the verdict of a measured row passed.
    """

    campaign: Annotated[str, "name of the campaign"]
    trial: Annotated[int, "number of the trial in its campaign, from 0"]
    model: Annotated[str, "name of the model"]
    gpu: Annotated[str, "name of the GPU target; `2xh200` is two GPUs that share a step"]
    dtype: Annotated[str, "dtype of activations and unquantised weights"]
    weights: Annotated[str | None, "format of the matrices; the dtype where nothing is quantised"] = None
    context: Annotated[int, "tokens in the KV cache that the step attends to"]
    batch: Annotated[int, "sequences that one step decodes"]
    config: Annotated[str, "the ScheduleConfig as canonical JSON"]
    config_id: Annotated[str, "hash of the config"]
    program_id: Annotated[
        str | None, "version and hash of the lowered program; absent where lowering refused the config"
    ] = None
    outcome: Annotated[str, "measured, predicted, rejected, incorrect, implausible, timed_out, crashed or no_memory"]
    reason: Annotated[str | None, "why the trial is neither measured nor predicted"] = None
    verdict_error: Annotated[
        float | None, "worst error of the program's numbers against the oracle's; absent where it is not finite"
    ] = None
    verdict_bound: Annotated[float | None, "largest verdict_error that passes; absent without a verdict"] = None
    verdict_where: Annotated[str | None, "position, row, tensor and head with verdict_error"] = None
    predicted_us: Annotated[float | None, "latency of one step by the cost model"] = None
    predictor: Annotated[str | None, "version of the cost model that gave predicted_us"] = None
    latency_us: Annotated[float | None, "median measured latency of one step"] = None
    p10_us: Annotated[float | None, "10th percentile of the measured latency"] = None
    p90_us: Annotated[float | None, "90th percentile of the measured latency"] = None
    samples: Annotated[int | None, "timed launches"] = None
    l2_state: Annotated[str | None, "L2 cache before a launch: clean (by reads), flushed (by writes) or warm"] = None
    batch_us: Annotated[float | None, "measured latency of one step, launched back to back"] = None
    sm_clock_mhz: Annotated[int | None, "the GPU's clock during the launches back to back"] = None
    mem_clock_mhz: Annotated[int | None, "clock of the GPU's memory during them"] = None
    power_w: Annotated[float | None, "the GPU's power during them"] = None
    temperature_c: Annotated[int | None, "the GPU's temperature during them"] = None
    throttle: Annotated[str | None, "what lowered the GPU's clocks at any time, or none"] = None
    strangers: Annotated[int | None, "other processes that computed on the GPU at any time"] = None
    rival_us: Annotated[
        float | None, "median of the rival, launched alternately: the best so far; in a final, the fastest"
    ] = None
    gain_low_us: Annotated[float | None, "lower end of the 99 % interval of rival minus own latency"] = None
    gain_high_us: Annotated[float | None, "upper end of that interval"] = None
    weight_bytes: Annotated[int | None, "bytes of weights that one step must read"] = None
    floor_us: Annotated[float | None, "time to read weight_bytes at the GPU's bandwidth"] = None
    floor_fraction: Annotated[float | None, "floor_us over the measured latency, else over the predicted one"] = None
    tasks: Annotated[int | None, "tasks of the program"] = None
    ask_s: Annotated[float | None, "seconds that the sampler took"] = None
    lower_s: Annotated[float | None, "seconds that lowering took"] = None
    validate_s: Annotated[float | None, "seconds that validation took"] = None
    measure_s: Annotated[
        float | None, "seconds that measuring or predicting took; in a final, this program's share"
    ] = None
    source: Annotated[str, "search, seed (known good), store (answered by an earlier row) or final (measured again)"]
    imported_from: Annotated[
        str | None, "campaign in the table that the row was imported from; absent for this store's own trials"
    ] = None
    sampler: Annotated[str, "name of the sampler"]
    seed: Annotated[int, "seed of the campaign"]
    flywheel_version: Annotated[str | None, "flywheel's version"] = None
    ir_version: Annotated[str, "version of the program format"]
    python: Annotated[str, "Python's version"]
    optuna: Annotated[str | None, "Optuna's version"] = None
    host: Annotated[str, "name of the machine"]
    commit: Annotated[
        str | None, "git commit of the flywheel that ran the trial; if measured, of the measuring process"
    ] = None
    gpu_name: Annotated[str | None, "the driver's name of the machine's GPU"] = None
    gpu_driver: Annotated[str | None, "version of the GPU's driver"] = None
    nvrtc: Annotated[str | None, "version of the compiler of the measured kernels"] = None
    kernels: Annotated[str | None, "digest of the kernels' sources and of what packs programs for them"] = None
    created_at: Annotated[str, "time at which the row was made, ISO 8601 in UTC"]

    def __post_init__(self) -> None:
        if self.weights is None:  # a row of before there were formats
            object.__setattr__(self, "weights", self.dtype)
        for column in COLUMNS:
            fault = _fault(column, getattr(self, column.name))
            if fault is not None:
                raise ValueError(f"trial {show(self.trial)} of campaign {show(self.campaign)}: {column.name} {fault}")
        _, identity = _read_config(self.config)
        if self.config_id != identity:
            raise ValueError(
                f"trial {self.trial} of campaign {show(self.campaign)}: config_id {show(self.config_id)} is not its "
                f"config's, {identity}"
            )
        contradiction = self._contradiction()
        if contradiction is not None:
            raise ValueError(f"trial {self.trial} of campaign {show(self.campaign)}: {contradiction}")

    def _contradiction(self) -> str | None:
        if self.outcome not in OUTCOME_NAMES:
            return f"outcome {self.outcome!r} is none of {', '.join(OUTCOME_NAMES)}"
        if self.source not in SOURCES:
            return f"source {self.source!r} is none of {', '.join(SOURCES)}"
        if (self.latency_us is not None) != (self.outcome == "measured"):
            return f"outcome {self.outcome!r} with latency_us {self.latency_us}; measured rows have one, others do not"
        if self.source == "final" and self.outcome != "measured":
            return f"a final with outcome {self.outcome!r}; only what is measured stands in one"
        if (self.predicted_us is None) != (self.predictor is None):
            return f"predicted_us {self.predicted_us} with predictor {self.predictor}; both or neither"
        if self.outcome == "predicted" and self.predicted_us is None:
            return "outcome 'predicted' without predicted_us"
        return self._measurement_fault() or self._verdict_fault() or self._floor_fault()

    def _measurement_fault(self) -> str | None:
        """As in MeasuredLatency."""
        if self.latency_us is None:
            stray = (name for name in (*MEASURED_WITH, *COMPARED_WITH) if getattr(self, name) is not None)
            return next((f"{name} without latency_us" for name in stray), None)
        for name in ("p10_us", "p90_us", "samples"):
            if getattr(self, name) is None:
                return f"latency_us without {name}"
        assert self.p10_us is not None
        assert self.p90_us is not None
        if not self.p10_us <= self.latency_us <= self.p90_us:
            numbers = f"p10_us {self.p10_us}, latency_us {self.latency_us}, p90_us {self.p90_us}"
            return f"{numbers} are not in ascending order"
        if len({getattr(self, name) is None for name in COMPARED_WITH}) > 1:
            return f"{', '.join(COMPARED_WITH)}: all or none"
        if self.gain_low_us is not None and self.gain_high_us is not None and self.gain_low_us > self.gain_high_us:
            return f"gain_low_us {self.gain_low_us} exceeds gain_high_us {self.gain_high_us}"
        return None

    def _verdict_fault(self) -> str | None:
        """As in Verdict. Rows older than these columns have none of them."""
        if self.outcome not in ("measured", "incorrect"):
            stray = (name for name in JUDGED_WITH if getattr(self, name) is not None)
            return next((f"{name} in a row that is {self.outcome}, so not judged" for name in stray), None)
        if (self.verdict_bound is None) != (self.verdict_where is None):
            return f"verdict_bound {self.verdict_bound} with verdict_where {self.verdict_where}; both or neither"
        if self.verdict_bound is None:
            return None if self.verdict_error is None else "verdict_error without verdict_bound"
        if self.outcome == "measured" and (self.verdict_error is None or self.verdict_error > self.verdict_bound):
            return f"measured, yet verdict_error {self.verdict_error} is not within verdict_bound {self.verdict_bound}"
        return None

    def _floor_fault(self) -> str | None:
        """As in Implausible: nothing is faster than its weights can be read."""
        latency_us = self.objective_us
        if self.floor_us is None or latency_us is None:
            missing = "floor_us" if self.floor_us is None else "a latency"
            return None if self.floor_fraction is None else f"floor_fraction {self.floor_fraction} without {missing}"
        if latency_us < self.floor_us * (1.0 - _ROUNDING):
            return f"{self.outcome} latency {latency_us} us is below floor_us {self.floor_us}: implausible"
        wanted = self.floor_us / latency_us
        if self.floor_fraction is not None and not isclose(self.floor_fraction, wanted, rel_tol=_ROUNDING):
            return f"floor_fraction {self.floor_fraction} is not floor_us over the latency, {wanted:.6g}"
        return None

    def __repr__(self) -> str:
        return f"<TrialRecord {show(self.campaign)}, {self.title}: {self.took}>"

    def _repr_html_(self) -> str:
        floor = None if self.floor_fraction is None else f"{self.floor_fraction:.1%} reached of {self.floor_us:,.1f} us"
        rows = (
            *((name, getattr(self, name)) for name in ("campaign", "model", "gpu", "dtype", "weights", "context",
                                                       "batch", "outcome", "reason")),
            ("latency", None if self.objective_us is None else self.took), ("weight floor", floor),
            *((name, getattr(self, name)) for name in ("source", "config_id", "program_id", "gpu_name", "created_at")),
        )  # fmt: skip
        return html_table(self.title, rows)

    @property
    def title(self) -> str:
        """What people call the row, as `row_title` says it."""
        return row_title(self.source, self.trial)

    @property
    def took(self) -> str:
        """The row's latency for people, with its kind: `measured 4,995.1 us`, `predicted 5,040 us`. Without a latency,
        its outcome."""
        if self.objective_us is None:
            return self.outcome.replace("_", " ")
        return f"{self.kind} {self.took_us} us"

    @property
    def took_us(self) -> str:
        """The latency in us for people, with no more digits than it has; empty without one."""
        if self.objective_us is None:
            return ""
        return rounded(self.objective_us) if self.is_predicted else f"{self.objective_us:,.1f}"

    @property
    def is_imported(self) -> bool:
        """Whether the row came from a table, and was not tried for this store."""
        return self.imported_from is not None

    @property
    def kind(self) -> str:
        """The kind of latencies that the row's latency compares with: "measured", "imported" if it was measured
        elsewhere, or "predicted", which is the same everywhere. Without a latency, it is the row's outcome."""
        return "imported" if self.outcome == "measured" and self.is_imported else self.outcome

    @property
    def is_predicted(self) -> bool:
        """Whether the row's objective is a prediction."""
        return self.outcome == "predicted"

    @property
    def may_be_best(self) -> bool:
        """Whether the row has an objective that is not within the noise of its rival's. A final's row always may be the
        best, since a final tells only which program is the fastest."""
        if self.objective_us is None:
            return False
        return self.source == "final" or self.gain_low_us is None or self.gain_low_us > 0.0

    @property
    def is_doubtful(self) -> bool:
        """Whether the row was measured beside processes that computed, or its samples spread as on no quiet GPU. It is
        the best only where no other row is."""
        if self.outcome != "measured" or self.latency_us is None:
            return False
        percentiles = self.p10_us, self.p90_us
        spread = None not in percentiles and is_spread(self.p10_us or 0.0, self.latency_us, self.p90_us or 0.0)
        return bool(self.strangers) or spread

    @property
    def objective_us(self) -> float | None:
        """The value that a search minimises: the measured latency of a measured row, the prediction of a predicted
        one."""
        match self.outcome:
            case "measured":
                return self.latency_us
            case "predicted":
                return self.predicted_us
            case _:
                return None


def _fault(column: Column, value: Any) -> str | None:
    fault = fault_of(column.name, column.python_type, column.nullable, value)
    if fault is None and column.name == "config":
        return _read_config(value)[0]
    return fault


def row_title(source: str, number: int) -> str:
    """What people call a row: `trial 147`, or `final 152` of a final, whose rows are numbered after the trials."""
    return f"{'final' if source == 'final' else 'trial'} {number}"


_REMEMBERED: Final = 4096
"""Number of remembered configs, and most characters of one: 16 MiB in all. A search has about 500."""


def _read_config(text: str) -> tuple[str | None, str]:
    """(the fault of a config, or None; its `ScheduleConfig.config_id`).

    The id is of the text, since another version's configs may have other fields.
    """
    return (_read_short if len(text) <= _REMEMBERED else _read_any)(text)


@lru_cache(maxsize=_REMEMBERED)
def _read_short(text: str) -> tuple[str | None, str]:
    return _read_any(text)


def _read_any(text: str) -> tuple[str | None, str]:
    if not is_json_object(text):
        return "is no JSON object", ""
    document = parse_json(text)
    try:
        config_from_dict(document)
    except IrFormatError as error:
        return f"is no ScheduleConfig: {error}", ""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return None, sha256(canonical.encode()).hexdigest()[:12]


def is_json_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(parse_json(text), dict)
    except IrFormatError:
        return False


def columns_markdown() -> str:
    """The columns as a Markdown table, for docs/columns.md."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for column in COLUMNS:
        kind = column.python_type.__name__ + (", may be empty" if column.nullable else "")
        lines.append(f"| `{column.name}` | {kind} | {column.meaning} |")
    return "\n".join(lines) + "\n"


def _columns() -> tuple[Column, ...]:
    hints = get_type_hints(TrialRecord, include_extras=True)
    columns = []
    for field in fields(TrialRecord):
        declared, meaning = get_args(hints[field.name])
        kinds = get_args(declared) or (declared,)
        columns.append(Column(field.name, kinds[0], NoneType in kinds, meaning))
    return tuple(columns)


COLUMNS: Final = _columns()
"""The columns of a trial, in the order of TSV, CSV, SQL and the documentation."""
