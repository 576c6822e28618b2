"""Writes flywheel/schedules: for each work, the schedule of the fastest final in the newest table that has it.

    python experiments/ship_schedules.py

The tables are `results*.tsv` in results/gpu, results/archive and their folders. Newer kernels may rank schedules in
another order, so an older table counts only for works that no newer one has. If a table has no column batch, the
campaign's name tells the number of sequences: `...b8` is of eight.

A schedule that says what none can say any more does not count. Where that leaves no final in the newest table of a
work, the fastest row of all its tables counts.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from flywheel.ir.config import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.plan import program_id
from flywheel.search.provenance import lower_command
from flywheel.search.workload import make_workload
from flywheel.store.schedule import SHIPPED, dump_schedule, schedule_document
from flywheel.store.tsv import from_tsv

ROOT = Path(__file__).resolve().parents[1]
Found = tuple[TrialRecord, str]
OTHERWISE = ("results.9480eef.tsv", "results.134d1d1.tsv")
"""Tables of configs that are lowered to other programs since. Their rows keep the ids of what was timed."""


def main() -> None:
    """Write one file a piece of work, and drop those of works that no table has."""
    best: dict[str, list[Found]] = {}
    made: dict[str, str] = {}  # by name of a file: when the newest final of its table was measured
    others: dict[str, list[Found]] = {}
    for table in sorted((ROOT / "results").rglob("results*.tsv")):
        origin = table.relative_to(ROOT).as_posix()
        for name, records in measured(table).items():
            usable = [(each, origin) for each in records if speaks_of_today(each)]
            others.setdefault(name, []).extend(usable)
            finals = [each for each in records if each.source == "final" and not pauses(each)]
            newest = max((str(each.created_at) for each in finals), default="")
            if newest > made.get(name, ""):
                best[name], made[name] = [each for each in usable if each[0].source == "final"], newest
    for old in SHIPPED.glob("*.json"):
        if old.name not in best:
            old.unlink()
    for name, found in sorted(best.items()):
        record, origin = min(found or others[name], key=lambda each: latency(each[0]))
        document = schedule_document(as_today(record, origin), command=lower_command(record))
        document["provenance"]["table"] = origin
        (SHIPPED / name).write_text(dump_schedule(document), encoding="utf-8")
        print(f"{name}: {latency(record):,.1f} us, trial {record.trial} of {record.campaign} in {origin}")


def measured(table: Path) -> dict[str, list[TrialRecord]]:
    """File of a work -> its rows in a table that were measured on a quiet GPU and found right."""
    header, *lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    columns = header.rstrip("\n").split("\t")
    at = {name: columns.index(name) for name in ("campaign", "source", "outcome")}
    found: dict[str, list[TrialRecord]] = {}
    for line in lines:
        cells = line.rstrip("\n").split("\t")
        if cells[at["source"]] == "store" or cells[at["outcome"]] != "measured":
            continue
        for record in from_tsv(header + line, None if "batch" in columns else batch_of(cells[at["campaign"]])):
            if not record.is_doubtful:
                weights = "" if record.weights == record.dtype else f"-{record.weights}"
                work = f"{record.model}-{record.gpu}-{record.dtype}{weights}"
                found.setdefault(f"{work}-c{record.context}-b{record.batch}.json", []).append(record)
    return found


def speaks_of_today(record: TrialRecord) -> bool:
    """Whether a schedule of today can say what the row's config says: no loader pauses, no product of one row begins
    with a part of its input, tiles of k and v are as high as those of q, no buffers share memory, and GPUs send each
    other summands of 16 bits."""
    config = json.loads(record.config)
    tiling = config["tiling"]
    q, k, v = (tiling.get(f"gemv.{name}", {}).get("N_tile") for name in ("q_proj", "k_proj", "v_proj"))
    whole = record.batch > 1 or tiling.get("hand_off", {}).get("slices", 1) == 1
    bits = tiling.get("exchange", {}).get("bits", 32) if record.gpu[0].isdigit() else 16
    shares = config["page_allocation"] == "graph_color"
    return not pauses(record) and whole and q == k == v and not shares and bits == 16


def pauses(record: TrialRecord) -> bool:
    """Whether the row is of loaders that paused."""
    return "pause_cycles" in record.config


def as_today(record: TrialRecord, origin: str) -> TrialRecord:
    """The row with the config as a schedule of today says it, and the id that today's code gives its program. Pages
    that no two buffers share and slices of several rows change nothing that a GPU is given, so the row's time is of
    this config, too."""
    config = json.loads(record.config)
    config["tiling"].get("hand_off", {}).pop("slices", None)
    config["page_allocation"] = "none"
    today = config_from_dict(config)
    told = replace(record, config=json.dumps(config), config_id=today.config_id)
    if origin.endswith(OTHERWISE):
        return told
    asked = record.model, record.gpu, record.dtype, record.context, record.batch
    workload = make_workload(*asked, None if record.weights == record.dtype else record.weights)
    return replace(told, program_id=program_id(lower(workload.graph, today, workload.target)))


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
