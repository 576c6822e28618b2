"""Predicts each shipped schedule by the cost model, beside the time that a final measured for it.

    python experiments/shipped_predicted.py

A line names the table of the measured row, and its commit, which tells the kernels. The constants are this tree's.
"""

from __future__ import annotations

import json

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.lowering.lower import lower
from flywheel.search.workload import make_workload
from flywheel.store.schedule import SHIPPED, load_schedule


def main() -> None:
    """Print a line a schedule."""
    print(f"us a step; predicted by version {MODEL_VERSION}, measured by the final of a search")
    print(f"{'schedule':44} {'predicted':>9} {'measured':>9} {'difference':>10}  commit   table")
    for path in sorted(SHIPPED.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        schedule = load_schedule(path)
        workload = make_workload(
            schedule.model, schedule.gpu, schedule.dtype, schedule.context, schedule.batch, schedule.weights,
            any_size=True,
        )  # fmt: skip
        predicted = predict(lower(workload.graph, schedule.config, workload.target)).latency_us
        measured, origin = document["measured"]["median_us"], document["provenance"]
        print(
            f"{path.stem:44} {predicted:9,.1f} {measured:9,.1f} {predicted / measured - 1:+10.1%}  "
            f"{(origin['commit'] or '-')[:7]:7}  {origin['table']}"
        )


if __name__ == "__main__":
    main()
