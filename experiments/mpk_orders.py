"""What other schedules of MPK's task graphs could gain, and the most that any could, by flywheel's model of MPK on an
H200.

    python experiments/mpk_orders.py > results/mpk_orders.txt

Every row is a graph. It has the graph's own schedule; the best of a search over orders, events, launches and, in `any
W`, numbers of workers; and the best that is launched just in time. It also has bounds of all orders: a worker for every
task (`unqueued`), the critical path, and the load of 128 workers. `events` counts the events that could be split.
Graphs of the tests are at 512 tokens, the others at the context at which MPK was measured. Racy graphs are repaired
first; their rows end in *.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from mpk_steps import CONTEXT, LLAMA_1B, LLAMA_8B, llama_document

from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.repairing import repair
from flywheel.interop.mpk.rescheduling import components
from flywheel.interop.mpk.timing import H200, bounds_of
from flywheel.search.task_graphs import WORKERS, TriedSchedule, search_graphs

GRAPHS = Path(__file__).parents[1] / "tests" / "interop" / "mpk" / "graphs"
SAMPLES = (
    ("micro_2layer",), ("tiny",), ("tinyamp",), ("tinybw",), ("tinysplit",), ("q06",), ("l1b",), ("q8b",), ("exp_mla",),
    ("micro_2gpu_r0", "micro_2gpu_r1"), ("tiny2g_r0", "tiny2g_r1"), ("h4096x2_g2_r0", "h4096x2_g2_r1"),
)  # fmt: skip
COLUMNS = ("given", "best", "any W", "W", "in time", "unqueued", "way", "load", "events")


def main() -> None:
    """Print the table, in us, of all graphs or of those that are named."""
    wanted = sys.argv[1:]
    print(f"{'graph':16}" + "".join(f"{name:>10}" for name in COLUMNS))
    for names in SAMPLES:
        if wanted and names[0] not in wanted:
            continue
        show(names[0], [read_graph(lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes())) for name in names], 512)
    for name, dims in (("llama3.2-1b", LLAMA_1B), ("llama3-8b", LLAMA_8B)):
        if wanted and name not in wanted:
            continue
        show(name, [read_graph(json.dumps(llama_document(dims)).encode())], CONTEXT)


def show(name: str, graphs: Sequence[MpkGraph], context: int) -> None:
    """One row."""
    if not check(graphs).ok:
        mended = repair(graphs, None, {})
        assert mended.result.ok
        graphs, name = mended.graphs, f"{name} *"
    here = search_graphs(graphs, {}, (H200.workers,), context=context)
    anywhere = search_graphs(graphs, {}, WORKERS, context=context)
    late = best_of([each for each in here.trials if each.schedule.launch == "just in time"])
    bounds = [bounds_of(graph, H200, context) for graph in graphs]
    cells = [
        us(here.trials[0].latency_us), us(here.best.latency_us), us(anywhere.best.latency_us),
        str(anywhere.best.schedule.workers), us(late), us(max(each.unqueued_us for each in bounds)),
        us(max(each.path_us for each in bounds)), us(max(each.load_us for each in bounds)),
        str(sum(len(components(graph)) for graph in graphs)),
    ]  # fmt: skip
    print(f"{name:16}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def best_of(trials: Sequence[TriedSchedule]) -> float | None:
    """The least time of what the proof accepted."""
    return min((each.latency_us for each in trials if each.latency_us is not None), default=None)


def us(value: float | None) -> str:
    """A time in us."""
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
