"""Files given as arguments: programs and schedules, from a path, or from stdin as `-`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flywheel.cli.options import DEFAULTS
from flywheel.cli.text import note
from flywheel.errors import IrFormatError, StoreError, UsageError
from flywheel.ir import MegakernelProgram, ScheduleConfig, config_from_dict, program_from_dict
from flywheel.ir.files import parse_json, read_stream, read_text
from flywheel.models.spec import DecoderSpec
from flywheel.store.campaign import work_named
from flywheel.store.schedule import FORMAT, Schedule, schedule_from_document

if TYPE_CHECKING:
    from flywheel.decode.notes import Note

_FIELDS: Final = frozenset(field.name for field in fields(ScheduleConfig))


def load_program(path: str) -> MegakernelProgram:
    """Read a program. Raises IrFormatError, which names the file."""
    document = _document(path)
    _refuse_schedule(document, path)
    try:
        return program_from_dict(document)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None


def _refuse_schedule(document: object, path: str) -> None:
    """Raises IrFormatError for a schedule where a program is wanted. The message says what the file is."""
    if not isinstance(document, dict):
        return
    if document.get("format") == FORMAT:
        found = schedule_from_document(document, path)
        what = f"an exported schedule of {work_named(found.model, found.gpu, found.dtype, found.context, found.batch)}"
    elif document and document.keys() <= _FIELDS:
        what = "a ScheduleConfig"
    else:
        return
    raise IrFormatError(f"{path}: is {what}, not a program; flywheel lower --config lowers it to one")


def load_config(path: str) -> Schedule | ScheduleConfig:
    """Read a best-schedule document, or a bare ScheduleConfig.

    Raises IrFormatError or UsageError, which name the file.
    """
    document = _document(path)
    try:
        if isinstance(document, dict) and document.get("format") == FORMAT:
            return schedule_from_document(document, path)
        if isinstance(document, dict) and document and not _FIELDS & document.keys():
            raise IrFormatError("neither an exported schedule nor a ScheduleConfig: it has no field of one")
        config = config_from_dict(document)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None
    except StoreError as error:
        raise UsageError(str(error)) from None
    unknown = sorted(document.keys() - _FIELDS)
    if unknown:
        note(f"{path}: ignored fields that a ScheduleConfig does not have: {', '.join(unknown)}")
    return config


def as_stored(model: str | None, gpu: str | None) -> dict[str, str | None]:
    """The names under which a store keeps this model and GPU; None for None."""
    from flywheel.models.catalog import model_name

    return {
        "model": None if model is None else model_name(model),
        "gpu": None if gpu is None else gpu.strip().lower(),
    }


def settle_work(who: str, named: Mapping[str, Any], schedule: Schedule | None) -> dict[str, Any]:
    """Complete `named` (model, GPU, dtype, context, batch and weights). Options decide, then the schedule, then the GPU
    of this machine, the model's context and the defaults.

    Raises UsageError, which names the command `who`, without a model or a GPU, and what looking up the model raises.
    """
    from flywheel.models.catalog import fetch_model, resolve_model
    from flywheel.search.trials.device import default_gpu
    from flywheel.search.workload import default_context

    fallback = DEFAULTS if schedule is None else {name: getattr(schedule, name) for name in named}
    if schedule is not None and schedule.weights == schedule.dtype:
        fallback = {**fallback, "weights": None}  # unquantised weights follow the dtype
    settled = {name: fallback.get(name) if value is None else value for name, value in named.items()}
    if settled["model"] is None:
        raise UsageError(f"{who}: no model; give --model, or an exported schedule")
    settled["model"] = fetch_model(settled["model"], False, _announce)
    if settled["gpu"] is None:
        settled["gpu"] = default_gpu(who)
    spec = resolve_model(settled["model"])
    announce_another(schedule, spec)
    if named["context"] is None and schedule is None:
        settled["context"] = default_context(spec)
    return settled


def _announce(line: str) -> None:
    note(f"flywheel: {line}")


def announce_another(schedule: object, spec: DecoderSpec) -> None:
    """Say on stderr whose schedule it is, if it was found for another model than `spec`."""
    from flywheel.search.workload import notes_of_another

    announce_notes(notes_of_another(schedule if isinstance(schedule, Schedule) else None, spec))


def announce_notes(notes: Sequence[Note]) -> None:
    """Print notes of what is computed on stderr."""
    for each in notes:
        _announce(each.text)


def read_argument(path: str) -> str:
    """The text of a file, or of stdin for `-`. Raises IrFormatError where it is not UTF-8, too large or unreadable."""
    if path != "-":
        return read_text(Path(path))
    if sys.stdin is None:
        raise IrFormatError("-: stdin is closed")
    return read_stream(sys.stdin.buffer, path)


def _document(path: str) -> Any:
    text = read_argument(path)
    try:
        return parse_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None
