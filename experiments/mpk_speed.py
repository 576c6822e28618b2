"""Times the proof of MPK's task graphs: CPU seconds of a process, medians of five.

    python experiments/mpk_speed.py > results/mpk_speed.txt

`any` is under any placement, `queues` under MPK's queues of 128 workers. The last two graphs are of two ranks, so two
iterations are proved together. The last one is racy, so the proof searches for an order of unordered pairs to the end.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time

from flywheel.interop.mpk.graph import MpkGraph
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.reading import read_graph
from flywheel.interop.mpk.repairing import repair

GRAPHS = Path(__file__).parents[1] / "tests" / "interop" / "mpk" / "graphs"


def main() -> None:
    """Print the table."""
    print(f"{'graph':14} {'tasks':>6} {'any s':>6} {'queues s':>9}  verdict")
    for name in ("l1b", "q06", "q8b"):
        show(name, [graph_of(name)])
    for names in (("tiny2g_r0", "tiny2g_r1"), ("h5120x2_g2_r0", "h5120x2_g2_r1")):
        pair = [graph_of(name) for name in names]
        if names[0].startswith("tiny"):
            mended = repair(pair, None, {})
            assert mended.result.ok
            show("tiny2g mended", mended.graphs)
        else:
            show(names[0][:-3], pair)


def show(name: str, graphs: Sequence[MpkGraph]) -> None:
    """One row."""
    times = [median(seconds(graphs, workers) for _ in range(5)) for workers in (None, 128)]
    verdict = "accepted" if check(graphs).ok else "rejected"
    tasks = sum(len(graph.tasks) for graph in graphs)
    print(f"{name:14} {tasks:6} {times[0]:6.2f} {times[1]:9.2f}  {verdict}", flush=True)


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
