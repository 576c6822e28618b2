"""AutoMegaKernel's results.tsv as priors: configs worth trying, the fastest of each piece of work first.

Source: AutoMegaKernel's flywheel/log.py and program.md. Their headers differ, and neither table holds the config. Its
IR specification has a column `schedule` for the config; otherwise the corpus holds the schedules, under the ids that
the table names.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

from flywheel.errors import IrFormatError
from flywheel.ir.config import ScheduleConfig, config_from_dict
from flywheel.ir.files import parse_json

MARK: Final = "correctness"
"""A column that every results.tsv of AutoMegaKernel has, and that flywheel's own tables lack."""

USED: Final = ("loop", "model", "gpu", "regime", "correctness", "latency_us", "schedule", "schedule_id",
               "schedule_or_kernel_id")  # fmt: skip
_IDS: Final = ("schedule_id", "schedule_or_kernel_id")
_INSTRUCTION_LOOPS: Final = ("instruction", "1")
"""Values of `loop` in rows that tuned a single kernel; these rows have no schedule."""


@dataclass(frozen=True, slots=True)
class PriorTable:
    """The configs that a results.tsv proposes, the most promising first.

    Latencies compare only within one model, GPU and regime. So the best config of every such group comes first, then
    the second of every group, and so on. `skipped` counts the rows that propose nothing, by the reason; `ignored` names
    the columns that say nothing about a config.
    """

    configs: tuple[ScheduleConfig, ...]
    skipped: Mapping[str, int]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _AmkRow:
    config: ScheduleConfig
    work: tuple[str, ...]
    latency_us: float


def read_results(text: str, corpus: str = "") -> PriorTable:
    """Read the priors of a results.tsv. `text` is the table, `corpus` the text of a corpus.jsonl, which holds the
    schedules of the ids in the table.

    Only rows with the verdict PASS count. Raises IrFormatError for a table without a column of verdicts, and, with the
    number of the line, for a malformed schedule.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    columns = lines[0].split("\t")
    if MARK not in columns:
        raise IrFormatError(f"table line 1: no column {MARK!r}, so it is not AutoMegaKernel's")
    schedules = _read_corpus(corpus)
    rows: list[_AmkRow] = []
    skipped: Counter[str] = Counter()
    for number, line in enumerate(lines[1:], start=2):
        if line.strip():
            found = _row(number, line.split("\t"), columns, schedules)
            if isinstance(found, _AmkRow):
                rows.append(found)
            else:
                skipped[found] += 1
    configs = {config.config_id: config for config in _ranked(rows)}
    ignored = tuple(name for name in columns if name not in USED)
    return PriorTable(tuple(configs.values()), dict(skipped), ignored)


def schedule_id(schedule: Mapping[str, Any]) -> str:
    """AutoMegaKernel's id of a schedule."""
    return "sch_" + hashlib.sha1(json.dumps(schedule, sort_keys=True).encode(), usedforsecurity=False).hexdigest()[:10]


def _row(number: int, cells: Sequence[str], columns: Sequence[str], schedules: Mapping[str, Any]) -> _AmkRow | str:
    """A row with its config, or the reason why it proposes none."""
    if len(cells) != len(columns):
        return "cells that do not match the columns"
    row = dict(zip(columns, cells, strict=True))
    if row.get("loop") in _INSTRUCTION_LOOPS:
        return "tunes an instruction"
    if row[MARK] != "PASS":
        return "verdict is not PASS"
    schedule: Any = None
    if row.get("schedule"):
        try:
            schedule = parse_json(row["schedule"])
        except IrFormatError as error:
            raise IrFormatError(f"table line {number}: schedule: {error}") from None
    else:
        schedule = next((schedules[row[name]] for name in _IDS if row.get(name) in schedules), None)
    if schedule is None:
        return "schedule unknown: no column of that name, and not in the corpus"
    try:
        config = config_from_dict(schedule)
    except IrFormatError as error:
        raise IrFormatError(f"table line {number}: schedule: {error}") from None
    work = tuple(row.get(name, "") for name in ("model", "gpu", "regime"))
    return _AmkRow(config, work, _latency_us(row.get("latency_us", "")))


def _latency_us(cell: str) -> float:
    """The latency that ranks a row, in us; infinity for a cell without a positive number, so that it comes last."""
    try:
        latency_us = float(cell)
    except ValueError:
        return inf
    return latency_us if isfinite(latency_us) and latency_us > 0 else inf


def _ranked(rows: Sequence[_AmkRow]) -> list[ScheduleConfig]:
    ranks: Counter[tuple[str, ...]] = Counter()
    placed = []
    for row in sorted(rows, key=lambda row: row.latency_us):
        placed.append((ranks[row.work], row.config))
        ranks[row.work] += 1
    return [config for _, config in sorted(placed, key=lambda place: place[0])]


def _read_corpus(text: str) -> dict[str, Any]:
    """Schedules by id. Raises IrFormatError with the line."""
    schedules = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except IrFormatError as error:
            raise IrFormatError(f"corpus line {number}: {error}") from None
        schedule = record.get("schedule") if isinstance(record, dict) else None
        if not isinstance(schedule, dict):
            raise IrFormatError(f"corpus line {number}: no object 'schedule'")
        schedules[schedule_id(schedule)] = schedule
    return schedules
