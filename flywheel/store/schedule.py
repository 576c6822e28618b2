"""The best-schedule JSON: one configuration, its numbers and where they come from; and those that come with flywheel,
one for each piece of work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from flywheel.errors import IrFormatError, StoreError
from flywheel.ir.config import ScheduleConfig, config_from_dict
from flywheel.ir.files import read_json, read_text
from flywheel.ir.show import listed
from flywheel.measure.floor import floor_fraction
from flywheel.measure.latency import band_of, curtailed
from flywheel.measure.record import COMPARED_WITH, JUDGED_WITH, MEASURED_WITH, TrialRecord, row_title

_T = TypeVar("_T")

FORMAT: Final = "flywheel-schedule"
FORMAT_VERSION: Final = 1
"""Raised when an older reader would misread the file; added fields do not raise it."""
CONFIG_FIELDS: Final = frozenset(field.name for field in fields(ScheduleConfig))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The content of a schedule file: a config, and the model, GPU, dtype, context (rows of the KV cache), batch
    (sequences in a step) and format of weights to lower it for."""

    model: str
    gpu: str
    dtype: str
    context: int
    batch: int
    config: ScheduleConfig
    config_id: str
    program_id: str | None
    weights: str


def schedule_document(record: TrialRecord, *, command: str) -> dict[str, Any]:
    """JSON-ready document of a measured or predicted trial; `command` is the line that makes its program again.

    `predicted` and `measured` are separate objects, null if absent. A prediction has the range in which a measured time
    is expected, and its `Band.basis`. The kind of an imported measurement is "imported".
    Raises StoreError for a trial without a latency.
    """
    if record.objective_us is None:
        raise StoreError(
            f"{record.title} of campaign {record.campaign!r}: {record.outcome}, so it has no schedule to export"
        )
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": record.model,
        "gpu": record.gpu,
        "dtype": record.dtype,
        "weights": record.weights,
        "context": record.context,
        "batch": record.batch,
        "config": json.loads(record.config),
        "config_id": record.config_id,
        "program_id": record.program_id,
        "tasks": record.tasks,
        "weight_bytes": record.weight_bytes,
        "floor_us": record.floor_us,
        "predicted": _predicted(record),
        "measured": _measured(record),
        "provenance": {
            "campaign": record.campaign,
            "trial": record.trial,
            "source": record.source,
            "imported_from": record.imported_from,
            "sampler": record.sampler,
            "seed": record.seed,
            "flywheel_version": record.flywheel_version,
            "ir_version": record.ir_version,
            "python": record.python,
            "optuna": record.optuna,
            "commit": record.commit,
            "host": record.host,
            "gpu_name": record.gpu_name,
            "gpu_driver": record.gpu_driver,
            "nvrtc": record.nvrtc,
            "kernels": record.kernels,
            "created_at": record.created_at,
        },
        "command": command,
    }


def dump_schedule(document: Mapping[str, Any]) -> str:
    """The file's text: sorted keys, two spaces, a newline at the end; the same document always gives the same bytes."""
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule file. Raises as `schedule_from_document` does, IrFormatError also where it cannot be read."""
    return schedule_from_document(read_json(Path(path)), f"schedule {path}")


def schedule_from_document(document: object, where: str) -> Schedule:
    """Read a schedule; unknown fields are dropped, one without a `batch` is of one sequence, and one without `weights`
    is not quantised. `where` names it in errors.

    Raises IrFormatError where its config is malformed, StoreError where it is not a schedule that this code understands
    or its config is not the one that `config_id` names.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{where}: is not a {FORMAT} file")
    version = _field(document, "version", int, where)
    if version != FORMAT_VERSION:
        raise StoreError(f"{where}: version {version} is not {FORMAT_VERSION}, which this code reads")
    config = config_from_dict(document.get("config"))
    config_id = _field(document, "config_id", str, where)
    if config.config_id != config_id:
        raise StoreError(f"{where}: config_id {config_id} is not its config's, {config.config_id}")
    program_id = document.get("program_id")
    return Schedule(
        model=_field(document, "model", str, where),
        gpu=_field(document, "gpu", str, where),
        dtype=_field(document, "dtype", str, where),
        context=_count(document, "context", where),
        batch=_count({"batch": 1, **document}, "batch", where),
        config=config,
        config_id=config_id,
        program_id=None if program_id is None else _field(document, "program_id", str, where),
        weights=_field({"weights": document.get("dtype"), **document}, "weights", str, where),
    )


def config_from_document(document: object, where: str) -> tuple[Schedule | ScheduleConfig, str | None]:
    """Read a schedule's document, or a bare ScheduleConfig's. The text names fields that neither has; None where there
    are none. Raises as `schedule_from_document`, with the name `where`."""
    try:
        if isinstance(document, dict) and document.get("format") == FORMAT:
            return schedule_from_document(document, where), None
        if isinstance(document, dict) and document and not CONFIG_FIELDS & document.keys():
            raise IrFormatError("neither an exported schedule nor a ScheduleConfig: it has no field of one")
        config = config_from_dict(document)
    except IrFormatError as error:
        raise IrFormatError(f"{where}: {error}") from None
    assert isinstance(document, dict)
    unknown = listed(sorted(document.keys() - CONFIG_FIELDS))
    return config, f"{where}: ignored fields that a ScheduleConfig does not have: {unknown}" if unknown else None


def _predicted(record: TrialRecord) -> dict[str, Any] | None:
    if record.predicted_us is None:
        return None
    band = band_of(record.gpu, record.predictor or "")
    low_us, high_us = map(curtailed, band.around(record.predicted_us))
    return {
        "kind": "predicted",
        "latency_us": record.predicted_us,
        "low_us": low_us,
        "high_us": high_us,
        "basis": band.basis,
        "predictor": record.predictor,
        "floor_fraction": _fraction(record.floor_us, record.predicted_us),
    }


def _measured(record: TrialRecord) -> dict[str, Any] | None:
    if record.latency_us is None:
        return None
    return {
        "kind": record.kind,
        "median_us": record.latency_us,
        **{name: getattr(record, name) for name in (*MEASURED_WITH, *COMPARED_WITH, *JUDGED_WITH)},
        "floor_fraction": _fraction(record.floor_us, record.latency_us),
    }


def _fraction(floor_us: float | None, latency_us: float) -> float | None:
    return None if floor_us is None else floor_fraction(floor_us, latency_us)


def _field(document: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise StoreError(f"{where}: {name} is {value!r}, not of type {kind.__name__}")
    return value


def _count(document: Mapping[str, Any], name: str, where: str) -> int:
    value = _field(document, name, int, where)
    if value < 1:
        raise StoreError(f"{where}: {name} is {value}, less than 1")
    return value


SHIPPED: Final = Path(__file__).resolve().parents[1] / "schedules"


@dataclass(frozen=True, slots=True)
class Shipped:
    """A schedule that comes with flywheel: the name of its file, and its measured latency `median_us`.

    `campaign`, `trial` and `source` name the row of that measurement, and `table` the table of the repository that has
    the row. `gpu_name`, `kernels` and `created_at` say on what, with which kernels and when it was measured.
    """

    name: str
    schedule: Schedule
    median_us: float
    campaign: str
    trial: int
    source: str
    table: str
    gpu_name: str
    kernels: str
    created_at: str

    @property
    def stem(self) -> str:
        """The name by which users call it: the file's, without `.json`."""
        return self.name.removesuffix(".json")

    @property
    def title(self) -> str:
        """The row's, as `row_title` says it."""
        return row_title(self.source, self.trial)

    def text(self) -> str:
        """The file's text."""
        return read_text(SHIPPED / self.name)


@cache
def shipped_schedules() -> tuple[Shipped, ...]:
    """All shipped schedules, sorted by file name. Raises IrFormatError and StoreError for a malformed file."""
    return tuple(_read(path) for path in sorted(SHIPPED.glob("*.json")))


def _read(path: Path) -> Shipped:
    document: Any = read_json(path)
    schedule = schedule_from_document(document, f"schedule {path}")
    try:
        measured, origin = document["measured"], document["provenance"]
        told = (origin[name] for name in ("campaign", "trial", "source", "table", "gpu_name", "kernels", "created_at"))
        return Shipped(path.name, schedule, measured["median_us"], *told)
    except (KeyError, TypeError):
        raise StoreError(f"schedule {path}: says neither what it took nor where it is from") from None
