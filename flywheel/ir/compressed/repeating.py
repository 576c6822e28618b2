"""Programs of alike layers: with fewer layers, or with all spelled out. Source: docs/ir.md, "Proof by layers"."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from flywheel.ir.compressed.layers import NO_LAYERS, LayeredTable, Layers
from flywheel.ir.compressed.runs import NO_SM, Run, Runs, grouped
from flywheel.ir.dtype import READONLY_KINDS
from flywheel.ir.program import MegakernelProgram, once
from flywheel.ir.records import Buffer, Counter

_ALL: Final = 1 << 62


@once
def runs_of(program: MegakernelProgram) -> Sequence[Run]:
    """A program's runs, of all layers: adjacent tasks that differ only in params, costs, id and SM."""
    return program.tasks.runs if isinstance(program.tasks, Runs) else grouped(program.tasks)


@once
def as_runs(program: MegakernelProgram) -> Runs:
    """A program's tasks as runs. Raises ValueError where an SM or an id is no int of 64 bits."""
    tasks = program.tasks
    if isinstance(tasks, Runs):
        return tasks
    sms = [NO_SM if task.sm is None else task.sm for task in tasks]
    return Runs(runs_of(program), sms, ids=[task.id for task in tasks])


def brief_runs(program: MegakernelProgram) -> tuple[Sequence[Run], Layers]:
    """A program's runs with the template once, and the layers of its tasks; all runs and NO_LAYERS where they have
    none."""
    tasks = program.tasks
    return (tasks.spelled, tasks.layers) if isinstance(tasks, Runs) else (runs_of(program), NO_LAYERS)


def layers_of(program: MegakernelProgram) -> Layers:
    """The layers that a program's tasks, buffers and counters share; NO_LAYERS where they share none."""
    tasks, tables = program.tasks, (program.buffers, program.counters)
    # An object made by `__new__` alone lacks them.
    layers: Layers = getattr(tasks, "layers", NO_LAYERS) if type(tasks) is Runs else NO_LAYERS
    shared = all(type(table) is LayeredTable and getattr(table, "layers", None) == layers for table in tables)
    return layers if shared else NO_LAYERS


@dataclass(frozen=True, slots=True)
class Brief:
    """The records of a program with the template once; those of the whole program where it has no layers."""

    runs: Sequence[Run]
    buffers: Sequence[Buffer]
    counters: Sequence[Counter]
    layers: Layers
    """NO_LAYERS where it has none."""

    @property
    def parts(self) -> tuple[Sequence[Run], Sequence[Run], Sequence[Run]]:
        """The runs before the template, in it, and behind it."""
        span = self.layers.runs
        return self.runs[: span.start], self.runs[span.start : span.stop], self.runs[span.stop :]


def brief_of(program: MegakernelProgram, local: bool = False) -> Brief:
    """The records of a program, whatever form they have. With `local`, only local layers count as such."""
    tasks, buffers, counters = program.tasks, program.buffers, program.counters
    layers = local_layers(program) if local else layers_of(program)
    if layers is NO_LAYERS:
        return Brief(runs_of(program), buffers, counters, NO_LAYERS)
    assert isinstance(tasks, Runs)
    assert isinstance(buffers, LayeredTable)
    assert isinstance(counters, LayeredTable)
    return Brief(tasks.spelled, buffers.spelled, counters.spelled, layers)


def local_layers(program: MegakernelProgram) -> Layers:
    """A program's layers, if each touches only its own buffers and counters and those of the layer before; else
    NO_LAYERS.

    Then the prologue touches nothing of the template, and the epilogue nothing before the template. Everyone may read
    buffers that nothing writes.
    """
    layers, tasks, buffers = layers_of(program), program.tasks, program.buffers
    if layers is NO_LAYERS:
        return layers
    assert isinstance(tasks, Runs)
    assert isinstance(buffers, LayeredTable)
    if tasks.local is None or tasks.local[0] is not buffers:
        tasks.local = buffers, _are_local(tasks.spelled, buffers, layers)
    return layers if tasks.local[1] else NO_LAYERS


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
    if layers_of(program) is NO_LAYERS:
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
    """The same program with the records of all layers; the same object where it has them already."""
    found: dict[str, Any] = {}
    for name in ("buffers", "counters"):
        if _has_layers(table := getattr(program, name), LayeredTable):
            found[name] = tuple(table)
    if _has_layers(tasks := program.tasks, Runs):
        found["tasks"] = Runs(tasks.runs, tasks.sms)  # type: ignore[attr-defined]
    return replace(program, **found) if found else program


def _has_layers(table: object, kind: type) -> bool:
    """Whether a table is complete (`__new__` alone leaves all unset) and spells a template once."""
    return type(table) is kind and getattr(table, "layers", NO_LAYERS) is not NO_LAYERS
