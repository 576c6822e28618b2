"""Argument files: programs and schedules, from a path or, as `-`, from stdin."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from flywheel.errors import IrFormatError, StoreError, UsageError
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.ir.serde import parse_json, read_text
from flywheel.store.schedule import FORMAT, Schedule, schedule_from_document

_FIELDS: Final = frozenset(field.name for field in fields(ScheduleConfig))


def load_program(path: str) -> MegakernelProgram:
    """Read a program. Raises IrFormatError, which names the file."""
    document = _document(path)
    try:
        return MegakernelProgram.from_dict(document)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None


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
        return ScheduleConfig.from_dict(document)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None
    except StoreError as error:
        raise UsageError(str(error)) from None


def _document(path: str) -> Any:
    text: str | bytes = sys.stdin.buffer.read() if path == "-" else read_text(Path(path))
    try:
        return parse_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None
