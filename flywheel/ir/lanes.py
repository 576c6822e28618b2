"""Lanes: consecutive tokens of one sequence in one launch, each at a row of the same cache.

A launch at position p puts the token of lane k at p + k. So, wherever the program stands, a lane's append writes row
p + k, and its attention reads rows up to that one, at most as many as its window has. Of these, a launch writes the
rows from p on, one a lane: they are the cells 0, 1.. of the cache. `check_lanes` proves that nothing else touches a
cache of several lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flywheel.ir.access import Region
from flywheel.ir.compressed import brief_of
from flywheel.ir.dtype import BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task


def lane_of(task: Task) -> int:
    """How far behind its sequence's position a task's token stands."""
    lane: int = task.params.get("lane", 0)
    return lane


def lanes_of(program: MegakernelProgram) -> int:
    """Consecutive tokens of each sequence that a launch of a program decodes."""
    params = [each.params for run in brief_of(program).runs for each in run.tiles.stretches]
    return 1 + max((each.get("lane", 0) for each in params), default=0)


def lanes_of_caches(tasks: Sequence[Task], buffers: Mapping[int, Buffer]) -> dict[int, int]:
    """Each KV cache that tasks with a `lane` touch, and how many lanes it has: one more than the last."""
    found: dict[int, int] = {}
    for task in tasks:
        if "lane" not in task.params:
            continue
        for number in (*task.inputs, *task.outputs):
            if buffers[number].kind is BufferKind.KV_CACHE:
                found[number] = max(found.get(number, 0), lane_of(task) + 1)
    return found


def cell_written(task: Task) -> Region:
    """The cell of a cache of several lanes that a task appends to."""
    return lane_of(task), lane_of(task) + 1


def cells_read(task: Task) -> Region:
    """The cells of a cache of several lanes that a task attends to: those up to its own, of which a window sees the
    last."""
    end = lane_of(task) + 1
    return max(0, end - task.params.get("window", end)), end
