"""A program's demand on a machine, independent of the machine's constants. It is computed once and priced many times
(queues.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.gates import Gates, gates_of
from flywheel.cost_model.units import Ints, Unit, Units, units_of
from flywheel.ir import ABI_MAX_INPUTS, BufferKind, DType, InstructionKind, MegakernelProgram, Runs
from flywheel.ir.operations import OPERATIONS, Effort
from flywheel.ir.recipe import Input, Recipe
from flywheel.plan import KernelVariant
from flywheel.plan.program import brief_plan, queues_of

Marks = npt.NDArray[np.bool_]

STREAMED_KINDS: Final = frozenset({BufferKind.WEIGHT, BufferKind.KV_CACHE, BufferKind.CONST})
"""Kinds of inputs that `est_bytes` counts. All others are activations, read when the task starts."""

_EFFORTS: Final = MappingProxyType({op: row.effort for op, row in OPERATIONS.items()})
_COPY: Final = InstructionKind.COPY
_SUM: Final = InstructionKind.ALLREDUCE_SHARD
_DEQUANT: Final = InstructionKind.DEQUANT
"""Part of the product after it, which makes that product's bytes cost more."""


class Kind(NamedTuple):
    """The facts that determine a task's price: bytes of streamed weights, bytes of caches loaded while it waits, bytes
    of activations read at its start, and operations.

    `flops` of products are those of one row, since other rows use columns of the fragment that are multiplied anyway.
    `readers` tasks read the same data at about the same time. `staged` means that the task before it on its SM
    multiplied the same operand. `sliced` means that it multiplies an input as it is,
    and is priced with the variant's slices. This includes programs for which the packer makes no slices (several rows,
    or hand-offs by counters), since the constants were fitted that way.
    """

    streamed_bytes: int
    cached_bytes: int
    read_bytes: int
    flops: int
    readers: int
    staged: bool
    attends: bool
    sliced: bool
    codes: tuple[DType, ...] = ()
    """Types of the quantised matrices in its products."""
    joined: bool = False
    """It sums the results of several GPUs right after a product on its SM, which does that in its place if its operands
    leave room (vm/pack/adding.py, which has further conditions)."""
    multiplies: bool = False
    """It has a product."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A program's queues, one after the other. Entry `i` of each column is one task.

    `first[sm]..first[sm + 1]` are the entries of an SM. `stream_end` counts bytes from the start of the SM's stream.
    """

    variant: KernelVariant
    task_ids: Ints
    first: Ints
    stream_end: Ints
    kinds: list[Kind]
    kind_of: Ints
    gates: Gates


def demand_of(program: MegakernelProgram) -> Demand:
    """The demand of a program that `validate(strict=True)` accepts.

    Raises ConfigError as `variant_of`, and InvalidProgramError that names the first task without an SM.
    """
    tasks, plan, units = program.tasks, brief_plan(program), units_of(program)
    order, first = queues_of(program)
    works = _works(units, program)
    entries = units.tasks[order]  # numbers among the units of all layers
    unit_of = units.unit_of[entries]
    nbytes = np.array([0 if each.steps.attentions else each.unit.est_bytes for each in works], np.int64)
    ends = np.concatenate(([0], np.cumsum(nbytes[unit_of])))
    kinds, kind_of = _kinds(works, units, entries, unit_of, first)
    by_place = isinstance(tasks, Runs)
    return Demand(
        variant=plan.variant,
        task_ids=order if by_place else np.array([task.id for task in tasks], np.int64)[order],
        first=first,
        stream_end=ends[1:] - np.repeat(ends[first[:-1]], np.diff(first)),
        kinds=kinds,
        kind_of=kind_of,
        gates=gates_of(plan, units, entries),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Counts of a task's steps. `merged` counts heads of partials.

    `parts` maps inputs that are only partly read to their number of read elements. A copy of a part is not a step;
    later steps read the part. `sums` says that the task does nothing but add results of several GPUs.
    """

    products: int
    norms: int
    merged: int
    attentions: int
    parts: Mapping[int, int]
    codes: tuple[DType, ...] = ()
    sums: bool = False


class _UnitWork(NamedTuple):
    """The work of a unit's tasks: their steps, the activations that they read, and their bytes."""

    unit: Unit
    steps: _Steps
    read: tuple[int, ...]
    read_bytes: int


def _works(units: Units, program: MegakernelProgram) -> list[_UnitWork]:
    """The work of each unit."""
    table = program.buffers.spelled if units.layers is not None else program.buffers  # type: ignore[attr-defined]
    buffers = [buffer for buffer in table if buffer.kind not in STREAMED_KINDS]
    dtypes, sizes = {buffer.id: buffer.dtype for buffer in buffers}, {buffer.id: buffer.nbytes for buffer in buffers}
    recipes: dict[Recipe | None, _Steps] = {}
    works = []
    for unit in units.units:
        recipe = unit.params.get("recipe")
        steps = recipes.get(recipe) if unit.op is InstructionKind.FUSED else None
        if steps is None:
            steps = recipes[recipe] = _steps(unit)
        read = tuple([number for number in unit.inputs if number in sizes])
        nbytes = sum([sizes[number] for number in read])
        for place, numel in steps.parts.items():
            number = unit.inputs[place]
            nbytes += dtypes[number].nbytes(numel) - sizes[number] if number in sizes else 0
        works.append(_UnitWork(unit, steps, read, 0 if unit.op is InstructionKind.SAMPLE_ARGMAX else nbytes))
    return works


def _find_staged(operand: Ints, first: Ints) -> Marks:
    """Which entries multiply the same operand as the entry before them on their SM. `operand` numbers operands; -1
    means none."""
    staged = np.zeros(len(operand), np.bool_)
    staged[1:] = (operand[1:] >= 0) & (operand[1:] == operand[:-1])
    staged[first[:-1][np.diff(first) > 0]] = False
    return staged


def _kinds(
    works: Sequence[_UnitWork], units: Units, entries: Ints, unit_of: Ints, first: Ints
) -> tuple[list[Kind], Ints]:
    """(the distinct kinds, the number of each entry's kind)."""
    # Operands are equal if they have the same activations, with the same norms and merges.
    made = [(each.read, (each.steps.norms, each.steps.merged)) if each.steps.products else None for each in works]
    staged = _find_staged(units.numbered(made)[entries], first)
    read = units.numbered([(each.read, ()) for each in works])[entries]
    readers = np.bincount(read[~staged], minlength=int(read.max(initial=0)) + 1)
    most = int(readers.max()) + 1
    # The operands that a product can take in addition, and those that a sum takes: its summands and its result.
    room = np.array([ABI_MAX_INPUTS - len(each.unit.inputs) if each.steps.products else 0 for each in works], np.int64)
    more = np.array([len(each.unit.inputs) + 1 if each.steps.sums else _TABLE for each in works], np.int64)
    joined = more[unit_of] <= _before(room[unit_of], first)
    code = (unit_of * 4 + staged * 2 + joined) * most + readers[read]
    codes, alike = _numbered(code, 4 * most * len(works))
    kinds: dict[Kind, int] = {}
    kind_of = []
    for value in codes.tolist():
        rest, n_readers = divmod(value, most)
        unit, again, added = rest // 4, rest // 2 % 2, rest % 2
        kind = _kind(works[unit], bool(again), n_readers)._replace(joined=bool(added))
        kind_of.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), np.array(kind_of, np.int64)[alike]


def _before(numbers: Ints, first: Ints) -> Ints:
    """The number of the entry before each on its SM; 0 where there is none."""
    before = np.concatenate([[0], numbers[:-1]])
    before[first[:-1][np.diff(first) > 0]] = 0
    return before


def _numbered(code: Ints, bound: int) -> tuple[Ints, Ints]:
    """(distinct codes, sorted; the place of each code among them). All codes are below `bound`."""
    if bound > _TABLE:
        return np.unique(code, return_inverse=True)
    seen = np.zeros(bound, np.bool_)
    seen[code] = True
    codes = np.flatnonzero(seen)
    places = np.empty(bound, np.int64)
    places[codes] = np.arange(len(codes))
    return codes, places[code]


_TABLE: Final = 1 << 22
"""Bound of codes up to which a table is faster than a sort."""


def _kind(work: _UnitWork, staged: bool, readers: int) -> Kind:
    steps, unit = work.steps, work.unit
    return Kind(
        streamed_bytes=0 if steps.attentions else unit.est_bytes,
        cached_bytes=unit.est_bytes if steps.attentions else 0,
        read_bytes=work.read_bytes,
        flops=unit.est_flops // (unit.params.get("M_tile", 1) if steps.products else 1),
        readers=readers,
        staged=staged,
        attends=steps.attentions > 0,
        sliced=steps.products == 1 and not steps.norms and not steps.merged,
        codes=steps.codes,
        multiplies=steps.products > 0,
    )


def _steps(task: Unit) -> _Steps:
    parts: dict[int, int] = {}
    if task.op is InstructionKind.FUSED:
        recipe: Recipe = task.params["recipe"]
        copying = [step for step in recipe.steps if step.op is _COPY]
        working = [step for step in recipe.steps if step.op is not _COPY]
        listed = [(step.op, len(step.args), step.params) for step in working]
        whole = {arg for step in working for arg in step.args}
        sources = [(step.args[0], step.numel) for step in copying]
        parts = {arg.number: numel for arg, numel in sources if isinstance(arg, Input) and arg not in whole}
    else:
        listed = [] if task.op is InstructionKind.NOP else [(task.op, len(task.inputs), task.params)]
    tally = Counter(_EFFORTS[op] for op, _, _ in listed)
    heads = task.params.get("n_heads", 1)
    merging = [each for each in listed if _EFFORTS[each[0]] is Effort.MERGE]
    merged = sum(params.get("n_heads", heads) * operands for _, operands, params in merging)
    codes = tuple(sorted({DType(int(params["qdtype"])) for op, _, params in listed if op is _DEQUANT}))
    sums = [op for op, _, _ in listed] == [_SUM]
    return _Steps(tally[Effort.PRODUCT], tally[Effort.NORM], merged, tally[Effort.ATTENTION], parts, codes, sums)
