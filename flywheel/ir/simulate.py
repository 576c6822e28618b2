"""A dynamic check beside the proof: fire tasks in adversarial orders, and look for tasks that hang or read too
early."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Final

from flywheel.ir.access import (
    WHOLE,
    Region,
    appends_behind,
    multi_row_buffers,
    read_regions,
    regions_united,
    tile_rows,
    uncovered,
    written_region,
)
from flywheel.ir.dtype import READONLY_KINDS, BufferKind
from flywheel.ir.firing import fire
from flywheel.ir.lanes import cell_written, cells_read, lanes_of_caches
from flywheel.ir.operations import TILES
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task

_LEAST_ORDERS: Final = 2
_MOST_COMPARED: Final = 2**23
"""Writers of a buffer that a read may meet before the last of them has fired, over all reads and orders: some 5 s of a
core. Reads of real programs come after all writers, and meet none."""


def simulate_counters(program: MegakernelProgram) -> tuple[list[int], list[int]]:
    """(ids in firing order, ids that never fire), ignoring SM queues."""
    order = fire(program.tasks)
    fired = set(order)
    ids = [task.id for task in program.tasks]
    return [ids[index] for index in order], [ids[i] for i in range(len(ids)) if i not in fired]


def simulate_adversarial(program: MegakernelProgram, seeds: int = 16) -> list[str]:
    """The early reads of `try_orders`."""
    return try_orders(program, seeds)[0]


def try_orders(program: MegakernelProgram, seeds: int) -> tuple[list[str], int]:
    """(early reads, each reported once; the number of firing orders that were tried).

    A read is early if no task has written the columns yet, or if a write comes after it in one order and before it in
    another. The first order fires the oldest task first. Of the others, every second one holds back a single writer for
    as long as another task can fire. The rest have random priorities, but for one that fires the newest task first.
    Writers that some reader does not await directly are held back first, those with the fewest waiting tasks before
    others. The program must have passed the checks of operands and params.

    It tries `seeds` orders, but no third or later one once the reads before it met _MOST_COMPARED writers.
    """
    tasks = program.tasks
    watch = _ReadWatch(program)
    suspects = _suspects(tasks, watch.writers)
    seen: dict[str, None] = {}
    for seed in range(seeds):
        if seed >= _LEAST_ORDERS and watch.compared > _MOST_COMPARED:
            return list(seen), seed
        priority = _priority(len(tasks), seed, suspects)
        for message in watch.violations(fire(tasks, priority)):
            seen.setdefault(message)
    return list(seen), seeds


def _priority(count: int, seed: int, suspects: Sequence[int]) -> list[float] | None:
    if seed == 0:
        return None
    generator = random.Random(seed)
    if seed == 2:
        return [-index for index in range(count)]
    priority: list[float] = [generator.random() for _ in range(count)]
    if seed % 2 and suspects:
        # Every other victim is the next most suspicious writer; the rest are random.
        turn = seed // 2
        victim = suspects[turn // 2 % len(suspects)] if turn % 2 == 0 else generator.choice(suspects)
        priority[victim] = inf
    return priority


def _suspects(tasks: Sequence[Task], writers: Mapping[int, Sequence[int]]) -> list[int]:
    """Writers, with the most suspicious first."""
    waiters = Counter(wait.counter for task in tasks for wait in task.waits)
    direct: dict[int, set[int]] = {}
    for task in tasks:
        awaited = {wait.counter for wait in task.waits}
        for buffer in task.inputs:
            direct[buffer] = awaited if buffer not in direct else direct[buffer] & awaited
    everyone = {index for members in writers.values() for index in members}
    doubtful = {
        index
        for buffer, members in writers.items()
        for index in members
        if tasks[index].out_counter not in direct.get(buffer, ())
    }
    return sorted(doubtful or everyone, key=lambda index: (waiters[tasks[index].out_counter], index))


class _ReadWatch:
    """Checks that enough is written before each read, and the same in every order."""

    __slots__ = (
        "_caches", "_first", "_lanes", "_multi_row", "_program", "_read", "_sizes", "_written", "compared", "writers",
    )  # fmt: skip

    def __init__(self, program: MegakernelProgram) -> None:
        self._program = program
        buffers: dict[int, Buffer] = {buffer.id: buffer for buffer in program.buffers}
        self._caches = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.KV_CACHE}
        self._sizes = {number: buffer.numel for number, buffer in buffers.items()}
        self._multi_row = multi_row_buffers(program.tasks, buffers)
        self._lanes = lanes_of_caches(program.tasks, buffers)
        self._first: dict[tuple[int, int], list[int]] | None = None
        self._read: dict[tuple[int, int], list[Region] | None] = {}
        self._written: dict[tuple[int, int], Region] = {}
        self.writers: dict[int, list[int]] = {}
        self.compared = 0
        for index, task in enumerate(program.tasks):
            for number in task.outputs:
                self.writers.setdefault(number, []).append(index)

    def violations(self, order: Sequence[int]) -> list[str]:
        """A message for each early read of `order`: one before the first write of its columns, or before other writers
        than in the first order given."""
        late, found = self._late(order)
        first = self._first = late if self._first is None else self._first
        tasks = self._program.tasks
        for index, operand in dict.fromkeys((*late, *first)):
            here, there = late.get((index, operand), []), first.get((index, operand), [])
            if here != there:
                task, (writer, *_) = tasks[index], sorted({*here} ^ {*there})
                text = f"reads buffer {task.inputs[operand]} before task {tasks[writer].id} writes it"
                found.append(f"task {task.id} ({task.label}): {text}")
        return found

    def _late(self, order: Sequence[int]) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
        """(writers that fire after a read, by reader and operand; messages of reads before the first write)."""
        tasks = self._program.tasks
        kinds = {buffer.id: buffer.kind for buffer in self._program.buffers}
        left = {number: len(members) for number, members in self.writers.items()}
        fired: set[int] = set()
        late, found = {}, []
        for index in order:
            task = tasks[index]
            for operand, number in enumerate(task.inputs):
                if kinds[number] in READONLY_KINDS or not left.get(number, 1):
                    continue
                others = [writer for writer in self.writers.get(number, ()) if writer != index]
                if kinds[number] is BufferKind.KV_CACHE and (not others or number in task.outputs):
                    continue
                reads = f"task {task.id} ({task.label}): reads buffer {number}"
                if not others:
                    found.append(f"{reads}, which nothing else writes")
                    continue
                behind = [w for w in others if w not in fired and self._overlap(w, index, operand)]
                self.compared += len(others)
                if behind:
                    late[index, operand] = behind
                    missed = self._missed(behind, fired.intersection(others), index, operand)
                    if missed is not None:
                        found.append(f"{reads} before task {tasks[missed].id} writes it")
            fired.add(index)
            for number in task.outputs:
                left[number] -= 1
        return late, found

    def _missed(self, late: Sequence[int], early: Collection[int], reader: int, operand: int) -> int | None:
        """A late writer of columns that the reader reads and no early writer has written."""
        number = self._program.tasks[reader].inputs[operand]
        written = regions_united([self._columns(writer, number) for writer in early])
        for writer in late:
            first, last = self._columns(writer, number)
            for start, end in self._regions(reader, operand) or [WHOLE]:
                if uncovered(written, max(first, start), min(last, end)):
                    return writer
        return None

    def _columns(self, writer: int, number: int) -> Region:
        """The columns of a buffer that a task writes, computed once."""
        found = self._written.get((writer, number))
        if found is None:
            found = self._written[writer, number] = self._find_columns(writer, number)
        return found

    def _find_columns(self, writer: int, number: int) -> Region:
        task, rows = self._program.tasks[writer], self._multi_row.get(number, 1)
        if number in self._lanes:
            return cell_written(task)
        counts = task.outputs[0] == number and rows is not None
        if counts and number in self._multi_row and task.op not in TILES:
            counts = tile_rows(task.params) == rows
        return (written_region(task) if counts else None) or (0, self._sizes[number] // (rows or 1))

    def _overlap(self, writer: int, reader: int, operand: int) -> bool:
        """Whether `writer` writes something of the operand that `reader` reads."""
        tasks = self._program.tasks
        number = tasks[reader].inputs[operand]
        if number in self._lanes:
            return cell_written(tasks[writer])[0] < cells_read(tasks[reader])[1]
        if number in self._caches and appends_behind(tasks[writer], tasks[reader], operand):
            return False
        written = written_region(tasks[writer]) if tasks[writer].outputs[0] == number else None
        regions = self._regions(reader, operand)
        if written is None or regions is None:
            return True
        return any(start < written[1] and written[0] < end for start, end in regions)

    def _regions(self, reader: int, operand: int) -> list[Region] | None:
        """The columns of an operand that a task reads, computed once; None for all."""
        key = reader, operand
        if key not in self._read:
            self._read[key] = self._find_regions(reader, operand)
        return self._read[key]

    def _find_regions(self, reader: int, operand: int) -> list[Region] | None:
        task = self._program.tasks[reader]
        if task.inputs[operand] in self._lanes:
            return [cells_read(task)]
        return None if task.inputs[operand] in self._multi_row else read_regions(task, operand)
