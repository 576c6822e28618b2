"""Table entries that all tasks of one form share: their rows of the step table, and their instructions' flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import PARAM_FIELDS, BufferKind, InstructionKind, KvRows
from flywheel.plan.formats import ScalePlacement
from flywheel.plan.kernels import KERNELS
from flywheel.plan.operands import Held, Staging
from flywheel.plan.routine import Routine
from flywheel.plan.scratch import Placement
from flywheel.plan.staging import FRAGMENT_K, operand_stride
from flywheel.plan.step import ABSENT, RESULT_REF, Form, PlannedStep, adds_columns, look, names_columns, x_rows
from flywheel.vm.abi import InstructionFlag, StepFlag, numpy_struct
from flywheel.vm.pack.frequencies import Frequencies

_K = InstructionKind

STEP: Final = numpy_struct("amk_step_t")

_OWN: Final = {
    "n_off": StepFlag.OWN_N_OFF,
    "N_tile": StepFlag.OWN_N_TILE,
    "pos": StepFlag.OWN_POS,
    "kv_start": StepFlag.OWN_KV_START,
    "kv_len": StepFlag.OWN_KV_LEN,
}
_OPTIONAL: Final = {
    "scale": StepFlag.HAS_SCALE,
    "dim": StepFlag.HAS_DIM,
    "n_heads": StepFlag.HAS_HEADS,
    "head_dim": StepFlag.HAS_HEAD_DIM,
    "M_tile": StepFlag.HAS_M_TILE,
}
_HELD: Final = {Held.DIGITS: StepFlag.DIGITS, Held.HALVES: StepFlag.HALVES}


@dataclass(frozen=True, slots=True)
class Template:
    """A routine's steps as table rows, `spilled_bytes` of scratch, and the flags of its instructions."""

    routine: Routine
    steps: npt.NDArray[np.void]
    spilled_bytes: int
    flags: InstructionFlag


def make_template(
    routine: Routine, placed: Placement, row_chunks: Sequence[int], frequencies: Frequencies, scales: bool
) -> Template:
    """The template of a routine, whose matrix steps have these chunks of a row block. `scales` says whether the kernel
    takes every ROPE to have a scale."""
    steps, form = routine.steps, routine.form
    table = np.zeros(len(steps), STEP)
    table["scratch"] = placed.offsets
    chunks = dict(zip(routine.matrices, row_chunks, strict=True))
    for index, step in enumerate(steps):
        _fill(table[index], step, form)
        kind = table[index]["as"][KERNELS[step.op].step]
        if step.matrix:
            _fill_product(kind, step, x_rows(step, steps, form), chunks[index])
        elif step.op is _K.SOFTMAX:
            kind["outer"], kind["n"], kind["inner"] = _around(step, steps[:index], form)
        elif step.op is _K.KV_APPEND:
            kind["row_numel"] = step.result.numel // step.result.shape[0]
        else:
            kind["rows"] = step.result.rows
        if step.op is _K.ROPE:
            kind["frequencies"] = frequencies.offset(step.params)
            if scales:
                table[index]["params"]["scale"] = step.params.get("scale", 1.0)
    _flag(table, routine.views, StepFlag.VIEW)
    for staging in routine.stagings:
        _flag_operand(table, staging, steps)
    _flag_turning(table, routine)
    _flag(table, range(len(steps))[-1:], StepFlag.LAST)
    return Template(routine, table, placed.spilled_bytes, _instruction_flags(form))


def _flag(table: npt.NDArray[np.void], places: Iterable[int], flag: StepFlag) -> None:
    table["flags"][list(places)] |= np.uint32(flag)


def _flag_operand(table: npt.NDArray[np.void], staging: Staging, steps: Sequence[PlannedStep]) -> None:
    """Flag how matrix steps find a staged operand, and which step announces it."""
    first, *others = staging.steps
    _flag(table, [first], StepFlag.X_IN_PLACE if staging.in_place else StepFlag.STAGE)
    _flag(table, others, StepFlag.REUSE_X)
    if staging.held in _HELD:
        _flag(table, [staging.ref - RESULT_REF if staging.in_place else first], _HELD[staging.held])
    if staging.in_place:
        maker, rows = staging.ref - RESULT_REF, int(table[first]["as"]["product"]["rows"])
        _flag(table, [maker], StepFlag.ANNOUNCES)
        if rows > 1:  # only a norm stages several rows in place
            table[maker]["as"]["norm"]["pitch_blocks"] = operand_stride(rows, steps[first].depth) // FRAGMENT_K
        if staging.scaled_later:
            _flag(table, [maker], StepFlag.LEAVES_SCALE)
            _flag(table, staging.steps, StepFlag.TAKES_SCALE)


def _flag_turning(table: npt.NDArray[np.void], routine: Routine) -> None:
    """Flag the steps that the kernel of a new row or of an attention computes for other steps."""
    row = routine.new_row
    if row is not None:
        _flag(table, [row.key, row.value, row.query_rope], StepFlag.LEFT)
        if row.alone:
            _flag(table, [row.key_rope], StepFlag.NEW_ROW)
            first = table[row.key_rope]["as"]["rope"]
            first["value"], first["query_rope"] = row.value, row.query_rope
            _flag(table, [row.attention], StepFlag.LEFT)
        else:
            _flag(table, [row.key_rope], StepFlag.LEFT)
            _flag(table, [row.attention], StepFlag.TURNS | StepFlag.APPENDS)
            last = table[row.attention]["as"]["attention"]
            last["key_rope"], last["value"] = row.key_rope, row.value
        _leave_norm(table, row.key_rope, row.key_norm)
        _leave_norm(table, row.query_rope, row.query_norm)
    for turn in routine.turns:
        _flag(table, [turn.attention], StepFlag.TURNS)
        _flag(table, [turn.rope], StepFlag.LEFT)
        _leave_norm(table, turn.rope, turn.norm)


def _leave_norm(table: npt.NDArray[np.void], rope: int, norm: int | None) -> None:
    """Flag a norm, if there is one, as done by the kernel of the ROPE after it."""
    table[rope]["as"]["rope"]["norm"] = ABSENT if norm is None else norm
    if norm is not None:
        _flag(table, [norm], StepFlag.LEFT)


def _instruction_flags(form: Form) -> InstructionFlag:
    flags = InstructionFlag(0)
    if form.op is _K.FUSED and form.columns and form.outputs[0].kind is not BufferKind.KV_CACHE and form.rows == 1:
        flags |= InstructionFlag.TILED
    if "pos" in form.given:
        flags |= InstructionFlag.MOVES_POS
    if "kv_len" in form.given:
        flags |= InstructionFlag.MOVES_WINDOW
    if form.kv_rows is not None:
        flags |= InstructionFlag.WINDOW_PAST if form.kv_rows == KvRows.PAST else InstructionFlag.WINDOW_NEW
    return flags


def _fill(row: np.void, step: PlannedStep, form: Form) -> None:
    """Fill the fields that steps of every kind have."""
    row["op"], row["n_args"] = step.op, len(step.args)
    row["args"] = ABSENT
    row["args"][: len(step.args)] = step.args
    row["out"], row["out_dtype"], row["out_numel"] = step.out, step.result.dtype, step.result.numel
    row["flags"] = _flags(step, form)
    for name in PARAM_FIELDS.keys() & step.params.keys():
        row["params"][name] = step.params[name]
    if "cap" in step.params:
        row["params"]["theta"] = step.params["cap"]  # which only ROPE has


def _fill_product(product: np.void, step: PlannedStep, rows: int, row_chunks: int) -> None:
    if step.coded is not None and step.coded.coding.placement is ScalePlacement.ROWS:
        product["scales"] = step.coded.scales + 1
    product["rows"], product["kblocks"] = rows, -(-step.depth // FRAGMENT_K)
    product["row_chunks"] = row_chunks
    product["epilogue"], product["epilogue_arg"] = step.epilogue, step.other


def _flags(step: PlannedStep, form: Form) -> int:
    flags = StepFlag(0)
    for names in (_OWN, _OPTIONAL):
        for name, flag in names.items():
            if name in step.params:
                flags |= flag
    if names_columns(step, form) or adds_columns(step, form):
        flags |= StepFlag.HAS_COLUMNS
    if step.matrix and (form.recipe is not None or step.out == ABSENT) and not (step.out == 0 and form.rows > 1):
        flags |= StepFlag.INDEX_FROM_ZERO
    return flags


def _around(step: PlannedStep, before: Sequence[PlannedStep], form: Form) -> tuple[int, int, int]:
    """(elements before, along, after) the dimension of a softmax."""
    shape = look(step.args[0], before, form).shape
    dim = step.params.get("dim", -1)
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])


