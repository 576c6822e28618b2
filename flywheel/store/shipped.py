"""The schedules that come with flywheel: one file for each piece of work, with its best measured schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from flywheel.errors import StoreError
from flywheel.ir.files import parse_json, read_text
from flywheel.store.schedule import Schedule, schedule_from_document

SHIPPED: Final = Path(__file__).resolve().parents[1] / "schedules"


@dataclass(frozen=True, slots=True)
class Shipped:
    """A schedule that comes with flywheel: the name of its file, and its measured latency `median_us`.

    `campaign` and `trial` name the row of that measurement, and `table` the table of the repository that has the row.
    `gpu_name`, `kernels` and `created_at` say on what, with which kernels and when it was measured.
    """

    name: str
    schedule: Schedule
    median_us: float
    campaign: str
    trial: int
    table: str
    gpu_name: str
    kernels: str
    created_at: str

    @property
    def stem(self) -> str:
        """The name by which users call it: the file's, without `.json`."""
        return self.name.removesuffix(".json")

    def text(self) -> str:
        """The file's text."""
        return read_text(SHIPPED / self.name)


@cache
def shipped_schedules() -> tuple[Shipped, ...]:
    """All shipped schedules, sorted by file name. Raises IrFormatError and StoreError for a malformed file."""
    return tuple(_read(path) for path in sorted(SHIPPED.glob("*.json")))


def _read(path: Path) -> Shipped:
    document: Any = parse_json(read_text(path))
    schedule = schedule_from_document(document, f"schedule {path}")
    try:
        measured, origin = document["measured"], document["provenance"]
        told = (origin[name] for name in ("campaign", "trial", "table", "gpu_name", "kernels", "created_at"))
        return Shipped(path.name, schedule, measured["median_us"], *told)
    except (KeyError, TypeError):
        raise StoreError(f"schedule {path}: says neither what it took nor where it is from") from None
