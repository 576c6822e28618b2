"""Hand-offs by the data: the activations that readers can wait for themselves, and the counters that are then unused.

An awaited buffer has memory of its own. A task that never reads the buffer writes each of its elements, once a launch.
An element's bits are all ones until it is written, and no kernel stores that pattern. So a reader polls the element
until it is there, without a fence or a counter. Source: docs/vm.md, "Hand-offs".

Other buffers keep their waits. A wait stays if it orders two tasks of which one writes memory that the other reads or
writes. No buffer is awaited if two such tasks are ordered through other tasks only, without a wait between them. No
buffer is awaited either if buffers share memory: a reader of one buffer would then have to come before a writer of
another. In the program's order, which has no cycle, a reader of an awaited buffer comes after its writer. So no task
waits for data that a later task writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np

from flywheel.ir import COMPUTE_DTYPES, Buffer, BufferKind, InstructionKind, MegakernelProgram, Task, Wait
from flywheel.ir.access import TILED_OPS, first_row_written, multi_row_buffers, past_rows_end, tile
from flywheel.ir.compressed import Stretch
from flywheel.ir.lanes import lanes_of_caches
from flywheel.ir.recipe import Output, Recipe, recipe_steps
from flywheel.plan.nodes import Grouping

_GIVEN: Final = (BufferKind.WEIGHT, BufferKind.CONST, BufferKind.IO_INPUT)

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HandOffs:
    """The rows of the awaited buffers, each node's remaining waits, and the counters that these waits read."""

    awaited: frozenset[int]
    waits: tuple[tuple[Wait, ...], ...]
    counters: frozenset[int]


def by_counters(program: MegakernelProgram, grouping: Grouping) -> HandOffs:
    """Hand-offs by counters: every wait of the program stays."""
    waits = tuple(tuple(task.waits) for task in grouping.firsts)
    return HandOffs(frozenset(), waits, frozenset(counter.id for counter in program.counters))


def by_data(
    program: MegakernelProgram,
    grouping: Grouping,
    exchanged: Set[int] = frozenset(),
    sampled: Set[int] = frozenset(),
) -> HandOffs:
    """Hand-offs by data polling where possible, for a program that `validate(strict=True)` accepts. Waits that
    polling makes unnecessary are left out.

    A reader of a buffer in `exchanged` always polls the data. If the buffer is also in `sampled`, the reader also waits
    for the tasks that write it on this GPU.
    """
    found = None if shares_pages(program) else _awaited(program, grouping, exchanged, sampled)
    if found is None:
        return by_counters(program, grouping)
    awaited, left = found
    rows = frozenset(row for row, buffer in enumerate(program.buffers) if buffer.id in awaited)
    return HandOffs(rows, left, frozenset(wait.counter for waits in left for wait in waits))


def _awaited(
    program: MegakernelProgram, grouping: Grouping, exchanged: Set[int], sampled: Set[int]
) -> tuple[set[int], tuple[tuple[Wait, ...], ...]] | None:
    """(awaited buffers, remaining waits of each node) of a program whose buffers share no memory. None if hand-offs
    must use counters."""
    accesses = _NodeAccesses(program, grouping)
    awaited = {number for number in accesses.writers if accesses.can_be_awaited(number)}
    ordered: set[Pair] = set()
    for number in accesses.writers.keys() - awaited - exchanged:
        ordered |= accesses.conflicts(number)
    for number in sampled & exchanged:
        ordered |= set(product(accesses.writers[number], accesses.readers[number]))
    kept = {pair: waits for pair in ordered if (waits := accesses.between(*pair))}
    if not awaited or kept.keys() != ordered:
        return None
    needed: dict[int, set[Wait]] = defaultdict(set)
    for (one, other), (waits_of_one, waits_of_other) in kept.items():
        needed[one] |= waits_of_one
        needed[other] |= waits_of_other
    left = tuple([
        tuple([wait for wait in task.waits if wait in needed[node]]) if node in needed else ()
        for node, task in enumerate(grouping.firsts)
    ])  # fmt: skip
    return awaited, left


class _NodeAccesses:
    """The writers and readers of each buffer, by node."""

    def __init__(self, program: MegakernelProgram, grouping: Grouping) -> None:
        self.buffers: Mapping[int, Buffer] = {buffer.id: buffer for buffer in program.buffers}
        self.tasks, self.columns = grouping.firsts, columns_of(grouping)
        self.params = [[each.params for each in stretches] for stretches in grouping.stretches]
        self.sizes: Sequence[int] = np.bincount(grouping.node_of, minlength=len(self.tasks)).tolist()
        self._rows = multi_row_buffers(self.tasks, self.buffers)
        self._lanes = lanes_of_caches(self.tasks, self.buffers)
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        self._signals: dict[int, int] = defaultdict(int)
        given = {number for number, buffer in self.buffers.items() if buffer.kind in _GIVEN}
        for node, (task, size) in enumerate(zip(self.tasks, self.sizes, strict=True)):
            self._signals[task.out_counter] += size
            for number in task.outputs:
                self.writers[number].append(node)
            for number in task.inputs:
                if number not in given:
                    self.readers[number].append(node)

    def can_be_awaited(self, number: int) -> bool:
        """Whether the buffer meets the module's conditions for an awaited buffer."""
        buffer = self.buffers[number]
        if buffer.kind is not BufferKind.ACTIVATION or buffer.dtype not in COMPUTE_DTYPES:
            return False
        writers = self.writers[number]
        if not set(writers).isdisjoint(self.readers[number]):
            return False
        return not any(copies(self.tasks[node], number) for node in writers) and self._is_written_once(number)

    def _is_written_once(self, number: int) -> bool:
        rows = self._rows.get(number, 1)
        if rows is None:
            return False
        width = self.buffers[number].numel // rows
        pieces = [piece for node in self.writers[number] for piece in self._written(node, number, width)]
        edge = 0
        for start, end in sorted(pieces):
            if start != edge:
                return False
            edge = end
        return edge == width

    def _written(self, node: int, number: int, width: int) -> Sequence[Pair]:
        """The columns (start, end) that a node's tasks write of a buffer of `width` columns."""
        task = self.tasks[node]
        if task.outputs[0] == number and task.op in TILED_OPS and tile(task.params) is not None:
            return self.columns[node]
        return [(0, width)] * self.sizes[node]

    def conflicts(self, number: int) -> set[Pair]:
        """Pairs of nodes that an order must hold for a buffer: one writes it, and the other reads or writes it too."""
        if number in self._lanes:
            return self._conflicts_of_lanes(number)
        writers, readers = self.writers[number], self.readers[number]
        cache = self.buffers[number].kind is BufferKind.KV_CACHE
        tiled = not cache and self._is_written_once(number)
        pairs = set() if tiled else {(one, other) for one in writers for other in writers if one < other}
        ends = [self._end_read(reader, number) for reader in readers] if cache else [None] * len(readers)
        for writer in writers:
            row = first_row_written(self.tasks[writer], number) if cache else None
            for reader, end in zip(readers, ends, strict=True):
                if reader != writer and (row is None or end is None or end > row):
                    pairs.add((writer, reader))
        if not tiled:  # no wait orders the tasks of one node
            pairs |= {(writer, writer) for writer in writers if self.sizes[writer] > 1}
        return pairs

    def _conflicts_of_lanes(self, number: int) -> set[Pair]:
        """`conflicts` for a cache of several lanes: an attention reads what its lane and the lanes before it append."""
        writers = self.writers[number]
        lanes = {node: {each.get("lane", 0) for each in self.params[node]} for node in writers}
        pairs = {(one, other) for one in writers for other in writers if one < other and lanes[one] & lanes[other]}
        for reader in set(self.readers[number]) - lanes.keys():
            last = max(each.get("lane", 0) for each in self.params[reader])
            pairs |= {(writer, reader) for writer in writers if min(lanes[writer]) <= last}
        return pairs | {(writer, writer) for writer in writers if self.sizes[writer] > 1}

    def _end_read(self, reader: int, number: int) -> int | None:
        """The row of a cache before which the reader's tasks stop reading; None where they may read any row."""
        task = self.tasks[reader]
        ends = [
            past_rows_end(task if params is task.params else replace(task, params=params), place)
            for place, read in enumerate(task.inputs)
            if read == number
            for params in self.params[reader]
        ]
        return None if None in ends else max(ends)  # type: ignore[type-var]

    def between(self, one: int, other: int) -> tuple[set[Wait], set[Wait]] | None:
        """(waits of node `one` for all of `other`, waits of `other` for all of `one`); None where there are none."""
        found = self._waits(one, other), self._waits(other, one)
        return found if any(found) else None

    def _waits(self, node: int, other: int) -> set[Wait]:
        counter = self.tasks[other].out_counter
        return {
            wait
            for wait in self.tasks[node].waits
            if wait.counter == counter and wait.threshold == self._signals[counter]
        }


def columns_of(grouping: Grouping) -> list[list[Pair]]:
    """The sorted columns of each node's tasks, adjacent ranges merged; meaningless where the tasks have none."""
    return [_merged(sorted(map(_columns, stretches))) for stretches in grouping.stretches]


def _columns(stretch: Stretch) -> Pair:
    start = stretch.params.get("n_off", 0)
    return start, start + stretch.params.get("N_tile", 0) * stretch.n_tiles


def _merged(ranges: Sequence[Pair]) -> list[Pair]:
    found: list[Pair] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, end))
    return found


def shares_pages(program: MegakernelProgram) -> bool:
    """Whether two buffers share memory."""
    pages = program.pages.buffer_to_page if program.pages is not None else {}
    return len(set(pages.values())) < len(pages)


def sampled_of(tasks: Sequence[Task]) -> frozenset[int]:
    """Buffers from which a task takes the largest element of a row."""
    found: set[int] = set()
    for task in tasks:
        steps = recipe_steps(task)
        if (steps[-1] if steps else task).op is InstructionKind.SAMPLE_ARGMAX:
            found.update(task.inputs)
    return frozenset(found)


def copies(task: Task, number: int) -> bool:
    """Whether the task writes the buffer by COPY, which can store any bits."""
    if task.op is InstructionKind.COPY:
        return True
    return task.op is InstructionKind.FUSED and task.outputs.index(number) in _copied(task.params["recipe"])


@lru_cache(maxsize=1 << 10)
def _copied(recipe: Recipe) -> frozenset[int]:
    """The outputs that COPY steps write."""
    return frozenset([
        step.out.number
        for step in recipe.steps
        if step.op is InstructionKind.COPY and isinstance(step.out, Output)
    ])  # fmt: skip
