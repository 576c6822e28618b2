"""What the kernels do for a whole program, or why they cannot. Source: docs/vm.md, "Tables"."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import ABI_MAX_ROWS, Buffer, DType, InstructionKind, MegakernelProgram
from flywheel.plan.best import KeptBest, find_best
from flywheel.plan.checks import (
    check_arrivals,
    check_buffers,
    check_count,
    check_steps,
    float_type,
    scale_buffers,
)
from flywheel.plan.nodes import Grouping, Node, make_nodes
from flywheel.plan.ranks import RankPart
from flywheel.plan.routine import Routine, make_routine
from flywheel.plan.rules import steps_of
from flywheel.plan.scratch import Placement, place_values
from flywheel.plan.sharing import SharedOperands, shared_operands
from flywheel.plan.staging import FRAGMENT_ROWS, PARTIALS_BYTES
from flywheel.plan.step import ABSENT, Form, MatrixCoding, x_rows
from flywheel.plan.variant import KernelVariant


@dataclass(frozen=True, slots=True, eq=False)
class Routines:
    """A program's nodes and, by form, the routine of its tasks and the places of its values.

    `dtype` is the program's float type. `weights` are the rows of the buffers that products multiply by; `coded` has
    the format of each quantised one. A sequence has `lanes` tokens in a launch, and `position_rows` has the index of
    the launch's position for tasks with each params record. A pass has at most `pass_blocks` blocks of 16 rows.
    """

    dtype: DType
    nodes: Sequence[Node]
    by_form: Sequence[Routine]
    placements: Sequence[Placement]
    pass_blocks: int
    weights: frozenset[int]
    coded: Mapping[int, MatrixCoding]
    lanes: int
    position_rows: npt.NDArray[np.int32]
    shared: SharedOperands
    best: KeptBest | None


def routines_of(
    program: MegakernelProgram, grouping: Grouping, variant: KernelVariant, once: Set[int], part: RankPart | None
) -> Routines:
    """The routines of a program. `once` are rows of buffers of which each column is written once. Raises
    InvalidProgramError, which names the task, if the kernels cannot run it."""
    buffers = program.buffers
    check_buffers(buffers)
    dtype = float_type(buffers, scale_buffers(grouping.firsts))
    nodes, forms = make_nodes(program, grouping)
    routines, placements = _by_form(nodes, forms, dtype, variant)
    pass_blocks = _pass_blocks(routines, variant)
    coded = _coded_rows(nodes, routines, buffers)
    places = [[routine.steps[place].args[1] for place in routine.matrices] for routine in routines]
    weights = frozenset([node.inputs[number] for node in nodes for number in places[node.form]])
    _check_loose(nodes, routines, buffers, weights, coded)
    if part is not None:
        check_arrivals(nodes, routines, buffers, part.arrived)
    lanes, position_rows = _position_rows(grouping.params)
    _check_tiles(program, grouping, nodes, routines)
    arrived = part.arrived if part is not None else frozenset[int]()
    return Routines(
        dtype, nodes, routines, placements, pass_blocks, weights, coded, lanes, position_rows,
        shared_operands(grouping, nodes, routines, once), find_best(buffers, grouping, nodes, routines, arrived),
    )  # fmt: skip


def _by_form(
    nodes: Sequence[Node], forms: Sequence[Form], dtype: DType, variant: KernelVariant
) -> tuple[list[Routine], list[Placement]]:
    """Raises InvalidProgramError, which names the first task without a kernel."""
    firsts = {node.form: node.task for node in reversed(nodes)}
    routines, placements = [], []
    for number, form in enumerate(forms):
        try:
            routine, placed = planned_form(
                _RoutineKey(form, _key(form), dtype, variant.vector_warps, variant.ranked, variant.staged_bytes)
            )
        except InvalidProgramError as error:
            task = firsts[number]
            raise InvalidProgramError(f"task {task.id} ({task.label}): {task.op.name} {error}") from error
        routines.append(routine)
        placements.append(placed)
    return routines, placements


@dataclass(frozen=True, slots=True)
class _RoutineKey:
    """All that a form's routine depends on. Forms of equal `key` are equal; a form itself cannot be hashed."""

    form: Form = field(compare=False)
    key: Hashable
    dtype: DType
    vector_warps: int
    ranked: bool
    staged_bytes: int


def _key(form: Form) -> Hashable:
    own = tuple(sorted(form.own.items()))
    where = form.kv_rows, form.misses
    return form.op, form.recipe, own, form.given, where, form.inputs, form.outputs, form.written, form.widest


@lru_cache(maxsize=1024)
def planned_form(asked: _RoutineKey) -> tuple[Routine, Placement]:
    """The routine of a form and the places of its values, once for equal forms: the schedules of a search share most of
    theirs. Raises InvalidProgramError."""
    form, dtype = asked.form, asked.dtype
    steps = steps_of(form)
    check_steps(steps, form, dtype, asked.vector_warps, asked.staged_bytes, asked.ranked)
    check_count(steps)
    routine = make_routine(steps, form, dtype, asked.staged_bytes)
    return routine, place_values(routine, asked.staged_bytes, asked.vector_warps)


def _pass_blocks(routines: Sequence[Routine], variant: KernelVariant) -> int:
    """The number of row blocks whose partial sums fit half of the partials, the same for all matrix steps."""
    rows = [x_rows(each.steps[place], each.steps, each.form) for each in routines for place in each.matrices]
    most = max(rows, default=1)
    blocks = PARTIALS_BYTES // 2 // (variant.matrix_warps * FRAGMENT_ROWS * 4 * most)
    if blocks < 1:
        raise InvalidProgramError(
            f"program: partial sums of {most} rows by {variant.matrix_warps} matrix warps do not fit "
            f"{PARTIALS_BYTES // 2} bytes"
        )
    return blocks


def _coded_rows(
    nodes: Sequence[Node], routines: Sequence[Routine], buffers: Sequence[Buffer]
) -> dict[int, MatrixCoding]:
    """Row of a quantised matrix's buffer -> its format. `scales` and `zeros` are buffer rows, too.

    Raises InvalidProgramError, which names the task, if two tasks scale one matrix in different ways, or a task uses
    another matrix's scales.
    """
    found: dict[int, MatrixCoding] = {}
    scaled: dict[int, int] = {}
    steps = [[step for step in routine.steps if step.coded is not None] for routine in routines]
    for node in nodes:
        for step in steps[node.form]:
            assert step.coded is not None
            row, zeros = node.inputs[step.args[1]], step.coded.zeros
            coded = replace(
                step.coded,
                scales=node.inputs[step.coded.scales],
                zeros=ABSENT if zeros == ABSENT else node.inputs[zeros],
            )
            if found.setdefault(row, coded) != coded:
                raise InvalidProgramError(
                    f"task {node.task.id} ({node.task.label}): {node.task.op.name} scales buffer {buffers[row].id} "
                    f"({buffers[row].name}) in another way than a task before it"
                )
            if scaled.setdefault(coded.scales, row) != row:
                raise InvalidProgramError(
                    f"task {node.task.id} ({node.task.label}): buffer {buffers[coded.scales].id} "
                    f"({buffers[coded.scales].name}) has scales of {buffers[scaled[coded.scales]].name}, not of "
                    f"{buffers[row].name}: a matrix needs its own"
                )
    return found


def _check_loose(
    nodes: Sequence[Node], routines: Sequence[Routine], buffers: Sequence[Buffer], weights: Set[int],
    coded: Mapping[int, MatrixCoding],
) -> None:  # fmt: skip
    """Raises InvalidProgramError, which names the task, if a task reads a product's weights in row-major order."""
    rows = {*weights, *[row for each in coded.values() for row in (each.scales, each.zeros) if row != ABSENT]}
    loose = [routine.loose for routine in routines]
    for node in nodes:
        for number in loose[node.form]:
            if node.inputs[number] in rows:
                buffer = buffers[node.inputs[number]]
                raise InvalidProgramError(
                    f"task {node.task.id} ({node.task.label}): {node.task.op.name} reads buffer {buffer.id} "
                    f"({buffer.name}), a matrix elsewhere, as another operand"
                )


def _position_rows(params: Sequence[Mapping[str, Any]]) -> tuple[int, npt.NDArray[np.int32]]:
    """(lanes of each sequence, index of the launch's position for tasks with each params record). Raises
    InvalidProgramError for more positions than a launch has."""
    lanes = 1 + max((each.get("lane", 0) for each in params), default=0)
    rows = [each.get("sequence", 0) * lanes + each.get("lane", 0) for each in params]
    if max(rows, default=0) >= ABI_MAX_ROWS:
        raise InvalidProgramError(f"program: its sequences and lanes make {max(rows) + 1} rows, at most {ABI_MAX_ROWS}")
    return lanes, np.array(rows, np.int32)


def _check_tiles(
    program: MegakernelProgram, grouping: Grouping, nodes: Sequence[Node], routines: Sequence[Routine]
) -> None:
    """Check that a recipe's matrix step computes exactly its tile, since its kernel writes rows of N_tile columns."""
    widths = np.array([each.get("N_tile", 0) for each in grouping.params], np.int64)
    form_of = np.array([node.form for node in nodes], np.int64)[grouping.node_of]
    seen = np.zeros((len(routines), len(widths)), np.bool_)
    seen[form_of, grouping.params_of] = True
    for number, record in np.argwhere(seen).tolist():
        routine = routines[number]
        if routine.form.op is not InstructionKind.FUSED:
            continue
        for place in routine.matrices:
            step = routine.steps[place]
            width = int(step.params.get("N_tile", widths[record]))
            if step.result.numel != width * x_rows(step, routine.steps, routine.form):
                found = (form_of == number) & (grouping.params_of == record)
                task = program.tasks[int(np.flatnonzero(found)[0])]
                raise InvalidProgramError(
                    f"task {task.id} ({task.label}): FUSED makes {step.result.numel} elements of a matrix tile of "
                    f"{width} columns"
                )
