"""Rules for programs of several GPUs: who may touch whose memory, and whether all GPUs run the same exchanges.

Source: docs/ir.md, "Ranks".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from flywheel.ir.access import Region, regions_united, uncovered
from flywheel.ir.exchange import is_push, of_rows, roundings, shards_added, surely_read
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.races import Accesses


def check_places(program: MegakernelProgram, findings: Findings) -> None:
    """Check ranks, remote accesses and remote counters.

    Every rank exists. Only pushes write another GPU's memory. One GPU awaits a counter, and only pushes to that GPU may
    signal it from another one. Tasks have passed the rules of single tasks and of waits.
    """
    _check_ranks(program, findings)
    if program.ranks == 1 or findings.errors:
        return
    buffers = {buffer.id: buffer for buffer in program.buffers}
    homes: dict[int, Task] = {}
    for task in {(id(task.waits), task.rank): task for task in reversed(program.tasks)}.values():
        for wait in task.waits:
            other = homes.setdefault(wait.counter, task)
            if other.rank != task.rank:
                text = f"awaits counter {wait.counter}, as task {other.id} of rank {other.rank} does"
                findings.error("remote-counter", f"{_name(task)} {text}", task.id)
    for task in _distinct(program.tasks):
        _check_task(task, buffers, homes, findings)
        if findings.full:
            return


def _check_ranks(program: MegakernelProgram, findings: Findings) -> None:
    bound = f"is not in 0..{program.ranks - 1}"
    for buffer in program.buffers:
        if buffer.rank >= program.ranks and not findings.full:
            findings.error("rank-range", f"buffer {buffer.id} ({buffer.name}): rank={buffer.rank} {bound}")
    for task in program.tasks:
        if task.rank >= program.ranks and not findings.full:
            findings.error("rank-range", f"task {task.id} ({task.label}): rank={task.rank} {bound}", task.id)
    if program.ranks == 1 or findings.errors:
        return
    idle = sorted({*range(program.ranks)} - {task.rank for task in program.tasks})
    if idle:
        findings.error("rank-range", f"program: ranks={program.ranks}, and rank {idle[0]} has no task")


def _distinct(tasks: Sequence[Task]) -> Sequence[Task]:
    """One task for all tasks with the same op, operands, counter, recipe, column params and rank."""
    keys = [
        (
            t.op, id(t.inputs), id(t.outputs), t.out_counter, t.params.get("recipe"), "n_off" in t.params,
            "N_tile" in t.params, t.params.get("M_tile"), t.rank,
        )
        for t in tasks
    ]  # fmt: skip
    return list(dict(zip(reversed(keys), reversed(tasks), strict=True)).values())[::-1]


def _check_task(task: Task, buffers: Mapping[int, Buffer], homes: Mapping[int, Task], findings: Findings) -> None:
    where = {buffers[number].rank for number in task.outputs}
    away = where - {task.rank}
    if any(buffers[number].rank != task.rank for number in task.inputs):
        far = next(buffers[number] for number in task.inputs if buffers[number].rank != task.rank)
        findings.error("remote-access", f"{_name(task)} reads {_what(far)}", task.id)
    if away and not is_push(task):
        far = next(buffers[number] for number in task.outputs if buffers[number].rank != task.rank)
        findings.error("remote-access", f"{_name(task)} writes {_what(far)}, and is no push", task.id)
    home = homes.get(task.out_counter)
    if home is not None and home.rank not in (where if away else {task.rank}):
        text = f"signals counter {task.out_counter}, which tasks of rank {home.rank} await"
        findings.error("remote-counter", f"{_name(task)} {text}", task.id)


@dataclass(slots=True)
class _BufferPushes:
    """The pushes of one buffer by one rank: columns and target buffers, by destination."""

    source: Buffer
    columns: dict[int, list[Region]] = field(default_factory=dict)
    images: dict[int, list[Buffer]] = field(default_factory=dict)


def check_exchanges(program: MegakernelProgram, accesses: Accesses, findings: Findings) -> None:
    """Check that pushed data is written once and read on its GPU in the same launch, and that all ranks run the same
    exchanges."""
    if program.ranks == 1:
        return
    pushes = [
        index
        for index, task in enumerate(accesses.tasks)
        if task.outputs and accesses.buffers[task.outputs[0]].rank != task.rank
    ]
    arrived = list(dict.fromkeys([accesses.tasks[index].outputs[0] for index in pushes]))
    readers = _readers({*arrived, *(accesses.tasks[index].inputs[0] for index in pushes)}, accesses.tasks)
    for number in arrived:
        _check_arrivals(number, readers.get(number, []), accesses, findings)
        if findings.full:
            return
    exchanges = _exchanges(program.ranks, pushes, arrived, accesses)
    if not findings.errors:
        _check_collectives(exchanges, readers, accesses, findings)


_Readers = Mapping[int, Sequence[tuple[int, int]]]
"""Buffer -> (place of a task that reads it, its operand)."""


def _readers(numbers: Set[int], tasks: Sequence[Task]) -> _Readers:
    found: dict[int, list[tuple[int, int]]] = {}
    for index, task in enumerate(tasks):
        for operand, number in enumerate(task.inputs):
            if number in numbers:
                found.setdefault(number, []).append((index, operand))
    return found


def _check_arrivals(
    number: int, readers: Sequence[tuple[int, int]], accesses: Accesses, findings: Findings
) -> None:
    """Check a buffer that others push into: every element is written once, and pushed elements are awaited and read
    here."""
    tasks, buffer, order = accesses.tasks, accesses.buffers[number], accesses.order
    writes = sorted(accesses.writes[number])
    for first, second in pairwise(writes):
        if second[0] < first[1]:
            text = f"{_name(tasks[second[2]])} writes columns {second[0]}.. of {_what(buffer)}"
            again = f"task {tasks[first[2]].id} ({tasks[first[2]].label})"
            findings.error("push-again", f"{text}, which {again} writes in the same launch", tasks[second[2]].id)
            return
    rows = accesses.multi_row.get(number) or 1
    known: dict[int, list[Region]] = {}  # counter of a push -> elements that tasks after it read
    for start, end, index in writes:
        if tasks[index].rank == buffer.rank:
            continue
        seen = known.get(tasks[index].out_counter)
        if seen is None:
            behind = [each for each in readers if order.before(tasks, index, each[0])]
            seen = regions_united([region for each in behind for region in _read(*each, accesses)])
            known[tasks[index].out_counter] = seen
        pushed = of_rows([(start, end)], rows, buffer.numel) or [(0, buffer.numel)]
        gaps = [gap for region in pushed for gap in uncovered(seen, *region)]
        if gaps:
            text = f"{_name(tasks[index])} pushes elements {gaps[0][0]}..{gaps[0][1]} of {_what(buffer)}"
            findings.error("push-unread", f"{text}, which nothing there awaits and reads", tasks[index].id)
            return


def _read(reader: int, operand: int, accesses: Accesses) -> list[Region]:
    """The elements that a task, or all tiles that it stands for, reads at any position of the program."""
    task = accesses.tasks[reader]
    return surely_read(task, operand, accesses.buffers[task.inputs[operand]].numel, accesses.tiles(reader))


def _exchanges(
    ranks: int, pushes: Sequence[int], arrived: Sequence[int], accesses: Accesses
) -> list[list[_BufferPushes]]:
    """The pushes of each rank, in list order."""
    written: dict[int, list[Region]] = {}
    for number in arrived:
        width = accesses.width(accesses.buffers[number])
        for start, end, index in accesses.writes[number]:
            written.setdefault(index, []).append((start, min(end, width)))
    found: list[dict[int, _BufferPushes]] = [{} for _ in range(ranks)]
    for index in pushes:
        task = accesses.tasks[index]
        source, image = (accesses.buffers[number] for number in (task.inputs[0], task.outputs[0]))
        exchange = found[task.rank].setdefault(source.id, _BufferPushes(source))
        exchange.columns.setdefault(image.rank, []).extend(written[index])
        images = exchange.images.setdefault(image.rank, [])
        if image not in images:
            images.append(image)
    for exchange in [each for by_source in found for each in by_source.values()]:
        exchange.columns = {rank: regions_united(columns) for rank, columns in exchange.columns.items()}
    return [list(by_source.values()) for by_source in found]


def _check_collectives(
    exchanges: Sequence[Sequence[_BufferPushes]], readers: _Readers, accesses: Accesses, findings: Findings
) -> None:
    ranks = len(exchanges)
    counts = [len(each) for each in exchanges]
    if len(set(counts)) > 1:
        findings.error("collective", f"ranks push {', '.join(map(str, counts))} buffers: not the same exchanges")
        return
    for rank, listed in enumerate(exchanges):
        for exchange in listed:
            fault = _fault(exchange, [other for other in range(ranks) if other != rank])
            if fault is not None:
                findings.error("collective", f"rank {rank}: {_what(exchange.source)} {fault}")
    if findings.errors:
        return
    for number, together in enumerate(zip(*exchanges, strict=True)):
        looks = {(each.source.dtype, tuple(each.source.shape)) for each in together}
        if len(looks) > 1:
            shown = ", ".join(_what(each.source) for each in together)
            findings.error("collective", f"exchange {number}: {shown} are not of one shape and dtype")
        else:
            _check_together(number, together, readers, accesses, findings)
        if findings.full:
            return


def _fault(exchange: _BufferPushes, others: Sequence[int]) -> str | None:
    if sorted(exchange.images) != list(others):
        return f"is pushed to ranks {sorted(exchange.images)}, not to {list(others)}"
    if any(len(images) > 1 for images in exchange.images.values()):
        return "is pushed into several buffers of a rank"
    source = exchange.source
    if any((i.dtype, tuple(i.shape)) != (source.dtype, tuple(source.shape)) for (i,) in exchange.images.values()):
        return "is pushed into a buffer of another shape or dtype"
    if any(columns != exchange.columns[others[0]] for columns in exchange.columns.values()):
        return "is pushed in other columns to one rank than to another"
    return None


def _check_together(
    number: int, together: Sequence[_BufferPushes], readers: _Readers, accesses: Accesses, findings: Findings
) -> None:
    """Check one exchange of all ranks: each pushes another part of one whole, or all push summands that are added."""
    ranks = range(len(together))
    shards = [[together[k].source if k == rank else together[k].images[rank][0] for k in ranks] for rank in ranks]
    if all(len({buffer.id for buffer in row}) == 1 for row in shards):
        return  # each gets the whole; other rules check that all is written once
    columns = [next(iter(each.columns.values())) for each in together]
    if any(each != columns[0] for each in columns):
        findings.error("collective", f"exchange {number}: ranks push shards of other columns: {columns[:2]}")
        return
    made: list[set[tuple[object, ...]]] = []
    for rank in ranks:
        made.append(set())
        wanted = tuple([buffer.id for buffer in shards[rank]])
        for index in sorted({index for shard in wanted for index, _ in readers.get(shard, [])}):
            task = accesses.tasks[index]
            if is_push(task):
                continue
            if shards_added(task) != wanted:
                text = f"reads a shard of exchange {number}, and does not add all of them in the order of ranks"
                findings.error("collective", f"{_name(task)} {text}", task.id)
                return
            out = accesses.buffers[task.outputs[0]]
            made[rank].add((out.dtype, tuple(out.shape), roundings(task)))
    if any(each != made[0] for each in made):
        findings.error("collective", f"exchange {number}: sums are of several shapes or dtypes, or rounded differently")


def _name(task: Task) -> str:
    return f"task {task.id} ({task.label}) of rank {task.rank}"


def _what(buffer: Buffer) -> str:
    return f"buffer {buffer.id} ({buffer.name}) of rank {buffer.rank}"
