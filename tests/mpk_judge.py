"""A judge of task graphs that shares no code with the proof: closure over tasks, and bytes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flywheel.interop.mpk.graph import (
    BEGIN_TASK,
    END,
    FIRST_TASK,
    INVALID,
    LAUNCHING,
    MpkGraph,
    MpkTask,
    MpkTensor,
    event_id,
    is_remote,
    place_of,
    rank_of,
)

ATTENTION, PUT, REDUCE = 153, 301, 107
BYTES = {941: 2, 965: 8}

Event = tuple[int, int]
"""Rank and place."""
Access = tuple[int, str, int, bool, int | None]
"""Rank, tensor, bytes as bits, whether it writes, and the part of the piece if only one part is touched."""


def addresses(tensor: MpkTensor) -> int:
    """The bytes of a piece, each a bit."""
    starts = [tensor.offset]
    for size, step in zip(tensor.dims, tensor.strides, strict=True):
        starts = [start + place * step * BYTES[tensor.data_type] for start in starts for place in range(size)]
    mask = 0
    for start in starts:
        mask |= ((1 << BYTES[tensor.data_type]) - 1) << start
    return mask


def slot(tensor: MpkTensor, number: int) -> MpkTensor:
    """A rank's slot of the buffer of an all-reduce."""
    step = tensor.strides[0] * BYTES[tensor.data_type]
    return replace(tensor, offset=tensor.offset + number * step, dims=(1, *tensor.dims[1:]))


class Judge:
    """Says whether two iterations of the graphs of all ranks end and are free of races."""

    def __init__(self) -> None:
        self._masks: dict[MpkTensor, int] = {}

    def accepts(self, graphs: Sequence[MpkGraph]) -> bool:
        found = _Run(graphs)
        if not found.joined() or not found.launched():
            return False
        return found.ends() and not found.mixes() and not self._races(found)

    def _races(self, run: _Run) -> bool:
        touched: dict[tuple[int, str], list[tuple[int, int, bool, int | None]]] = {}
        for node, (_, rank, place) in enumerate(run.nodes):
            for whose, name, mask, writes, part in self._accesses(run, rank, run.by_rank[rank].tasks[place]):
                touched.setdefault((whose, name), []).append((node, mask, writes, part))
        return any(
            first[0] < second[0]
            and (first[2] or second[2])
            and first[1] & second[1] != 0
            and (first[3] is None or second[3] is None or first[3] == second[3])
            and not run.earlier[second[0]] >> first[0] & 1
            and not run.earlier[first[0]] >> second[0] & 1
            for uses in touched.values()
            for first in uses
            for second in uses
        )

    def _accesses(self, run: _Run, rank: int, task: MpkTask) -> list[Access]:
        found: list[Access] = []
        attends = task.kind == ATTENTION
        for number, tensor in enumerate(task.inputs):
            hidden = attends and number in (1, 2)
            if task.kind == REDUCE and number == 1:
                others = [other for other in run.by_rank if other != rank]
                found += [(rank, tensor.name, self._mask(slot(tensor, other)), False, None) for other in others]
            else:
                part = task.metadata[0] if hidden else None
                found.append((rank, tensor.name, self._mask(tensor), hidden, part))
        for tensor in task.outputs:
            if task.kind == PUT:
                found.append((rank_of(task.trigger), tensor.name, self._mask(slot(tensor, 0)), True, None))
            else:
                part = task.metadata[0] if attends else None
                found.append((rank, tensor.name, self._mask(tensor), True, part))
        return found

    def _mask(self, tensor: MpkTensor) -> int:
        if tensor not in self._masks:
            self._masks[tensor] = addresses(tensor)
        return self._masks[tensor]


class _Run:
    """The tasks of two iterations of all ranks as nodes (iteration, rank, place), and what is done before each."""

    def __init__(self, graphs: Sequence[MpkGraph]) -> None:
        self.by_rank = {graph.rank: graph for graph in graphs}
        self.nodes = [
            (turn, graph.rank, place)
            for turn in range(2)
            for graph in graphs
            for place in range(FIRST_TASK, len(graph.tasks))
        ]
        self.earlier: list[int] = [0] * len(self.nodes)
        self.signals: dict[tuple[int, Event], list[int]] = {}
        self.ends_of = {
            graph.rank: next(number for number, event in enumerate(graph.events) if event.kind == END)
            for graph in graphs
        }
        for node, (turn, rank, place) in enumerate(self.nodes):
            trigger = self.by_rank[rank].tasks[place].trigger
            if trigger != INVALID:
                self.signals.setdefault((turn, (rank_of(trigger), place_of(trigger))), []).append(node)

    def launchers(self, graph: MpkGraph, place: int) -> list[int]:
        """The events that launch a task."""
        return [
            number
            for number, event in enumerate(graph.events)
            if event.kind in LAUNCHING and event.first <= place < event.last
        ]

    def awaited(self, rank: int, place: int) -> list[int]:
        """The events of its rank that a task comes after, but for the one that begins the iteration."""
        graph = self.by_rank[rank]
        begin, dependent = place_of(graph.tasks[BEGIN_TASK].trigger), graph.tasks[place].dependent
        found = [number for number in self.launchers(graph, place) if number != begin]
        return sorted({*found, *([] if dependent == INVALID else [place_of(dependent)])})

    def joined(self) -> bool:
        """Whether every event that is awaited, launches or ends has as many signals as it needs."""
        for rank, graph in self.by_rank.items():
            begin = place_of(graph.tasks[BEGIN_TASK].trigger)
            wanted = {place_of(task.dependent) for task in graph.tasks if task.dependent != INVALID}
            acting = {n for n, event in enumerate(graph.events) if event.kind in LAUNCHING or event.kind == END}
            for number in wanted | acting:
                if number >= len(graph.events):
                    return False
                count = len(self.signals.get((0, (rank, number)), ())) + (number == begin)
                if count != graph.events[number].triggers or (number in acting and not count):
                    return False
        return True

    def launched(self) -> bool:
        """Whether one event launches each task, and none that is launched late waits or is waited for early."""
        late: set[Event] = set()
        early: list[tuple[int, MpkTask]] = []
        for rank, graph in self.by_rank.items():
            for place, task in enumerate(graph.tasks[FIRST_TASK:], FIRST_TASK):
                events = self.launchers(graph, place)
                if len(events) != 1:
                    return False
                if events == [place_of(graph.tasks[BEGIN_TASK].trigger)]:
                    early.append((rank, task))
                elif task.dependent not in (INVALID, event_id(rank, events[0])):
                    return False
                elif task.trigger != INVALID:
                    late.add((rank_of(task.trigger), place_of(task.trigger)))
        return not any(
            task.dependent != INVALID and (rank, place_of(task.dependent)) in late for rank, task in early
        )  # fmt: skip

    def _ahead(self, node: int) -> list[int]:
        turn, rank, place = self.nodes[node]
        found = [
            other for number in self.awaited(rank, place) for other in self.signals.get((turn, (rank, number)), ())
        ]
        return found + (self.signals[0, (rank, self.ends_of[rank])] if turn else [])

    def ends(self) -> bool:
        """Run all: one worker a rank takes what is launched at the start, in the list's order. Note what is before."""
        ahead = [self._ahead(node) for node in range(len(self.nodes))]
        queues: dict[tuple[int, int], list[int]] = {}
        loose = []
        for node, (turn, rank, place) in enumerate(self.nodes):
            graph = self.by_rank[rank]
            early = self.launchers(graph, place) == [place_of(graph.tasks[BEGIN_TASK].trigger)]
            (queues.setdefault((turn, rank), []) if early else loose).append(node)
        done: set[int] = set()
        moved = True
        while moved:
            moved = False
            for queue in (*queues.values(), *([node] for node in loose if node not in done)):
                while queue and done.issuperset(ahead[queue[0]]):
                    node = queue.pop(0)
                    for other in ahead[node]:
                        self.earlier[node] |= self.earlier[other] | 1 << other
                    done.add(node)
                    moved = True
        return len(done) == len(self.nodes)

    def mixes(self) -> bool:
        """Whether an event's next signals may come before all of this iteration, or before a wait for equality ends."""
        waiting: dict[Event, list[tuple[int, bool]]] = {}
        for node, (turn, rank, place) in enumerate(self.nodes):
            dependent = self.by_rank[rank].tasks[place].dependent
            for number in self.awaited(rank, place) if not turn else ():
                exact = dependent != INVALID and is_remote(dependent)
                waiting.setdefault((rank, number), []).append((node, exact))
        for rank, number in self.ends_of.items():
            waiting.setdefault((rank, number), [])
        return any(
            not self.earlier[later] >> before & 1
            for event, waiters in waiting.items()
            for later in self.signals.get((1, event), ())
            for before in (*self.signals.get((0, event), ()), *(node for node, exact in waiters if exact))
        )
