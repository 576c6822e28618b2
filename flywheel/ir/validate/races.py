"""Race freedom: every write happens before every read of the same columns, and overlapping writes are ordered.

Tasks share operand and wait records, so one decision per (operands, wait class) covers a whole projection; only where such a
decision fails are single columns compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from flywheel.ir.access import Region, read_regions, written_region
from flywheel.ir.dtype import READONLY_KINDS, BufferKind
from flywheel.ir.order import HappensBefore
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings

WHOLE: Region = (0, 1 << 62)


class Accesses:
    """Who reads and writes what, and in which order. `order` is a topological order of positions."""

    __slots__ = ("_groups", "_users", "first_write", "order", "tasks", "writers")

    def __init__(self, program: MegakernelProgram, order: Sequence[int]) -> None:
        self.tasks = program.tasks
        self.order = HappensBefore(self.tasks, order)
        self.writers: dict[int, list[tuple[int, int, int]]] = {}  # buffer -> (start, end, position), topological
        self.first_write: dict[int, int] = {}
        self._groups: dict[int, set[int]] = {}  # buffer -> wait classes of its writers
        self._users: dict[int, set[int]] = {}  # buffer -> counters that its readers and writers signal
        caches = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.KV_CACHE}
        shared: set[tuple[int, int]] = set()
        wait_class = self.order.wait_class
        for rank, index in enumerate(order):
            task = self.tasks[index]
            counter = task.out_counter
            for slot, buffer in enumerate(task.outputs):
                region = None if slot or buffer in caches else written_region(task)
                start, end = region or WHOLE
                if buffer in self.writers:
                    self.writers[buffer].append((start, end, index))
                    self._groups[buffer].add(wait_class[index])
                    self._users[buffer].add(counter)
                else:
                    self.writers[buffer] = [(start, end, index)]
                    self.first_write[buffer] = rank
                    self._groups[buffer] = {wait_class[index]}
                    self._users.setdefault(buffer, set()).add(counter)
            key = (id(task.inputs), counter)
            if key not in shared:
                shared.add(key)
                for buffer in task.inputs:
                    self._users.setdefault(buffer, set()).add(counter)

    def all_uses_before_writes(self, earlier: int, later: int) -> bool:
        """Whether every task that touches buffer `earlier` happens before every writer of buffer `later`."""
        before = self.order.counter_before
        return all(before(counter, group) for counter in self._users[earlier] for group in self._groups[later])

    def written_before(self, buffer: int, group: int) -> bool:
        """Whether every writer of `buffer` happens before every task of wait class `group`."""
        counters = {self.tasks[index].out_counter for _, _, index in self.writers[buffer]}
        return all(self.order.counter_before(counter, group) for counter in counters)


def check_races(program: MegakernelProgram, accesses: Accesses, findings: Findings) -> None:
    """Order of writes, order of reads, and outputs that nothing writes."""
    buffers = {buffer.id: buffer for buffer in program.buffers}
    disjoint = set()
    for number, writers in accesses.writers.items():
        writers.sort()
        if _check_writes(buffers[number], writers, accesses, findings):
            disjoint.add(number)
        if findings.full:
            return
    transient = {b.id: b for b in program.buffers if b.kind not in READONLY_KINDS}
    wait_class = accesses.order.wait_class
    safe: set[tuple[int, int]] = set()
    settled: dict[tuple[int, int], bool] = {}
    for index, task in enumerate(accesses.tasks):
        group = wait_class[index]
        if (id(task.inputs), group) in safe:
            continue
        clean = True
        for operand, number in enumerate(task.inputs):
            buffer = transient.get(number)
            if buffer is None:
                continue
            if number in accesses.writers:
                key = (number, group)
                if key not in settled:
                    settled[key] = accesses.written_before(number, group)
                if settled[key]:
                    continue
            elif buffer.kind is BufferKind.KV_CACHE:
                continue
            clean = False
            _check_read(index, operand, buffer, accesses, number in disjoint, findings)
        if clean:
            safe.add((id(task.inputs), group))
        elif findings.full:
            return
    for buffer in program.buffers:
        if buffer.kind is BufferKind.IO_OUTPUT and buffer.id not in accesses.writers:
            findings.error("missing-output", f"buffer {buffer.id} ({buffer.name}): nothing writes this output")


def _check_read(
    index: int, operand: int, buffer: Buffer, accesses: Accesses, disjoint: bool, findings: Findings
) -> None:
    task, writers = accesses.tasks[index], accesses.writers.get(buffer.id, [])
    name = f"task {task.id} ({task.label}): reads buffer {buffer.id} ({buffer.name})"
    others = any(writer != index for _, _, writer in writers)
    if not others:
        if buffer.kind is not BufferKind.KV_CACHE:
            findings.error("unwritten-read", f"{name}, which no other task writes", task.id)
        return
    for start, end in read_regions(task, operand) or [WHOLE]:
        for writer in _overlapping(writers, start, end, disjoint):
            if writer != index and not accesses.order.before(accesses.tasks, writer, index):
                other = accesses.tasks[writer]
                findings.error("race-read", f"{name}, not ordered after task {other.id} ({other.label})", task.id)
                return


def _overlapping(writers: list[tuple[int, int, int]], start: int, end: int, disjoint: bool) -> list[int]:
    """Positions of the writers whose columns meet `start`..`end`; `writers` is sorted."""
    last = bisect_right(writers, end - 1, key=lambda writer: writer[0])
    first = max(0, bisect_right(writers, start, key=lambda writer: writer[0]) - 1) if disjoint else 0
    return [index for _, upper, index in writers[first:last] if upper > start]


def _check_writes(
    buffer: Buffer, writers: list[tuple[int, int, int]], accesses: Accesses, findings: Findings
) -> bool:
    """Check that overlapping writers are ordered; True where no two overlap. `writers` is sorted."""
    edge, gap = 0, False
    disjoint = True
    for start, end, _ in writers:
        disjoint = disjoint and start >= edge
        gap = gap or start > edge
        edge = max(edge, end)
    if edge != WHOLE[1] and (gap or edge not in (buffer.shape[-1], buffer.numel, buffer.numel // buffer.shape[0])):
        findings.warn("partial-write", f"buffer {buffer.id} ({buffer.name}): some columns are never written")
    if not disjoint and not _is_chain(writers, accesses):
        _check_pairs(buffer, writers, accesses, findings)
    return disjoint


def _is_chain(writers: list[tuple[int, int, int]], accesses: Accesses) -> bool:
    """Whether all writers are totally ordered, whatever they overlap."""
    tasks, order = accesses.tasks, accesses.order
    line = sorted((order.depth_of(tasks[index].out_counter), index) for _, _, index in writers)
    return all(order.before(tasks, first, second) for (_, first), (_, second) in zip(line, line[1:], strict=False))


def _check_pairs(
    buffer: Buffer, writers: list[tuple[int, int, int]], accesses: Accesses, findings: Findings
) -> None:
    tasks, order = accesses.tasks, accesses.order
    active: list[tuple[int, int]] = []
    for start, end, index in writers:
        active = [(upper, other) for upper, other in active if upper > start]
        for _, other in active:
            if not (order.before(tasks, other, index) or order.before(tasks, index, other)):
                _report_pair(buffer, tasks[other], tasks[index], findings)
                if findings.full:
                    return
        active.append((end, index))


def _report_pair(buffer: Buffer, first: Task, second: Task, findings: Findings) -> None:
    findings.error(
        "race-write",
        f"task {second.id} ({second.label}): writes the same columns of buffer {buffer.id} ({buffer.name}) "
        f"as task {first.id} ({first.label}), in no order",
        second.id,
    )
