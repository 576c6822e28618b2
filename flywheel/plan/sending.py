"""Which matrix products can store their result on the other GPUs directly, so that no separate push task is needed.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from flywheel.errors import InvalidProgramError
from flywheel.ir import Buffer, MegakernelProgram, Task
from flywheel.ir.access import tile, tile_rows
from flywheel.plan.nodes import group_tasks, make_nodes
from flywheel.plan.step import Form, steps_of, x_rows

PushedTile = tuple[int, int, int, int]
"""A pushed tile: (buffer, first column, end column, rows)."""


def tile_pushed(push: Task) -> PushedTile:
    """The tile that a push sends: columns of its input."""
    return _tile(push, push.inputs[0])


def _tile(task: Task, number: int) -> PushedTile:
    start, end = tile(task.params) or (0, 0)
    return number, start, end, tile_rows(task.params)


def made_by(tasks: Sequence[Task], buffers: Mapping[int, Buffer], sources: Collection[int]) -> dict[PushedTile, int]:
    """The tiles of buffers in `sources` that a product's last step stores, with the index of the product in the list.

    All tasks are of one GPU. A buffer in which tasks write, or may write, a column twice has no such tiles.
    """
    writers: dict[int, list[int]] = {}
    for place, task in enumerate(tasks):
        for number in task.outputs:
            if number in sources:
                writers.setdefault(number, []).append(place)
    alone = [place for number, places in writers.items() if _in_tiles(number, places, tasks) for place in places]
    stored = _stores(sorted(alone), tasks, buffers)
    return {_tile(tasks[place], tasks[place].outputs[0]): place for place in stored}


def _in_tiles(number: int, places: Sequence[int], tasks: Sequence[Task]) -> bool:
    """Whether tasks write a buffer in tiles with equal numbers of rows, none of which overlap in columns."""
    written = [tasks[place] for place in places]
    if any(task.outputs[0] != number or tile(task.params) is None for task in written):
        return False
    tiles = sorted([_tile(task, number) for task in written])
    return len({rows for *_, rows in tiles}) == 1 and all(one[2] <= other[1] for one, other in pairwise(tiles))


def _stores(places: Sequence[int], tasks: Sequence[Task], buffers: Mapping[int, Buffer]) -> list[int]:
    """The indices in `places` whose task ends with a product that it stores as its first output."""
    makers = [tasks[place] for place in places]
    touched = dict.fromkeys(number for task in makers for number in (*task.inputs, *task.outputs))
    grouping = group_tasks(makers)
    nodes, forms = make_nodes(
        MegakernelProgram(buffers=tuple([buffers[number] for number in touched]), counters=(), tasks=tuple(makers)),
        grouping,
    )
    ends = [_ends_with_product(forms[node.form], tile_rows(node.task.params)) for node in nodes]
    return [place for place, node in zip(places, grouping.node_of.tolist(), strict=True) if ends[node]]


def _ends_with_product(form: Form, rows: int) -> bool:
    """Whether the last step is a product of `rows` rows, and the only step that writes the first output."""
    try:
        steps = steps_of(form)
    except InvalidProgramError:
        return False  # it has no kernel; the packer raises an error that names the task
    if not steps or not steps[-1].matrix or x_rows(steps[-1], steps, form) != rows:
        return False
    return steps[-1].out == 0 and [step.out for step in steps].count(0) == 1
