"""Predicts steps of several GPUs by the cost model, beside what was measured.

`python experiments/ranks_predicted.py`: batch 1, bf16, context 512. First come two, four and eight H200; of the
schedules that a search tries first, the one predicted to be fastest. The skeleton beside them is a persistent kernel
without attention, which was timed on two H200 with NVLink. It streams weights of the model's shapes and hands over rows
five times a layer; the owner of a slice adds the pushes of both GPUs. Then come the schedules that were measured on two
H100 (results/archive/h100/results.ranks.tsv): the median error over all of them, and the fastest.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.cost_model.links import exchanges_us
from flywheel.ir.config import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.tsv import from_tsv

TABLE = Path(__file__).parents[1] / "results" / "archive" / "h100" / "results.ranks.tsv"
SKELETON_MS = {
    "llama3.2-1b": {1: 0.671, 2: 0.420},
    "llama3-8b": {1: 3.482, 2: 1.879},
    "llama3-70b": {1: 30.37, 2: 15.66},
}


def main() -> None:
    """Print both tables."""
    print(f"predicted, version {MODEL_VERSION}, H200, bf16, context 512, batch 1; ms a step")
    print(f"{'model':12} {'GPUs':>4} {'tasks':>9} {'floor':>7} {'predicted':>9} {'exchanges':>9} {'skeleton':>8}")
    for model, skeleton in SKELETON_MS.items():
        for ranks in (1, 2, 4, 8):
            workload = make_workload(model, "h200", "bf16", 512, any_size=True, ranks=ranks)
            space = make_space(workload)
            programs = [
                lower(workload.graph, space.to_config(choice), workload.target) for choice in space.known_good()
            ]
            found, program = min(
                [(predict(program), program) for program in programs], key=lambda pair: pair[0].latency_us
            )
            print(
                f"{model:12} {ranks:4} {len(program.tasks):9,} {found.floor_us / 1e3:7.3f} "
                f"{found.latency_us / 1e3:9.3f} {exchanges_us(program) / 1e3:9.3f} {skeleton.get(ranks, ''):>8}"
            )
    print("\nbeside two H100; us a step")
    print(f"{'model':12} {'weights':7} {'configs':>7} {'median error':>12}  fastest, predicted")
    rows: dict[tuple[str, str], list[TrialRecord]] = {}
    for record in from_tsv(TABLE.read_text(encoding="utf-8")):
        rows.setdefault((record.model, record.weights), []).append(record)
    for (model, weights), found in rows.items():
        compare(model, weights, found)


def compare(model: str, weights: str, records: list[TrialRecord]) -> None:
    """Print a line for the measured rows of one workload; a config counts by the median of its latencies."""
    workload = make_workload(model, "h100", "bf16", 512, weights=weights, ranks=2)
    latencies: dict[str, list[float]] = {}
    for record in records:
        assert record.latency_us is not None
        latencies.setdefault(record.config, []).append(record.latency_us)
    measured = {config: median(found) for config, found in latencies.items()}
    predicted = {
        config: predict(lower(workload.graph, config_from_dict(json.loads(config)), workload.target)).latency_us
        for config in measured
    }
    best = min(measured, key=lambda config: measured[config])
    errors = [abs(predicted[config] / us - 1) for config, us in measured.items()]
    fastest = f"{measured[best]:,.0f}, {predicted[best]:,.0f}"
    print(f"{model:12} {weights:7} {len(measured):7} {median(errors):12.1%}  {fastest}")


if __name__ == "__main__":
    main()
