"""Writes flywheel/schedules: for each work, the schedule of the fastest final in the newest table that has it.

    python experiments/ship_schedules.py

The tables are `results*.tsv` in results/gpu, results/archive and their folders. Newer kernels may rank schedules in
another order, so an older table counts only for works that no newer one has. If a table has no column batch, the
campaign's name tells the number of sequences: `...b8` is of eight.
"""

from __future__ import annotations

import re
from pathlib import Path

from flywheel.measure.record import TrialRecord
from flywheel.search.provenance import lower_command
from flywheel.store.schedule import SHIPPED, dump_schedule, schedule_document
from flywheel.store.tsv import from_tsv

ROOT = Path(__file__).resolve().parents[1]
Found = tuple[TrialRecord, str]


def main() -> None:
    """Write one file a piece of work, and drop those of works that no table has."""
    best: dict[str, Found] = {}
    made: dict[str, str] = {}  # by name of a file: when the newest final of its table was measured
    for table in sorted((ROOT / "results").rglob("results*.tsv")):
        records = finals(table)
        newest = max((str(record.created_at) for record in records), default="")
        for record in records:
            weights = "" if record.weights == record.dtype else f"-{record.weights}"
            work = f"{record.model}-{record.gpu}-{record.dtype}{weights}"
            name = f"{work}-c{record.context}-b{record.batch}.json"
            before = made.get(name, "")
            if newest > before or (newest == before and latency(record) < latency(best[name][0])):
                best[name], made[name] = (record, table.relative_to(ROOT).as_posix()), newest
    for old in SHIPPED.glob("*.json"):
        if old.name not in best:
            old.unlink()
    for name, (record, origin) in sorted(best.items()):
        document = schedule_document(record, command=lower_command(record))
        document["provenance"]["table"] = origin
        (SHIPPED / name).write_text(dump_schedule(document), encoding="utf-8")
        print(f"{name}: {latency(record):,.1f} us, trial {record.trial} of {record.campaign} in {origin}")


def finals(table: Path) -> list[TrialRecord]:
    """The rows of a table that a final measured on a quiet GPU and found right, but those of loaders that paused."""
    header, *lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    columns = header.rstrip("\n").split("\t")
    at = {name: columns.index(name) for name in ("campaign", "source", "outcome")}
    kept = []
    for line in lines:
        cells = line.rstrip("\n").split("\t")
        if (cells[at["source"]], cells[at["outcome"]]) == ("final", "measured"):
            kept += from_tsv(header + line, None if "batch" in columns else batch_of(cells[at["campaign"]]))
    return [record for record in kept if not record.is_doubtful and "pause_cycles" not in record.config]


def batch_of(campaign: str) -> int:
    """Sequences that a campaign is of, by its name."""
    found = re.search(r"b([248])(?:-|$)", campaign)
    return int(found[1]) if found else 1


def latency(record: TrialRecord) -> float:
    """Of a measured row, in us."""
    assert record.latency_us is not None
    return record.latency_us


if __name__ == "__main__":
    main()
