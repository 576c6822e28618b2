"""The README's picture: a campaign's history, and one layer of its best schedule on every SM.

`python experiments/picture.py --store flywheel.db --campaign NAME --output docs/search.png` (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate

import matplotlib

from flywheel.cost_model import timeline
from flywheel.ir import MegakernelProgram, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.search.workload import make_workload
from flywheel.store.sql import open_store

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

LAYER = 3
COLOURS = ("#4c78a8", "#9ecae9", "#72b7b2", "#f58518", "#54a24b", "#e45756", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac")


def history(axes: Axes, records: list[TrialRecord]) -> None:
    """Every trial's objective, the best so far, and the weight floor."""
    shown = [(record.trial, record.objective_us, record.source) for record in records if record.objective_us]
    kind = "predicted" if all(record.is_predicted for record in records if record.objective_us) else "measured"
    for source, marker in (("search", "o"), ("seed", "*"), ("store", "x")):
        points = [(trial, latency) for trial, latency, why in shown if why == source]
        if points:
            axes.plot(*zip(*points, strict=True), marker, ms=9 if marker == "*" else 3.5, label=source, alpha=0.8)
    best = list(accumulate((latency for _, latency, _ in shown), min))
    axes.plot([trial for trial, _, _ in shown], best, "-", lw=1.5, color="black", label="best so far")
    floor = next(record.floor_us for record in records if record.floor_us)
    axes.axhline(floor, ls="--", lw=1, color="crimson", label=f"weight floor, {floor:,.0f} us")
    axes.set(xlabel="trial", ylabel=f"{kind} latency, us a token", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=8, frameon=False)
    axes.set_ylim(top=2 * best[-1])
    beyond = sum(latency > 2 * best[-1] for _, latency, _ in shown)
    cut = f", {beyond} of them above" if beyond else ""
    axes.set_title(f"{records[0].model} on {records[0].gpu}: {len(records)} trials{cut}", fontsize=10)


def layer_timeline(axes: Axes, program: MegakernelProgram) -> None:
    """One layer's tasks, an SM a row, by the cost model."""
    labels = {task.id: task.label for task in program.tasks}
    prefix = f"L{LAYER}."
    spans = [span for span in timeline(program) if labels[span.task].startswith(prefix)]
    start = min(span.start_us for span in spans)
    names = list(dict.fromkeys(labels[span.task].removeprefix(prefix) for span in sorted(spans, key=lambda s: s.task)))
    for name, colour in zip(names, COLOURS, strict=False):
        mine = [span for span in spans if labels[span.task] == prefix + name]
        axes.barh(
            [span.sm for span in mine],
            [span.end_us - span.start_us for span in mine],
            left=[span.start_us - start for span in mine],
            height=1.0,
            color=colour,
            label=name,
        )
    axes.set(xlabel=f"us since layer {LAYER} began", ylabel="SM", ylim=(-0.5, max(span.sm for span in spans) + 0.5))
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    axes.set_title(f"the best schedule, layer {LAYER}, by the cost model", fontsize=10)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="flywheel.db")
    parser.add_argument("--campaign", required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    with open_store(arguments.store, create=False) as store:
        records = store.trials(arguments.campaign)
        best = store.best(measured=False, campaign=arguments.campaign)
    assert best is not None
    workload = make_workload(best.model, best.gpu, best.dtype, best.context)
    program = lower(workload.graph, config_from_dict(json.loads(best.config)), workload.target)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1, 1.3), layout="constrained")
    history(left, records)
    layer_timeline(right, program)
    figure.savefig(arguments.output, dpi=130)


if __name__ == "__main__":
    main()
