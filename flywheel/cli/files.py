"""Files given as arguments: programs and schedules, from a path, or from stdin as `-`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flywheel.cli.text import note
from flywheel.errors import IrFormatError, StoreError, UsageError
from flywheel.ir import MegakernelProgram, ScheduleConfig, program_from_dict
from flywheel.ir.files import json_of, read_stream, read_text
from flywheel.store.campaign import work_named
from flywheel.store.schedule import CONFIG_FIELDS, FORMAT, Schedule, config_from_document, schedule_from_document

if TYPE_CHECKING:
    from flywheel.decode.notes import Note


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
    elif document and document.keys() <= CONFIG_FIELDS:
        what = "a ScheduleConfig"
    else:
        return
    raise IrFormatError(f"{path}: is {what}, not a program; flywheel lower --config lowers it to one")


def read_config(path: str) -> tuple[Schedule | ScheduleConfig, str | None]:
    """(a best-schedule document or a bare ScheduleConfig, a line that names its unknown fields if it has any).

    Raises IrFormatError or UsageError, which name the file.
    """
    try:
        return config_from_document(_document(path), path)
    except StoreError as error:
        raise UsageError(str(error)) from None


def load_config(path: str) -> Schedule | ScheduleConfig:
    """As `read_config`; the line goes to stderr."""
    given, unknown = read_config(path)
    if unknown:
        note(unknown)
    return given


def as_stored(model: str | None, gpu: str | None) -> dict[str, str | None]:
    """The names under which a store keeps this model and GPU; None for None."""
    from flywheel.models.catalog import model_name

    return {
        "model": None if model is None else model_name(model),
        "gpu": None if gpu is None else gpu.strip().lower(),
    }


def settle_work(who: str, named: Mapping[str, Any], schedule: Schedule | None) -> dict[str, Any]:
    """As `settle_names`; its notes go to stderr."""
    from flywheel.search.workload import settle_names

    settled, notes = settle_names(who, named, schedule, announce)
    announce_notes(notes)
    return settled


def announce(line: str) -> None:
    """Print a line of what the command does on stderr."""
    note(f"flywheel: {line}")


def announce_notes(notes: Sequence[Note]) -> None:
    """Print notes of what is computed on stderr."""
    for each in notes:
        announce(each.text)


def read_argument(path: str, newlines: bool = True) -> str:
    """The text of a file, or of stdin for `-`, as `read_text`. Raises IrFormatError where it is not UTF-8, too large or
    unreadable."""
    if path != "-":
        return read_text(Path(path), newlines=newlines)
    if sys.stdin is None:
        raise IrFormatError("-: stdin is closed")
    return read_stream(sys.stdin.buffer, path, newlines=newlines)


def _document(path: str) -> Any:
    return json_of(read_argument(path), path)
