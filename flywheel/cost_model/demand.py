"""A program's demand on a machine, independent of the machine's constants. It is computed once and priced many times
(queues.py)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.gates import Gates, gates_of
from flywheel.cost_model.units import Ints, Unit, Units, units_of
from flywheel.ir import BufferKind, DType, InstructionKind, MegakernelProgram
from flywheel.ir.compressed import NO_LAYERS, as_runs, local_layers
from flywheel.ir.operations import ATTENTIONS, PRODUCTS
from flywheel.ir.recipe import Input, Recipe
from flywheel.plan import KernelVariant
from flywheel.plan.program import Plan, brief_plan, brief_rank_plans, queues_of, rank_plans
from flywheel.plan.routine import StagedValue
from flywheel.plan.routines import Routines
from flywheel.plan.sharing import find_staged

Bools = npt.NDArray[np.bool_]

STREAMED_KINDS: Final = frozenset({BufferKind.WEIGHT, BufferKind.KV_CACHE, BufferKind.CONST})
"""Kinds of inputs that `est_bytes` counts. All others are activations, read when the task starts."""

_COPY: Final = InstructionKind.COPY
_DEQUANT: Final = InstructionKind.DEQUANT
"""Part of the product after it, which makes that product's bytes cost more."""


class Kind(NamedTuple):
    """The facts that determine a task's price: bytes of weights, or of caches, that are streamed; bytes of caches that
    it attends to, which are loaded while it waits unless they are streamed; bytes of activations read at its start; and
    operations.

    `flops` of products are those of one row, since other rows use columns of the fragment that are multiplied anyway.
    `readers` tasks read the same data at about the same time. `staged` means that the task before it on its SM left
    its operand staged. `slices` is the number of slices in which it multiplies an input.
    """

    streamed_bytes: int
    cached_bytes: int
    read_bytes: int
    flops: int
    readers: int
    staged: bool
    attends: bool
    slices: int = 1
    codes: tuple[DType, ...] = ()
    """Types of the quantised matrices in its products."""
    added: bool = False
    """The product before it on its SM adds what it would add (plan/adding.py)."""
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
    """The demand of a program of one GPU that `validate(strict=True)` accepts.

    Raises ConfigError as `variant_of`, and InvalidProgramError that names the first task without an SM.
    """
    return _planned_demand(program, brief_plan(program))


def part_demand(program: MegakernelProgram, rank: int, part: MegakernelProgram) -> Demand:
    """The demand of `part`, which `ir.alone` leaves of one GPU of a program that `validate(strict=True)` accepts.

    Raises ConfigError and InvalidProgramError as `demand_of` and `rank_plans`.
    """
    plans = rank_plans(program) if local_layers(part) is NO_LAYERS else brief_rank_plans(program)
    return _planned_demand(part, plans[rank])


def _planned_demand(program: MegakernelProgram, plan: Plan) -> Demand:
    ids, units = as_runs(program).ids, units_of(program)
    order, first = queues_of(program)
    own = np.arange(len(plan.program.tasks)) if plan.part is None else np.flatnonzero(~plan.part.pushes)
    works = _works(units, plan, own)
    entries = units.tasks[order]  # numbers among the units of all layers
    unit_of = units.unit_of[entries]
    nbytes = np.array([each.streamed_bytes for each in works], np.int64)
    ends = np.concatenate(([0], np.cumsum(nbytes[unit_of])))
    added = _added(plan, units, own, order, entries, first)
    kinds, kind_of = _kinds(works, units, entries, unit_of, first, added)
    return Demand(
        variant=plan.variant,
        task_ids=order if ids == range(len(order)) else np.array(ids, np.int64)[order],
        first=first,
        stream_end=ends[1:] - np.repeat(ends[first[:-1]], np.diff(first)),
        kinds=kinds,
        kind_of=kind_of,
        gates=gates_of(plan, units, entries),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Facts of a task's steps.

    `parts` maps inputs that are only partly read to their number of read elements: a step copies that part for later
    steps. `codes` are the types of quantised matrices. `sums` says that the task does nothing but add results of
    several GPUs.
    """

    multiplies: bool
    attends: bool
    parts: Mapping[int, int]
    codes: tuple[DType, ...] = ()


class _UnitWork(NamedTuple):
    """The work of a unit's tasks: their steps, the activations that they read, their bytes, the slices of their
    operand, and the operands that they find and leave staged."""

    unit: Unit
    steps: _Steps
    read: tuple[int, ...]
    read_bytes: int
    slices: int = 1
    found: StagedValue | None = None
    left: StagedValue | None = None
    past: bool = False
    """Whether the loader streams the rows of caches that it attends to."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes that come through the ring."""
        return 0 if self.steps.attends and not self.past else self.unit.est_bytes


def _works(units: Units, plan: Plan, own: Ints) -> list[_UnitWork]:
    """The work of each unit. `own` are the places of the plan's tasks that are no pushes. Where no kernels run the
    program, nothing is staged for a later task or sliced."""
    buffers = [buffer for buffer in units.brief.buffers if buffer.kind not in STREAMED_KINDS]
    dtypes, sizes = {buffer.id: buffer.dtype for buffer in buffers}, {buffer.id: buffer.nbytes for buffer in buffers}
    made = plan.found if isinstance(plan.found, Routines) else None
    slices = [] if made is None else [
        max([each.steps[place].n_slices for place in each.matrices], default=1) for each in made.by_form
    ]  # fmt: skip
    places = own[units.places(len(own))]
    nodes = plan.grouping.node_of[places].tolist()
    past = plan.streamed[places].tolist() if made is not None else [False] * len(nodes)
    works = []
    for unit, node, streams in zip(units.units, nodes, past, strict=True):
        steps = _steps(unit)
        read = tuple([number for number in unit.inputs if number in sizes])
        nbytes = sum([sizes[number] for number in read])
        for place, numel in steps.parts.items():
            number = unit.inputs[place]
            nbytes += dtypes[number].nbytes(numel) - sizes[number] if number in sizes else 0
        if made is None:
            works.append(_UnitWork(unit, steps, read, nbytes))
            continue
        nbytes = 0 if made.best is not None and node in made.best.taking else nbytes
        found, left = made.shared.found[node], made.shared.left[node]
        works.append(_UnitWork(unit, steps, read, nbytes, slices[made.nodes[node].form], found, left, streams))
    return works


def _kinds(
    works: Sequence[_UnitWork], units: Units, entries: Ints, unit_of: Ints, first: Ints, added: Bools
) -> tuple[list[Kind], Ints]:
    """(the distinct kinds, the number of each entry's kind)."""
    known: dict[Hashable, int] = {}
    found, left = (
        units.numbered([_operand(each, getattr(each, name)) for each in works], known)[entries]
        for name in ("found", "left")
    )
    staged = find_staged(found, left, np.repeat(np.arange(len(first) - 1), np.diff(first)))
    read = units.numbered([(each.read, ()) for each in works], {})[entries]
    readers = np.bincount(read[~staged], minlength=int(read.max(initial=0)) + 1)
    most = int(readers.max()) + 1
    code = (unit_of * 4 + staged * 2 + added) * most + readers[read]
    codes, alike = _numbered(code, 4 * most * len(works))
    kinds: dict[Kind, int] = {}
    kind_of = []
    for value in codes.tolist():
        rest, n_readers = divmod(value, most)
        unit, again, free = rest // 4, rest // 2 % 2, rest % 2
        kind = _kind(works[unit], bool(again), n_readers, bool(free))
        kind_of.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), np.array(kind_of, np.int64)[alike]


def _operand(work: _UnitWork, value: StagedValue | None) -> tuple[tuple[int, ...], Hashable] | None:
    return None if value is None else (tuple([work.unit.inputs[place] for place in value.inputs]), value.formula)


def _added(plan: Plan, units: Units, own: Ints, order: Ints, entries: Ints, first: Ints) -> Bools:
    """Which queue entries, the tasks `order` of units `entries`, are sums that the products before them add."""
    added = np.zeros(len(order), np.bool_)
    if plan.part is None or not isinstance(plan.found, Routines):
        return added
    sums = plan.sums[own[units.places(len(own))]][units.unit_of][entries]
    sums[first[:-1][np.diff(first) > 0]] = False  # no task before it
    places = np.flatnonzero(sums)
    (products, ahead), (totals, behind) = (
        units.stand_ins(order[each], entries[each], len(own)) for each in (places - 1, places)
    )
    near = behind - ahead <= 1  # tasks further apart share no buffer that is written
    added[places[near]] = plan.adds(own[products[near]], own[totals[near]])
    return added


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


def _kind(work: _UnitWork, staged: bool, readers: int, added: bool) -> Kind:
    steps, unit = work.steps, work.unit
    return Kind(
        streamed_bytes=work.streamed_bytes,
        cached_bytes=unit.est_bytes if steps.attends else 0,
        read_bytes=work.read_bytes,
        flops=unit.est_flops // (unit.params.get("M_tile", 1) if steps.multiplies else 1),
        readers=readers,
        staged=staged,
        attends=steps.attends,
        slices=work.slices,
        codes=steps.codes,
        added=added,
        multiplies=steps.multiplies,
    )


def _steps(task: Unit) -> _Steps:
    if task.op is InstructionKind.FUSED:
        return _fused(task.params["recipe"])
    return _Steps(task.op in PRODUCTS, task.op in ATTENTIONS, {})


@lru_cache(maxsize=1 << 12)
def _fused(recipe: Recipe) -> _Steps:
    working = [step for step in recipe.steps if step.op is not _COPY]
    whole = {arg for step in working for arg in step.args}
    sources = [(step.args[0], step.numel) for step in recipe.steps if step.op is _COPY]
    return _Steps(
        multiplies=any(step.op in PRODUCTS for step in working),
        attends=any(step.op in ATTENTIONS for step in working),
        parts={arg.number: numel for arg, numel in sources if isinstance(arg, Input) and arg not in whole},
        codes=tuple(sorted({DType(int(step.params["qdtype"])) for step in working if step.op is _DEQUANT})),
    )
