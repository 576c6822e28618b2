"""The weight floor: the time of a decode step that only reads its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from flywheel.ir.alone import alone
from flywheel.ir.compressed import NO_LAYERS, Brief, brief_of, spelled_out, tasks_by_recipe
from flywheel.ir.dtype import BufferKind
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import GATHERS
from flywheel.ir.program import MegakernelProgram, once
from flywheel.ir.recipe import Arg, Input, recipe_steps
from flywheel.ir.records import Buffer, Task
from flywheel.ir.target import GpuTarget
from flywheel.ir.window import first_row

_IdSource = tuple[int, int | None]
"""The source of an EMBED's ids: (buffer, None), or (task, recipe step)."""


@once
def weight_bytes_read(program: MegakernelProgram) -> int:
    """The bytes of weights that one step must read from HBM; with several GPUs, those of the GPU that reads most.

    Each WEIGHT buffer that a task reads counts once, as a whole. A buffer that is only an EMBED's table counts one row
    (`shape[-1]` elements) for each id, and equal ids once, however many tiles gather by them. `program` must be valid.
    """
    if program.ranks > 1:
        return max(weight_bytes_read(alone(program, rank)) for rank in range(program.ranks))
    brief = brief_of(program, local=True)
    layers = brief.layers
    table = {buffer.id: buffer for buffer in brief.buffers}
    readers: Sequence[Task] = list(tasks_by_recipe(brief.runs, _weights(table)))
    gathers = any(map(_gathers, readers))
    if layers is NO_LAYERS:
        # A task that gathers may make ids of its own.
        whole, gathered = _weights_read(program.tasks if gathers else readers, table)
        return sum(whole.values()) + gathered
    if gathers or _reads_by_ids_or_back(brief, _weights(table)):
        return weight_bytes_read(spelled_out(program))
    whole, gathered = _weights_read(readers, table)
    own = sum([nbytes for number, nbytes in whole.items() if layers.buffers.start <= number < layers.buffers.stop])
    return sum(whole.values()) + gathered + (layers.times - 1) * own


def _reads_by_ids_or_back(brief: Brief, weights: Set[int]) -> bool:
    """Whether the bytes that all layers read are not a multiple of one layer's: the template gathers rows, or it or the
    epilogue reads weights of the layer before."""
    span = brief.layers.buffers
    before, own = range(span.least, span.start), range(span.start, span.stop)
    _, template, behind = brief.parts
    return any(
        run.op in GATHERS or any(number in before and number in weights for number in run.inputs)
        for run in template
    ) or any(number in own and number in weights for run in behind for number in run.inputs)


def _weights(buffers: Mapping[int, Buffer]) -> Set[int]:
    return {number for number, buffer in buffers.items() if buffer.kind is BufferKind.WEIGHT}


def _weights_read(tasks: Iterable[Task], buffers: Mapping[int, Buffer]) -> tuple[dict[int, int], int]:
    """(bytes of each buffer that is read as a whole, bytes of rows of all others)."""
    weights = _weights(buffers)
    whole: dict[int, None] = {}
    gathered: dict[int, dict[_IdSource, int]] = {}
    settled: set[tuple[int, ...]] = set()  # operands with all weights in `whole`
    for task in tasks:
        operands = tuple(task.inputs)
        if operands in settled:
            continue
        if not any(read in weights and read not in whole for read in operands):
            settled.add(operands)
            continue
        for read, ids in _reads(task, buffers):
            if read not in weights:
                continue
            if ids is None:
                whole[read] = None
            else:
                gathered.setdefault(read, {}).update(ids)
    rows = {table: sum(ids.values()) for table, ids in gathered.items() if table not in whole}
    return {number: buffers[number].nbytes for number in whole}, sum(
        _row_bytes(buffers[table], count) for table, count in rows.items()
    )


def cache_bytes_read(program: MegakernelProgram) -> int:
    """The bytes of keys and values that one step at the last position reads: of layers with a window, those of the rows
    in sight. With several GPUs, those of one of them, which share the heads."""
    brief = brief_of(program)
    caches = {buffer.id: buffer for buffer in brief.buffers if buffer.kind is BufferKind.KV_CACHE}
    seen: dict[int, tuple[int, int]] = {}  # the rows in sight of a window
    for run in brief.runs:
        touched = caches.keys() & set(run.inputs)
        for params in [each.params for each in run.tiles.stretches] if touched else ():
            if "window" in params:
                rows = first_row(params), params["pos"] + 1
                seen |= {number: _united(rows, seen.get(number, rows)) for number in touched}
    read = {number: each.nbytes for number, each in caches.items()}
    read |= {number: read[number] // caches[number].shape[0] * (end - first) for number, (first, end) in seen.items()}
    own = range(brief.layers.buffers.start, brief.layers.buffers.stop)
    again = (brief.layers.times - 1) * sum([read.get(number, 0) for number in own])
    return (sum(read.values()) + again) // program.ranks


def _united(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return min(one[0], other[0]), max(one[1], other[1])


def floor_us(weight_bytes: int, target: GpuTarget) -> float:
    """The time in us that `target` takes to read `weight_bytes` at its datasheet bandwidth."""
    return target.bandwidth_bound_us(weight_bytes)


def floor_fraction(floor_us: float, latency_us: float) -> float:
    """Floor over latency: 1.0 at the floor, and lower for a slower launch."""
    return floor_us / latency_us


def _row_bytes(table: Buffer, rows: int) -> int:
    return min(table.nbytes, table.dtype.nbytes(rows * table.shape[-1]))


def _reads(task: Task, buffers: Mapping[int, Buffer]) -> Iterator[tuple[int, dict[_IdSource, int] | None]]:
    """(buffer read, number of rows by the source of their ids); None for rows where the buffer is read as a whole."""
    if task.op is InstructionKind.FUSED:
        yield from _recipe_reads(task, buffers)
    elif task.op in GATHERS:
        ids, table = task.inputs
        yield ids, None
        yield table, {(ids, None): buffers[ids].numel}
    else:
        for read in task.inputs:
            yield read, None


def _recipe_reads(task: Task, buffers: Mapping[int, Buffer]) -> Iterator[tuple[int, dict[_IdSource, int] | None]]:
    for step in recipe_steps(task):
        for place, arg in enumerate(step.args):
            if isinstance(arg, Input):
                gathers = step.op in GATHERS and place == 1
                yield task.inputs[arg.number], _recipe_ids(task, step.args[0], buffers) if gathers else None


def _recipe_ids(task: Task, arg: Arg, buffers: Mapping[int, Buffer]) -> dict[_IdSource, int]:
    if isinstance(arg, Input):
        ids = task.inputs[arg.number]
        return {(ids, None): buffers[ids].numel}
    made = next(step for step in recipe_steps(task) if step.out == arg)
    return {(task.id, arg.number): made.numel}


def _gathers(task: Task) -> bool:
    """Whether a task has a recipe that gathers rows."""
    return any(step.op in GATHERS for step in recipe_steps(task))
