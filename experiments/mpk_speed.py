"""Times the proof of MPK's task graphs: CPU seconds of a process, medians of five.

    python experiments/mpk_speed.py > results/mpk_speed.txt

`any` is under any placement, `queues` under MPK's queues of 128 workers. `tasks` counts all ranks, also those that the
proof fills in. Graphs of several ranks are proved over two iterations.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

from flywheel.interop.mpk.graph import INVALID, MpkGraph, read_graph
from flywheel.interop.mpk.joint import n_ranks
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.repairing import repair

GRAPHS = Path(__file__).parents[1] / "tests" / "interop" / "mpk" / "graphs"


def main() -> None:
    """Print the table."""
    print(f"{'graph':26} {'tasks':>6} {'any s':>6} {'queues s':>9}  verdict")
    for name in ("l1b", "q06", "q8b"):
        show(name, [graph_of(name)])
    for dropped in (100, None):
        show(f"q8b, {dropped or 'all'} waits dropped", [without_waits(graph_of("q8b"), dropped)])
    show("tiny4g, one file of four", [graph_of("tiny4g_r2")])
    for name in ("tiny2g", "h5120x2_g2"):
        pair = [graph_of(f"{name}_r0"), graph_of(f"{name}_r1")]
        show(name, pair)
        mended = repair(pair, None, {})
        assert mended.result.ok
        show(f"{name}, repaired", mended.graphs)


def show(name: str, graphs: Sequence[MpkGraph]) -> None:
    """One row."""
    times = [median(seconds(graphs, workers) for _ in range(5)) for workers in (None, 128)]
    verdicts = ["accepted" if check(graphs, workers).ok else "rejected" for workers in (None, 128)]
    tasks = sum(len(graph.tasks) for graph in graphs) * n_ranks(graphs) // len(graphs)
    print(f"{name:26} {tasks:6} {times[0]:6.2f} {times[1]:9.2f}  {', '.join(dict.fromkeys(verdicts))}", flush=True)


def without_waits(graph: MpkGraph, count: int | None) -> MpkGraph:
    """The graph without the waits of `count` of its tasks, drawn with a fixed seed; None: of all."""
    places = [place for place, task in enumerate(graph.tasks) if task.dependent != INVALID]
    dropped = set(places if count is None else Random(1).sample(places, count))
    tasks = [replace(task, dependent=INVALID) if place in dropped else task for place, task in enumerate(graph.tasks)]
    return replace(graph, tasks=tasks)


def seconds(graphs: Sequence[MpkGraph], workers: int | None) -> float:
    """CPU seconds of one proof of graphs that nothing is known of."""
    fresh = [replace(graph) for graph in graphs]
    start = process_time()
    check(fresh, workers)
    return process_time() - start


def graph_of(name: str) -> MpkGraph:
    """A sample."""
    return read_graph(lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes()))


if __name__ == "__main__":
    main()
