"""Race freedom: overlapping writes are ordered, and every read is ordered with every write of the same columns.

The writers of any one column must form a chain. The last writers of all columns are the buffer's *frontier*, so a task
that comes after the frontier comes after all writers. Tasks share operand and wait records, so one decision per
(operands, wait class) covers a projection. Single columns, and the earlier writers of rewritten columns, are checked
only where that decision fails.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flywheel.ir.access import (
    TILED_OPS,
    WHOLE,
    Region,
    first_row_written,
    multi_row_buffers,
    past_rows_end,
    read_regions,
    tile,
    tile_rows,
    uncovered,
    writes_from,
)
from flywheel.ir.dtype import READONLY_KINDS, BufferKind
from flywheel.ir.exchange import is_push, pushed_counters
from flywheel.ir.lanes import cell_written, cells_read, lanes_of_caches
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import TILES
from flywheel.ir.order import HappensBefore
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.rewrites import ReadFault, Stage, Write, read_fault, stages_of

_FUSED = InstructionKind.FUSED


@dataclass(slots=True)
class Frontier:
    """The last writes of a buffer by column, sorted and disjoint, and the counters that they signal.

    `gaps` are columns that no task writes. `stages` are all writers, where columns are written more than once. `chain`
    are the same, by rank, where each writes all columns and comes after the one before.
    """

    writes: list[Write]
    signals: tuple[int, ...]
    gaps: Sequence[Region] = ()
    stages: Sequence[Stage] = ()
    chain: Sequence[Stage] = ()

    def overlapping(self, start: int, end: int) -> list[int]:
        """Positions of the last writers of columns `start`..`end`."""
        first = bisect_right(self.writes, start, key=lambda write: write[1])
        last = bisect_left(self.writes, end, key=lambda write: write[0])
        return [index for _, _, index in self.writes[first:last]]


def _tiled_params(tasks: Sequence[Task]) -> list[Any]:
    """The params of tasks whose op writes tiles; None for others."""
    return [task.params if task.op in TILED_OPS else None for task in tasks]


class Accesses:
    """The readers and writers of each buffer, and their order. `order` is a topological order of positions.

    In the attribute `order`, the writes of a task that comes before another are visible to it. In `done`, such a task
    is only over, on whichever GPU.
    """

    __slots__ = (
        "_first_rows", "_several", "buffers", "done", "lanes", "multi_row", "order", "ranks", "tasks",
        "writes",
    )  # fmt: skip

    def __init__(self, program: MegakernelProgram, order: Sequence[int]) -> None:
        self.tasks = program.tasks
        self.buffers: Mapping[int, Buffer] = {buffer.id: buffer for buffer in program.buffers}
        self._several = program.ranks > 1
        opaque = pushed_counters(self.tasks, self.buffers) if program.ranks > 1 else frozenset[int]()
        self.done = HappensBefore(self.tasks, order)
        self.order = HappensBefore(self.tasks, order, opaque) if opaque else self.done
        self.ranks: Sequence[int] = _ranks(order)
        self.multi_row = multi_row_buffers(self.tasks, self.buffers)
        self.lanes = lanes_of_caches(self.tasks, self.buffers)
        self.writes: dict[int, list[Write]] = {}
        self._first_rows: dict[int, int | None] = {}
        self._collect_writes()

    def _collect_writes(self) -> None:
        regions = {id(None): WHOLE}  # by identity, since the tiles of equal layers share params
        writes, buffers, tasks = self.writes, self.buffers, self.tasks
        for index, outputs, params in zip(
            range(len(tasks)), [task.outputs for task in tasks], _tiled_params(tasks), strict=True
        ):
            identity = id(params)
            region = regions.get(identity)
            if region is None:
                region = regions[identity] = tile(params) or WHOLE
            start, end = region
            for number in outputs:
                if number in writes:
                    writes[number].append((start, end, index))
                else:
                    writes[number] = [(start, end, index)]
                start, end = WHOLE
        for number, entries in writes.items():
            if number in self.multi_row or buffers[number].kind is BufferKind.KV_CACHE:
                writes[number] = [self._widened(number, entry) for entry in entries]

    def _widened(self, number: int, entry: Write) -> Write:
        """A write of a KV cache, or of a buffer of several rows, whose columns do not count. Of a cache of several
        lanes, the cell of the task's lane."""
        task, rows = self.tasks[entry[2]], self.multi_row.get(number)
        if number in self.lanes:
            return (*cell_written(task), entry[2])
        tiles = task.op in TILES
        if task.op is _FUSED and self.buffers[number].kind is not BufferKind.KV_CACHE:
            tiles = tile_rows(task.params) == rows
        return entry if rows and tiles else (*WHOLE, entry[2])

    def width(self, buffer: Buffer) -> int:
        """Columns of a buffer, as its writers count them."""
        if buffer.id in self.lanes:
            return self.lanes[buffer.id]
        return buffer.numel // (self.multi_row.get(buffer.id) or 1)

    def read(self, index: int, operand: int) -> list[Region] | None:
        """The columns of an operand that a task reads; None for all."""
        task = self.tasks[index]
        if self._several and is_push(task):
            return self.pushed(index)
        if task.inputs[operand] in self.lanes:
            return [cells_read(task)]
        return None if task.inputs[operand] in self.multi_row else read_regions(task, operand)

    def pushed(self, index: int) -> list[Region] | None:
        """The columns that a push reads; None for all, where others write its input over another number of rows."""
        params, source = self.tasks[index].params, self.tasks[index].inputs[0]
        columns = tile(params)
        agree = self.multi_row.get(source, 1) == tile_rows(params)
        return [columns] if agree and columns is not None else None

    def tiles(self, index: int) -> list[Region]:
        """Columns that the params of a task name."""
        columns = tile(self.tasks[index].params)
        return [] if columns is None else [columns]

    def first_row(self, cache: int) -> int | None:
        """The first row of a cache that any task may write; None where it may be any row."""
        if cache not in self._first_rows:
            rows = [first_row_written(self.tasks[index], cache) for _, _, index in self.writes[cache]]
            self._first_rows[cache] = None if None in rows else min(rows)  # type: ignore[type-var]
        return self._first_rows[cache]


def check_races(program: MegakernelProgram, accesses: Accesses, findings: Findings) -> None:
    """Check the order of writes, the order of reads, and columns and outputs that no task writes."""
    frontiers: dict[int, Frontier] = {}
    for number, writes in accesses.writes.items():
        frontiers[number] = _frontier(accesses.buffers[number], writes, accesses, findings)
        if findings.errors and findings.full:
            return
    _check_outputs(program.buffers, frontiers, findings)
    wait_class = accesses.order.wait_class
    keys = list(zip([id(task.inputs) for task in accesses.tasks], wait_class, strict=True))
    doubtful = {
        key
        for key, task in dict(zip(keys, accesses.tasks, strict=True)).items()
        if not _all_settled(task, key[1], accesses, frontiers)
    }
    if not doubtful:
        return
    for index, key in enumerate(keys):
        if key in doubtful:
            _check_reads(index, accesses, frontiers, findings)
            if findings.full:
                return


def _check_outputs(buffers: Sequence[Buffer], frontiers: Mapping[int, Frontier], findings: Findings) -> None:
    for buffer in buffers:
        if buffer.kind is BufferKind.IO_OUTPUT:
            if buffer.id not in frontiers:
                findings.error("missing-output", f"buffer {buffer.id} ({buffer.name}): nothing writes this output")
            elif frontiers[buffer.id].gaps:
                _report_gap(buffer, frontiers[buffer.id].gaps[0], None, findings)


def _all_settled(task: Task, group: int, accesses: Accesses, frontiers: Mapping[int, Frontier]) -> bool:
    """Whether everything that the task reads is completely written before any task of wait class `group` starts."""
    for number in task.inputs:
        kind = accesses.buffers[number].kind
        if kind in READONLY_KINDS:
            continue
        frontier = frontiers.get(number)
        if frontier is None:
            if kind is not BufferKind.KV_CACHE:
                return False
        elif frontier.gaps or not accesses.order.reached(frontier.signals, group):
            return False
    return True


def _check_reads(index: int, accesses: Accesses, frontiers: Mapping[int, Frontier], findings: Findings) -> None:
    """Check every read of one task, column by column. A writer of a KV cache may read rows of earlier steps."""
    task = accesses.tasks[index]
    group = accesses.order.wait_class[index]
    for operand, number in enumerate(task.inputs):
        buffer = accesses.buffers[number]
        if buffer.kind in READONLY_KINDS or (buffer.kind is BufferKind.KV_CACHE and number in task.outputs):
            continue
        writes = accesses.writes.get(number, [])
        if not writes or (len(writes) == 1 and writes[0][2] == index):
            if buffer.kind is not BufferKind.KV_CACHE:
                findings.error(
                    "unwritten-read",
                    f"{_reads(accesses, index, buffer)}, which no other task writes",
                    task.id,
                )
            continue
        frontier = frontiers[number]
        if not frontier.gaps and accesses.order.reached(frontier.signals, group):
            continue
        stages = frontier.stages
        if buffer.kind is BufferKind.KV_CACHE:
            tasks, end = accesses.tasks, past_rows_end(task, operand)
            first = accesses.first_row(number) if end is not None else None
            if first is not None and end is not None and end <= first:
                continue
            writes = [write for write in writes if not writes_from(tasks[write[2]], number, end)]
            stages = stages_of(tasks, accesses.order.wait_class, writes)
            if not stages:
                continue
        if stages:
            chain = frontier.chain if stages is frontier.stages else ()
            _check_rewritten(index, accesses.read(index, operand), buffer, stages, chain, accesses, findings)
        else:
            _check_columns(index, accesses.read(index, operand), buffer, frontier, accesses, findings)


def _within(index: int, chain: Sequence[Stage], accesses: Accesses) -> bool:
    """Whether a task comes after one writer of a chain and before the next, and so is ordered with all of them."""
    order, group = accesses.order, accesses.order.wait_class[index]
    place = bisect_left(chain, accesses.ranks[index], key=lambda stage: accesses.ranks[stage.writers[0][2]])
    if not place or not order.reached((chain[place - 1].counter,), group):
        return False
    later = next((stage for stage in chain[place : place + 2] if stage.writers[0][2] != index), None)
    return later is None or order.reached((accesses.tasks[index].out_counter,), later.group)


def _check_rewritten(
    index: int,
    regions: list[Region] | None,
    buffer: Buffer,
    stages: Sequence[Stage],
    chain: Sequence[Stage],
    accesses: Accesses,
    findings: Findings,
) -> None:
    if chain and _within(index, chain, accesses):
        return
    tasks = accesses.tasks
    for region in regions or [WHOLE]:
        fault = read_fault(index, tasks, accesses.order, stages, region, accesses.width(buffer))
        if fault is not None:
            _report_read(index, buffer, fault, accesses, findings)
            return


def _report_read(index: int, buffer: Buffer, fault: ReadFault, accesses: Accesses, findings: Findings) -> None:
    if fault.writer is None:
        _report_gap(buffer, fault.columns, accesses.tasks[index], findings)
        return
    writer = accesses.tasks[fault.writer]
    why = "which only later tasks write, as" if fault.ordered else "not ordered with"
    text = f"{_reads(accesses, index, buffer)}, {why} task {writer.id} ({writer.label})"
    findings.error("race-read", text, accesses.tasks[index].id)


def _check_columns(
    index: int,
    regions: list[Region] | None,
    buffer: Buffer,
    frontier: Frontier,
    accesses: Accesses,
    findings: Findings,
) -> None:
    tasks, order = accesses.tasks, accesses.order
    for start, end in regions or [WHOLE]:
        writers = frontier.overlapping(start, end)
        own = [WHOLE] if index in writers else []
        gap = next((gap for gap in (*frontier.gaps, *own) if gap[0] < end and start < gap[1]), None)
        if gap is not None:
            _report_gap(buffer, gap, tasks[index], findings)
        for writer in writers:
            if writer != index and not order.before(tasks, writer, index):
                other = f"task {tasks[writer].id} ({tasks[writer].label})"
                text = f"{_reads(accesses, index, buffer)}, not ordered after {other}"
                findings.error("race-read", text, tasks[index].id)
                return


def _frontier(buffer: Buffer, writes: list[Write], accesses: Accesses, findings: Findings) -> Frontier:
    """The last write of each column. Unordered writes that overlap are errors."""
    tasks, (_, end, index) = accesses.tasks, writes[0]
    if len(writes) == 1 and end == WHOLE[1]:
        return Frontier(writes, (tasks[index].out_counter,))
    stages: Sequence[Stage] = ()
    chain: Sequence[Stage] = ()
    last = sorted(writes)
    if any(map(_overlap, last, last[1:])):
        stages = stages_of(tasks, accesses.order.wait_class, writes)
        found = len(findings.errors)
        last = _sweep(buffer, sorted(writes, key=lambda write: accesses.ranks[write[2]]), accesses, findings)
        whole = all(start == 0 and end >= accesses.width(buffer) for start, end, _ in writes)
        safe = accesses.order is accesses.done and len(findings.errors) == found  # no counter hides what is before it
        if whole and safe and len(stages) == len(writes):
            chain = sorted(stages, key=lambda stage: accesses.ranks[stage.writers[0][2]])
    signals = tuple(dict.fromkeys([tasks[index].out_counter for _, _, index in last]))
    gaps = uncovered([(start, end) for start, end, _ in last], 0, accesses.width(buffer))
    return Frontier(last, signals, gaps, stages, chain)


def _overlap(first: Write, second: Write) -> bool:
    return second[0] < first[1]


def _sweep(buffer: Buffer, writes: list[Write], accesses: Accesses, findings: Findings) -> list[Write]:
    """Lay `writes` over one another, in topological order. Each must come after all that it covers."""
    tasks, order = accesses.tasks, accesses.order
    top: list[Write] = []
    for start, end, index in writes:
        first = bisect_right(top, start, key=lambda write: write[1])
        last = bisect_left(top, end, key=lambda write: write[0])
        for other in dict.fromkeys(covered for _, _, covered in top[first:last]):
            if not order.before(tasks, other, index):
                _report_pair(buffer, tasks[other], tasks[index], findings)
                if findings.full:
                    return top
        pieces = [(start, end, index)]
        if first < last and top[first][0] < start:
            pieces.insert(0, (top[first][0], start, top[first][2]))
        if first < last and top[last - 1][1] > end:
            pieces.append((end, top[last - 1][1], top[last - 1][2]))
        top[first:last] = pieces
    return top


def _reads(accesses: Accesses, index: int, buffer: Buffer) -> str:
    task = accesses.tasks[index]
    return f"task {task.id} ({task.label}): reads buffer {buffer.id} ({buffer.name})"


def _ranks(order: Sequence[int]) -> Sequence[int]:
    """Rank of each position in `order`."""
    if isinstance(order, range):
        return order
    ranks = [0] * len(order)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def _report_gap(buffer: Buffer, gap: Region, reader: Task | None, findings: Findings) -> None:
    who = "the host" if reader is None else f"task {reader.id} ({reader.label})"
    findings.warn(
        "partial-write",
        f"buffer {buffer.id} ({buffer.name}): {who} reads columns {gap[0]}..{gap[1]}, which nothing writes",
        None if reader is None else reader.id,
    )


def _report_pair(buffer: Buffer, first: Task, second: Task, findings: Findings) -> None:
    findings.error(
        "race-write",
        f"task {second.id} ({second.label}): writes the same columns of buffer {buffer.id} ({buffer.name}) "
        f"as task {first.id} ({first.label}), in no order",
        second.id,
    )
