"""Programs of alike layers: with fewer layers, or with all spelled out. Source: docs/ir.md, "Proof by layers"."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flywheel.ir.compressed.layers import LayeredTable, Layers
from flywheel.ir.compressed.numbered import runs_of
from flywheel.ir.compressed.runs import Run, Runs
from flywheel.ir.dtype import READONLY_KINDS
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter

_ALL: Final = 1 << 62


def layers_of(program: MegakernelProgram) -> Layers | None:
    """The layers that a program's tasks, buffers and counters share; None where they share none."""
    tasks, tables = program.tasks, (program.buffers, program.counters)
    layers = getattr(tasks, "layers", None) if type(tasks) is Runs else None  # `__new__` alone leaves it unset
    if layers is None:
        return None
    shared = all(type(table) is LayeredTable and getattr(table, "layers", None) == layers for table in tables)
    return layers if shared else None


@dataclass(frozen=True, slots=True)
class Brief:
    """The records of a program with the template once; those of the whole program where it has no layers."""

    runs: Sequence[Run]
    buffers: Sequence[Buffer]
    counters: Sequence[Counter]
    layers: Layers | None


def brief_of(program: MegakernelProgram) -> Brief:
    """The records of a program, whatever form they have."""
    tasks, buffers, counters, layers = program.tasks, program.buffers, program.counters, layers_of(program)
    if layers is None:
        return Brief(tasks.runs if isinstance(tasks, Runs) else runs_of(tasks), buffers, counters, None)
    assert isinstance(tasks, Runs)
    assert isinstance(buffers, LayeredTable)
    assert isinstance(counters, LayeredTable)
    return Brief(tasks.spelled, buffers.spelled, counters.spelled, layers)


def local_layers(program: MegakernelProgram) -> Layers | None:
    """A program's layers, if each touches only its own buffers and counters and those of the layer before; else None.

    Then the prologue touches nothing of the template, and the epilogue nothing before the template. Everyone may read
    buffers that nothing writes.
    """
    layers, tasks, buffers = layers_of(program), program.tasks, program.buffers
    if layers is None or not isinstance(tasks, Runs) or not isinstance(buffers, LayeredTable):
        return None
    if tasks.local is None or tasks.local[0] is not buffers:
        tasks.local = buffers, _are_local(tasks.spelled, buffers, layers)
    return layers if tasks.local[1] else None


def _are_local(runs: Sequence[Run], buffers: LayeredTable[Buffer], layers: Layers) -> bool:
    kept = {buffer.id for buffer in buffers.spelled[: layers.buffers.least] if buffer.kind in READONLY_KINDS}
    span, own, signals = layers.runs, layers.buffers, layers.counters
    none = set[int]()
    head = range(own.start), range(signals.start)
    template = range(own.start, own.stop), range(signals.start, signals.stop)
    near = range(own.least, own.stop), range(signals.least, signals.stop)
    tail = range(own.stop, _ALL), range(signals.stop, _ALL)
    last = range(own.start, _ALL), range(signals.start, _ALL)
    parts = runs[: span.start], runs[span.start : span.stop], runs[span.stop :]
    bounds = (head, head, none), (template, near, kept), (tail, last, kept)
    for part, (makes, takes, given) in zip(parts, bounds, strict=True):
        if not all(_makes(run, *makes) and _takes(run, *takes, given) for run in part):
            return False
    return all(_look_alike(run, buffers, kept) for run in parts[1])


def _look_alike(run: Run, buffers: LayeredTable[Buffer], kept: set[int]) -> bool:
    """Whether the buffers that a run of the template reads look the same in every layer as in the first."""
    span, table = buffers.span, buffers.spelled
    before = [number for number in run.inputs if span.least <= number < span.start and number not in kept]
    pairs = [(table[number], table[number + span.size]) for number in before]
    return all(
        (one.kind, one.dtype, one.shape, one.rank) == (other.kind, other.dtype, other.shape, other.rank)
        for one, other in pairs
    )


def _makes(run: Run, buffers: range, counters: range) -> bool:
    """Whether a run writes only these buffers and signals only these counters."""
    return run.out_counter in counters and all(number in buffers for number in run.outputs)


def _takes(run: Run, buffers: range, counters: range, kept: set[int]) -> bool:
    """Whether a run reads only these buffers and those `kept`, and awaits only these counters."""
    awaits = all(wait.counter in counters for wait in run.waits)
    return awaits and all(number in buffers or number in kept for number in run.inputs)


def repeated(program: MegakernelProgram, times: int) -> MegakernelProgram:
    """The program with the template `times` times, all on SM 0 and without pages; unchanged where it has no layers.

    If the template comes once, its records keep the texts of the spelled-out form.
    """
    if layers_of(program) is None:
        return program
    tasks, buffers, counters = program.tasks, program.buffers, program.counters
    assert isinstance(tasks, Runs)
    assert isinstance(buffers, LayeredTable)
    assert isinstance(counters, LayeredTable)
    runs = tasks.spelled if times == 1 else tasks.repeated(times)
    return replace(
        program,
        buffers=buffers.spelled if times == 1 else buffers.repeated(times),
        counters=counters.spelled if times == 1 else counters.repeated(times),
        tasks=Runs(runs, array("q", bytes(8 * sum([len(run.tiles) for run in runs])))),
        pages=None,
    )


def spelled_out(program: MegakernelProgram) -> MegakernelProgram:
    """The same program with the records of all layers."""
    tasks, buffers, counters = program.tasks, program.buffers, program.counters
    return replace(
        program,
        buffers=tuple(buffers) if _has_layers(buffers, LayeredTable) else buffers,
        counters=tuple(counters) if _has_layers(counters, LayeredTable) else counters,
        tasks=Runs(tasks.runs, tasks.sms) if _has_layers(tasks, Runs) else tasks,  # type: ignore[attr-defined]
    )


def _has_layers(table: object, kind: type) -> bool:
    """Whether a table is complete (`__new__` alone leaves all unset) and spells a template once."""
    return type(table) is kind and getattr(table, "layers", None) is not None
