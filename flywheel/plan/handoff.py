"""Hand-offs by the data: which activations their readers can wait for, and which counters nobody needs then.

An awaited buffer has memory of its own and each of its elements is written once a launch, by a task that never reads
it. So an element says itself whether it was written: its bits are all ones until then, which no kernel stores. Whoever
reads it asks until it is there, with no fence and no counter between. Source: docs/vm.md, "Hand-offs".

What other buffers hold in order, a wait keeps there: that of one side of each pair of tasks of which one writes what
the other reads or writes. Where such a pair has no wait of its own, but stands in order by what others wait for, no
buffer is awaited at all; nor where buffers share memory, since who reads one would have to come before who writes the
other. A reader of an awaited buffer comes after its writer in the program's order, which has no cycle; so none is asked
for what is written behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import COMPUTE_DTYPES, Buffer, BufferKind, InstructionKind, MegakernelProgram, Task, Wait
from flywheel.ir.access import TILED_OPS, appends_behind, multi_row_buffers, tile
from flywheel.plan.nodes import Grouping

_GIVEN: Final = (BufferKind.WEIGHT, BufferKind.CONST, BufferKind.IO_INPUT)

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HandOffs:
    """Rows of the awaited buffers, the waits that are left to each node, and the counters that those ask."""

    awaited: frozenset[int]
    waits: tuple[tuple[Wait, ...], ...]
    counters: frozenset[int]


def by_counters(program: MegakernelProgram, grouping: Grouping) -> HandOffs:
    """Every wait as the program has it."""
    waits = tuple(tuple(task.waits) for task in grouping.firsts)
    return HandOffs(frozenset(), waits, frozenset(counter.id for counter in program.counters))


def by_data(program: MegakernelProgram, grouping: Grouping, sizes: npt.NDArray[np.int64] | None = None) -> HandOffs:
    """As few waits as there can be, for a program that `validate(strict=True)` accepts.

    With `sizes`, the tasks of each node, a task of the grouping may stand for some whose columns lie side by side.
    """
    if shares_pages(program):
        return by_counters(program, grouping)
    accesses = _Accesses(program, grouping, sizes)
    awaited = {number for number in accesses.writers if accesses.can_be_awaited(number)}
    ordered: set[Pair] = set()
    for number in accesses.writers.keys() - awaited:
        ordered |= accesses.conflicts(number)
    kept = {pair: waits for pair in ordered if (waits := accesses.between(*pair))}
    if not awaited or kept.keys() != ordered:
        return by_counters(program, grouping)
    needed: dict[int, set[Wait]] = defaultdict(set)
    for (one, other), (waits_of_one, waits_of_other) in kept.items():
        needed[one] |= waits_of_one
        needed[other] |= waits_of_other
    left = tuple(
        tuple([wait for wait in task.waits if wait in needed[node]]) if node in needed else ()
        for node, task in enumerate(grouping.firsts)
    )
    rows = frozenset(row for row, buffer in enumerate(program.buffers) if buffer.id in awaited)
    return HandOffs(rows, left, frozenset(wait.counter for waits in left for wait in waits))


class _Accesses:
    """Who writes and reads what, node by node."""

    def __init__(
        self, program: MegakernelProgram, grouping: Grouping, sizes: npt.NDArray[np.int64] | None
    ) -> None:
        self.nodes: Sequence[Task] = grouping.firsts
        self.buffers: Mapping[int, Buffer] = {buffer.id: buffer for buffer in program.buffers}
        self.sizes = np.bincount(grouping.node_of, minlength=len(self.nodes)) if sizes is None else sizes
        self._tiles, self._params = _tiles(grouping), _params(grouping)
        self._rows = multi_row_buffers(self.nodes, self.buffers)
        self._behind: dict[tuple[object, ...], bool] = {}
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        self._signals: dict[int, int] = defaultdict(int)
        for node, task in enumerate(self.nodes):
            self._signals[task.out_counter] += int(self.sizes[node])
            for number in task.outputs:
                self.writers[number].append(node)
            for number in task.inputs:
                if self.buffers[number].kind not in _GIVEN:
                    self.readers[number].append(node)

    def can_be_awaited(self, number: int) -> bool:
        """Whether the buffer is as the module says."""
        buffer = self.buffers[number]
        if buffer.kind is not BufferKind.ACTIVATION or buffer.dtype not in COMPUTE_DTYPES:
            return False
        writers = self.writers[number]
        if set(writers) & set(self.readers[number]) or any(_copies(self.nodes[node], number) for node in writers):
            return False
        return self._is_written_once(number)

    def _is_written_once(self, number: int) -> bool:
        rows = self._rows.get(number, 1)
        if rows is None:
            return False
        width = self.buffers[number].numel // rows
        pieces = np.concatenate([self._written(node, number, width) for node in self.writers[number]])
        pieces = pieces[np.argsort(pieces[:, 0])]
        ends = np.concatenate(([0], pieces[:, 1]))
        return bool((pieces[:, 0] == ends[:-1]).all() and ends[-1] == width)

    def _written(self, node: int, number: int, width: int) -> npt.NDArray[np.int64]:
        """[piece, 2]: columns that the tasks of a node write of a buffer of so many, each from and to."""
        task = self.nodes[node]
        if task.outputs[0] == number and task.op in TILED_OPS and tile(task.params) is not None:
            return self._tiles[node]
        return np.tile(np.array([[0, width]], np.int64), (int(self.sizes[node]), 1))

    def conflicts(self, number: int) -> set[Pair]:
        """Pairs of nodes that an order must hold for a buffer: one writes it, and the other reads or writes it too."""
        writers, readers = self.writers[number], self.readers[number]
        tiled = self.buffers[number].kind is not BufferKind.KV_CACHE and self._is_written_once(number)
        pairs = set() if tiled else {(one, other) for one in writers for other in writers if one < other}
        for writer in writers:
            for reader in readers:
                if reader != writer and not self._is_behind(writer, reader, number):
                    pairs.add((writer, reader))
        if not tiled:  # the tasks of one node are in no order that a wait could hold
            pairs |= {(writer, writer) for writer in writers if self.sizes[writer] > 1}
        return pairs

    def _is_behind(self, writer: int, reader: int, number: int) -> bool:
        """Whether what the writer, a single task, appends to a cache lies behind all that the reader's tasks see."""
        if self.buffers[number].kind is not BufferKind.KV_CACHE:
            return False
        append, task = self.nodes[writer], self.nodes[reader]
        places = tuple([place for place, read in enumerate(task.inputs) if read == number])
        for params in self._params[reader]:
            # Layers are alike: what their tasks share says it of all of them.
            key = task.op, append.op, id(params), id(append.params), places, append.outputs.index(number)
            known = self._behind.get(key)
            if known is None:
                each = replace(task, params=params)
                known = self._behind[key] = all(appends_behind(append, each, place) for place in places)
            if not known:
                return False
        return True

    def between(self, one: int, other: int) -> tuple[set[Wait], set[Wait]] | None:
        """(waits of one node for all of the other, the same the other way round); None where there is neither."""
        found = self._waits(one, other), self._waits(other, one)
        return found if any(found) else None

    def _waits(self, node: int, other: int) -> set[Wait]:
        counter = self.nodes[other].out_counter
        return {
            wait
            for wait in self.nodes[node].waits
            if wait.counter == counter and wait.threshold == self._signals[counter]
        }


def _params(grouping: Grouping) -> list[list[Mapping[str, Any]]]:
    """The params that the tasks of each node have."""
    codes = np.unique(grouping.node_of * len(grouping.params) + grouping.params_of)
    nodes, numbers = np.divmod(codes, len(grouping.params))
    ends = np.searchsorted(nodes, np.arange(len(grouping.firsts) + 1)).tolist()
    params = [grouping.params[number] for number in numbers.tolist()]
    return [params[first:end] for first, end in pairwise(ends)]


def _tiles(grouping: Grouping) -> list[npt.NDArray[np.int64]]:
    """[task, 2] of each node: the columns from n_off on; meaningless where its tasks have none."""
    starts = np.array([each.get("n_off", 0) for each in grouping.params], np.int64)[grouping.params_of]
    sizes = np.array([each.get("N_tile", 0) for each in grouping.params], np.int64)[grouping.params_of]
    order = np.argsort(grouping.node_of, kind="stable")
    bounds = np.searchsorted(grouping.node_of[order], np.arange(len(grouping.firsts) + 1))
    pieces = np.stack([starts, starts + sizes], axis=1)[order]
    return [pieces[first:end] for first, end in pairwise(bounds)]


def shares_pages(program: MegakernelProgram) -> bool:
    """Whether a buffer has memory in common with another one."""
    pages = program.pages.buffer_to_page if program.pages is not None else {}
    return len(set(pages.values())) < len(pages)


def _copies(task: Task, number: int) -> bool:
    """Whether the task writes the buffer by copies, which take bits as they are."""
    if task.op is InstructionKind.COPY:
        return True
    if task.op is not InstructionKind.FUSED:
        return False
    place = task.outputs.index(number)
    targets = ({"out": place}, "final") if place == 0 else ({"out": place},)
    return any(step["op"] == "COPY" and step["out"] in targets for step in task.params["recipe"]["steps"])
