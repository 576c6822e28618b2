"""Draws the pictures of recorded `flywheel bench` documents again, with today's names.

    python experiments/redraw_bench.py results/gpu/llama3-8b.bench.json ...

Each picture is beside its document. Nothing is measured: the times are the document's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flywheel.cli.standings import draw
from flywheel.measure.comparison import Comparison, Entry
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Measured, Rejected
from flywheel.measure.verdict import Verdict

WARMUP = 3


def main() -> None:
    """Write a picture a document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path)
    for path in parser.parse_args().documents:
        document = json.loads(path.read_text(encoding="utf-8"))
        comparisons = [comparison_of(each, document["dtype"]) for each in document["comparisons"]]
        path.with_suffix(".svg").write_text(draw(document, comparisons), encoding="utf-8")
        print(f"wrote {path.with_suffix('.svg')}")


def comparison_of(found: dict[str, Any], dtype: str) -> Comparison:
    """What `comparison_document` was made of, as far as a picture shows it."""
    entries = tuple(entry_of(each, dtype) for each in found["contestants"])
    return Comparison(
        found["context"], found["weight_bytes"], found["floor_us"], found["ceiling_us"], entries, found["batch"]
    )


def entry_of(found: dict[str, Any], dtype: str) -> Entry:
    """A contestant. Only one whose verdict passed has a time, so the document's own word on it stands."""
    if found["median_us"] is None:
        return Entry(found["name"], found["how"], Rejected((), found["reason"]))
    times = found["median_us"], found["p10_us"], found["p90_us"]
    latency = MeasuredLatency(*times, found["samples"], WARMUP, found["l2_state"], found["batch_us"])
    said = found["verdict"]
    verdict = Verdict(said["passed"], 0.0, 1.0, "as recorded", tuple(said["positions"]), dtype)
    return Entry(found["name"], found["how"], Measured(latency, verdict))


if __name__ == "__main__":
    main()
