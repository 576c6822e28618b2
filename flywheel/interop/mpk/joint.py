"""The graphs of all ranks as one graph: tasks that wait for counters and signal them, and the cells that they touch.

Every event of every rank is a counter. If there are several ranks, the joint graph is continued by a second iteration:
a fast rank may already be in the second while a slow rank is still in the first, and the proof covers both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from flywheel.interop.mpk.graph import (
    BEGIN_TASK,
    END,
    FIRST_TASK,
    INVALID,
    LAUNCHING,
    MpkGraph,
    MpkTask,
    MpkTensor,
    is_remote,
    place_of,
    rank_of,
)
from flywheel.interop.mpk.kinds import KINDS, PUTS, REDUCE, kind_name
from flywheel.interop.mpk.regions import MAX_TOUCHED, CellGrid, grid_of, plane_cell, rects_of
from flywheel.ir.records import Wait
from flywheel.ir.validate.sweep import Cells, Touches

_MAX_EVENTS: Final = 1 << 31
"""The distance between the first counters of two ranks, or of the last rank and the next iteration."""


@dataclass(frozen=True, slots=True)
class JointTask:
    """A task of one rank in iteration `turn`, as the proof sees it. `place` is its position in all_tasks, `sm` the
    number of its queue (None: any queue)."""

    id: int
    label: str
    waits: Sequence[Wait]
    out_counter: int
    sm: int | None
    rank: int
    place: int
    turn: int


class TensorUse(NamedTuple):
    """One access of a task to a piece of a tensor of rank `rank`. `part` names the part of the piece that the task's
    metadata selects; None stands for the whole piece."""

    rank: int
    tensor: MpkTensor
    mode: str  # "r" reads, "w" writes, "a" adds
    part: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """All nodes, rank after rank in the order of its list, the cells that each touches, and how tensors are cut into
    cells. `gaps` lists (node, cell): tasks write the tensor that the node reads, but not this cell."""

    nodes: Sequence[JointTask]
    touches: Sequence[Touches]
    grids: Sequence[CellGrid]
    gaps: Sequence[tuple[int, int]]

    def name(self, index: int) -> str:
        """How messages name a node."""
        node = self.nodes[index]
        later = " of the next iteration" if node.turn else ""
        return f"rank {node.rank} task {node.place} ({node.label}){later}"


def launched_by(graph: MpkGraph) -> dict[int, list[int]]:
    """The events that put each task into a queue, by the task's position."""
    found: dict[int, list[int]] = {place: [] for place in range(FIRST_TASK, len(graph.tasks))}
    for number, event in enumerate(graph.events):
        if event.kind in LAUNCHING:
            for place in range(max(event.first, FIRST_TASK), min(event.last, len(graph.tasks))):
                found[place].append(number)
    return found


def producers(graphs: Sequence[MpkGraph]) -> Counter[tuple[int, int]]:
    """How many tasks signal each event in one iteration, by (rank, position of the event). Task 0 does not count."""
    return Counter(
        [
            (rank_of(task.trigger), place_of(task.trigger))
            for graph in graphs
            for task in graph.tasks[BEGIN_TASK:]
            if task.trigger != INVALID and (not is_remote(task.trigger) or task.kind in PUTS)
        ]
    )


def counter_of(rank: int, place: int, turn: int = 0) -> int:
    """The number of an event's counter in iteration `turn`."""
    return ((turn << 16) + rank) * _MAX_EVENTS + place


def join(graphs: Sequence[MpkGraph], workers: int | None, aliases: Mapping[str, str]) -> Joint:
    """The joint program of one iteration. Without `workers`, each rank's tasks stand in one queue.

    The graphs must have passed the checks of events and launches.
    """
    grids, touches = _cut(graphs, _memories(aliases))
    nodes = [node for graph in graphs for node in nodes_of(graph, workers or 1)]
    touched = [touch for graph in graphs for touch in touches[graph.rank]]
    return Joint(nodes, touched, grids, _gaps(touched, grids))


def continued(joint: Joint, graphs: Sequence[MpkGraph], workers: int | None) -> Joint:
    """The joint program of an iteration and the next one; `joint` is that of the iteration alone."""
    later = [node for graph in graphs for node in nodes_of(graph, workers or 1, 1)]
    return replace(joint, nodes=[*joint.nodes, *later], touches=[*joint.touches, *joint.touches])


def _memories(aliases: Mapping[str, str]) -> dict[str, str]:
    """One name for every memory. Names that a chain of aliases connects belong to the same memory."""
    found: dict[str, str] = {}
    for name, other in aliases.items():
        old, new = found.get(name, name), found.get(other, other)
        found |= {name: new, other: new} | {each: new for each, memory in found.items() if memory == old}
    return found


def _gaps(touches: Sequence[Touches], grids: Sequence[CellGrid]) -> list[tuple[int, int]]:
    """(node, cell) of each read of cells that no task writes, in a tensor that tasks write: the first such cell."""
    written = {part for touch in touches for part in (*touch.writes, *touch.adds)}
    cells = {plane_cell(grids, cell) for part in written for cell in part}
    known: set[Cells] = set()
    found = []
    for index, touch in enumerate(touches):
        for part in touch.reads:
            if part in known:
                continue
            known.add(part)
            missing = [cell for cell in part if plane_cell(grids, cell) not in cells]
            if missing:
                found.append((index, missing[0]))
    return found


def nodes_of(graph: MpkGraph, workers: int, turn: int = 0) -> list[JointTask]:
    """The tasks of one iteration of one rank, in the order of its list.

    Each iteration has queues of its own: MPK deals on where the last iteration ended, so a task may change its worker
    from one iteration to the next.
    """
    end = next(number for number, event in enumerate(graph.events) if event.kind == END)
    begin = place_of(graph.tasks[BEGIN_TASK].trigger)
    launches = launched_by(graph)
    waits: dict[tuple[int, ...], tuple[Wait, ...]] = {}
    nodes = []
    own = len(graph.events)
    for place in range(FIRST_TASK, len(graph.tasks)):
        task = graph.tasks[place]
        later = [number for number in launches[place] if number != begin]
        key = tuple(sorted({*later, *([place_of(task.dependent)] if task.dependent != INVALID else [])}))
        if key not in waits:
            wanted = [Wait(counter_of(graph.rank, number, turn), graph.events[number].triggers) for number in key]
            wanted = [wait for wait in wanted if wait.threshold]
            if turn:
                wanted.append(Wait(counter_of(graph.rank, end, turn - 1), graph.events[end].triggers))
            waits[key] = tuple(wanted)
        if task.trigger == INVALID or (is_remote(task.trigger) and task.kind not in PUTS):
            signal, own = counter_of(graph.rank, own, turn), own + 1
        else:
            signal = counter_of(rank_of(task.trigger), place_of(task.trigger), turn)
        queue = None if later else ((turn << 16) + graph.rank) * workers + (place - FIRST_TASK) % workers
        nodes.append(JointTask(place, kind_name(task.kind), waits[key], signal, queue, graph.rank, place, turn))
    return nodes


def n_ranks(graphs: Sequence[MpkGraph]) -> int:
    """How many ranks the program has. The files tell it in two ways: by the ranks to which tasks send data, and by the
    number of slots in the buffers that tasks reduce."""
    seen = {graph.rank for graph in graphs}
    slots = 0
    for graph in graphs:
        for task in graph.tasks:
            if task.kind in PUTS and task.trigger != INVALID:
                seen.add(rank_of(task.trigger))
            elif task.kind == REDUCE and len(task.inputs) == 2 and len(task.inputs[1].dims) == 3:
                slots = max(slots, task.inputs[1].dims[0])
    return max(slots, max(seen) + 1)


def mirrored(graph: MpkGraph, rank: int, ranks: int) -> MpkGraph:
    """The graph as MPK emits it for another rank. It differs in the rank of its events, and in the rank and the offset
    to which its tasks send data."""
    peers = [number for number in range(ranks) if number != graph.rank]
    others = [number for number in range(ranks) if number != rank]

    def event(number: int, puts: bool) -> int:
        if number == INVALID:
            return number
        target = rank_of(number)
        there = others[peers.index(target)] if puts and target in peers else rank
        return number & ~(0xFFFF << 32) | there << 32

    def put(tensor: MpkTensor) -> MpkTensor:
        if len(tensor.dims) != 3:
            return tensor
        return replace(tensor, offset=tensor.offset + (rank - graph.rank) * tensor.strides[0] * tensor.item_bytes)

    tasks = tuple(
        [
            replace(
                task,
                trigger=event(task.trigger, task.kind in PUTS),
                dependent=event(task.dependent, False),
                outputs=tuple([put(tensor) for tensor in task.outputs]) if task.kind in PUTS else task.outputs,
            )
            for task in graph.tasks
        ]
    )
    return replace(graph, rank=rank, tasks=tasks)


def uses_of(graph: MpkGraph, task: MpkTask, ranks: frozenset[int]) -> list[TensorUse]:
    """The accesses of a task. A task of an unknown type counts as a writer of every tensor that it lists. A task that
    writes a piece may also read it."""
    kind, rank = KINDS.get(task.kind), graph.rank
    if kind is None:
        return [TensorUse(rank, tensor, "w") for tensor in (*task.inputs, *task.outputs)]
    part = (task.kind, task.metadata[:4]) if kind.carves and task.metadata else None
    found = []
    for place, tensor in enumerate(task.inputs):
        if task.kind == REDUCE and place == 1 and len(tensor.dims) == 3:
            found += [TensorUse(rank, slot, "r") for number, slot in enumerate(_slots(tensor)) if number != rank]
        elif place not in kind.hidden:
            found.append(TensorUse(rank, tensor, "r"))
    found += [TensorUse(rank, task.inputs[place], "w", part) for place in kind.hidden if place < len(task.inputs)]
    if task.kind in PUTS:
        target = rank_of(task.trigger)
        slots = [_slots(tensor)[0] if len(tensor.dims) == 3 and tensor.dims[0] else tensor for tensor in task.outputs]
        found += [TensorUse(target, tensor, "w") for tensor in slots if target in ranks]
    else:
        found += [TensorUse(rank, tensor, "a" if kind.adds else "w", part) for tensor in task.outputs]
    return [use for use in found if use.tensor.name != "nullptr"]


def _slots(tensor: MpkTensor) -> list[MpkTensor]:
    """The slots, one a rank, in the buffer of an all-reduce, beginning with the slot at which the operand starts."""
    step = tensor.strides[0] * tensor.item_bytes
    return [
        replace(tensor, offset=tensor.offset + step * number, dims=(1, *tensor.dims[1:]))
        for number in range(min(tensor.dims[0], 1 << 10))
    ]


_Whose = tuple[int, str]
"""(rank, name) of a tensor."""
_PartKey = tuple[int, tuple[int, ...]]


def _cut(graphs: Sequence[MpkGraph], aliases: Mapping[str, str]) -> tuple[list[CellGrid], dict[int, list[Touches]]]:
    ranks = frozenset(graph.rank for graph in graphs)
    uses = {graph.rank: [uses_of(graph, task, ranks) for task in graph.tasks[FIRST_TASK:]] for graph in graphs}
    parts: dict[_Whose, set[_PartKey]] = {}
    for listed in uses.values():
        for found in listed:
            for use in found:
                if use.mode != "r":
                    key = use.rank, aliases.get(use.tensor.name, use.tensor.name)
                    parts.setdefault(key, set()).add(use.part or (-1, ()))
    pieces: dict[_Whose, dict[int, tuple[MpkTensor, int]]] = {key: {} for key in parts}  # by id(): files share tensors
    for listed in uses.values():
        for found in listed:
            for use in found:
                counted = pieces.get((use.rank, aliases.get(use.tensor.name, use.tensor.name)))
                if counted is not None:
                    counted[id(use.tensor)] = (use.tensor, counted.get(id(use.tensor), (None, 0))[1] + 1)
    cutter, base, total = _Cutter(aliases, {}, {}, {}, {}), 0, 0
    for key in sorted(parts):
        kinds = {kind for kind, _ in parts[key]}
        layers = sorted(parts[key]) if len(kinds) == 1 and -1 not in kinds else []
        cutter.layers[key] = {part: place for place, part in enumerate(layers)}
        uses_here = list(pieces[key].values())
        grid, touched = grid_of(key, base, uses_here, max(1, len(layers)), MAX_TOUCHED - total)
        cutter.grids[key] = grid
        base, total = base + grid.size, total + touched
    touches = {rank: [cutter.touches(found) for found in listed] for rank, listed in uses.items()}
    return list(cutter.grids.values()), touches


@dataclass(frozen=True, slots=True)
class _Cutter:
    aliases: Mapping[str, str]
    grids: dict[_Whose, CellGrid]
    layers: dict[_Whose, dict[_PartKey, int]]
    known: dict[tuple[int, int, _PartKey | None], Cells]
    shared: dict[Cells, Cells]

    def touches(self, found: Sequence[TensorUse]) -> Touches:
        by: dict[str, list[Cells]] = {"r": [], "w": [], "a": []}
        for use in found:
            key = use.rank, id(use.tensor), use.part
            cells = self.known.get(key)
            if cells is None:
                cells = self._cells(use)
                cells = self.known[key] = self.shared.setdefault(cells, cells)
            if cells:
                by[use.mode].append(cells)
        return Touches(by["r"], by["w"], by["a"])

    def _cells(self, use: TensorUse) -> Cells:
        key = use.rank, self.aliases.get(use.tensor.name, use.tensor.name)
        grid = self.grids.get(key)
        if grid is None:
            return ()
        place = None if use.part is None else self.layers[key].get(use.part)
        layers = range(grid.layers) if place is None else range(place, place + 1)
        return grid.cells(rects_of(use.tensor, grid.pitch), layers)
