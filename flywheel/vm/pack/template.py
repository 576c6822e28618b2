"""What all tasks of one form share: their rows of the step table, and what the stream must know of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import INHERITED_PARAMS, PARAM_FIELDS, BufferKind, DType, InstructionKind, KvRows
from flywheel.plan import KernelVariant
from flywheel.plan.staging import FRAGMENT_K, operand_stride
from flywheel.vm.abi import ABSENT, FRAGMENT_ROWS, RESULT_REF, InstructionFlag, StepFlag, numpy_struct
from flywheel.vm.pack.checks import check_count, check_steps
from flywheel.vm.pack.frequencies import Frequencies
from flywheel.vm.pack.new_row import find_new_row
from flywheel.vm.pack.placing import Placement, place_values
from flywheel.vm.pack.slicing import in_slices
from flywheel.vm.pack.step import Form, Step, inherited, look, names_columns, steps_of
from flywheel.vm.pack.stream import chunking
from flywheel.vm.pack.turning import find_norm, turns_queries

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


@dataclass(frozen=True, slots=True)
class StagedValue:
    """A staged operand: how it follows from some inputs of the task, which inputs these are, and its layout."""

    formula: Hashable
    inputs: tuple[int, ...]

    def over(self, buffers: Sequence[int]) -> Hashable:
        """A key that tasks share if their operands have the same bytes whenever the buffers hold the same."""
        return self.formula, tuple(buffers[number] for number in self.inputs)


@dataclass(frozen=True, slots=True)
class Template:
    """Steps of a form as the table has them, and places in `steps` of its matrix steps.

    `skipped_x` is the operand of the first matrix step, where the steps before it can be left out once that is staged;
    `left_x` the one that the last staging leaves. Either is None where no other task may rely on it. `loose` are the
    inputs that a step reads in row-major order, `flags` those of its instructions.
    """

    steps: npt.NDArray[np.void]
    matrices: tuple[int, ...]
    spilled_bytes: int
    skipped_x: StagedValue | None
    left_x: StagedValue | None
    loose: frozenset[int]
    flags: InstructionFlag


def fragment_bytes(dtype: DType) -> int:
    """Size of one weight fragment."""
    return dtype.nbytes(FRAGMENT_ROWS * FRAGMENT_K)


def make_template(form: Form, dtype: DType, variant: KernelVariant, frequencies: Frequencies) -> Template:
    """The template of a form in a program of `dtype` floats. Raises InvalidProgramError for what has no kernel."""
    whole = steps_of(form)
    check_steps(whole, form, dtype, variant)
    check_count(whole)
    steps = in_slices(whole, form, variant.x_slices)
    views = frozenset(index for index, step in enumerate(steps) if _is_view(step, form))
    placed = place_values(steps, form, variant.staged_bytes, views)
    shown = frozenset(index for index in views if not placed.is_in_place(index))
    table = np.zeros(len(steps), STEP)
    for index, step in enumerate(steps):
        _fill(table[index], step, steps[:index], form, frequencies)
        table[index]["scratch"] = placed.offsets[index]
        if index in shown:
            table[index]["flags"] |= StepFlag.VIEW
        if step.matrix:
            kblocks = -(-step.depth // FRAGMENT_K)
            _, row_chunks = chunking(kblocks, fragment_bytes(dtype), variant.chunk_bytes)
            table[index]["kblocks"], table[index]["beside"] = kblocks, step.beside
            table[index]["row_chunks"] = row_chunks if step.slices is None else variant.matrix_warps
            table[index]["flags"] |= placed.staging(index).flag(index)
    for staging in placed.stagings:
        if staging.in_place:
            maker, rows = table[staging.ref - RESULT_REF], int(table[staging.steps[0]]["rows"])
            maker["flags"] |= StepFlag.ANNOUNCES
            if rows > 1:
                maker["kblocks"] = operand_stride(rows, steps[staging.steps[0]].depth) // FRAGMENT_K
            if staging.scaled_later:
                maker["flags"] |= StepFlag.LEAVES_SCALE
                table["flags"][list(staging.steps)] |= np.uint32(StepFlag.TAKES_SCALE)
    _flag_turning(table, steps, form, dtype, shown)
    if steps:
        table[-1]["flags"] |= StepFlag.LAST
    matrices = tuple(index for index, step in enumerate(steps) if step.matrix)
    skipped, left = _shared_operands(steps, form, placed)
    return Template(table, matrices, placed.spilled_bytes, skipped, left, _loose(steps), _instruction_flags(form))


def _flag_turning(
    table: npt.NDArray[np.void], steps: Sequence[Step], form: Form, dtype: DType, views: frozenset[int]
) -> None:
    """Flag what a new row's kernel or an attention does of the steps before it."""
    row = find_new_row(steps, form, dtype, views)
    if row is not None:
        first, last = table[row.key_rope], table[row.attention]
        for place in (row.key, row.value, row.query_rope):
            table[place]["flags"] |= StepFlag.LEFT
        if row.alone:
            first["flags"] |= StepFlag.NEW_ROW
            first["kblocks"], first["beside"] = row.value, row.query_rope
            last["flags"] |= StepFlag.LEFT
        else:
            first["flags"] |= StepFlag.LEFT
            last["flags"] |= StepFlag.TURNS | StepFlag.APPENDS
            last["kblocks"], last["beside"] = row.key_rope, row.value
        _leave_norm(table, row.key_rope, row.key_norm)
        _leave_norm(table, row.query_rope, row.query_norm)
    for place in range(1, len(steps) if row is None else row.key_rope):
        if turns_queries(place, steps, form, dtype):
            table[place]["flags"] |= StepFlag.TURNS
            table[place - 1]["flags"] |= StepFlag.LEFT
            _leave_norm(table, place - 1, find_norm(place - 1, steps, form, dtype, views))


def _leave_norm(table: npt.NDArray[np.void], rope: int, norm: int | None) -> None:
    """Leave a norm, if there is one, to what does the ROPE behind it."""
    table[rope]["row_chunks"] = ABSENT if norm is None else norm
    if norm is not None:
        table[norm]["flags"] |= StepFlag.LEFT


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


def _fill(row: np.void, step: Step, before: Sequence[Step], form: Form, frequencies: Frequencies) -> None:
    row["op"], row["n_args"] = step.op, len(step.args)
    row["args"] = ABSENT
    row["args"][: len(step.args)] = step.args
    row["out"], row["out_dtype"], row["out_numel"] = step.out, step.result.dtype, step.result.numel
    row["epilogue"], row["epilogue_arg"] = step.epilogue, step.other
    row["rope"] = frequencies.offset(step.params) if step.op is _K.ROPE else ABSENT
    row["rows"] = _rows(step, before, form)
    if step.op is _K.SOFTMAX:
        row["rows"], row["kblocks"], row["beside"] = _around(step, before, form)
    row["flags"] = _flags(step, form)
    for name in PARAM_FIELDS.keys() & step.params.keys():
        row["params"][name] = step.params[name]


def _flags(step: Step, form: Form) -> int:
    flags = StepFlag(0)
    for names in (_OWN, _OPTIONAL):
        for name, flag in names.items():
            if name in step.params:
                flags |= flag
    if names_columns(step, form):
        flags |= StepFlag.HAS_COLUMNS
    if step.matrix and (form.recipe is not None or step.out == ABSENT) and not (step.out == 0 and form.rows > 1):
        flags |= StepFlag.INDEX_FROM_ZERO
    return flags


def _is_view(step: Step, form: Form) -> bool:
    """Whether a COPY only names columns of an input that the task does not write."""
    if not names_columns(step, form) or step.out != ABSENT or step.args[0] >= RESULT_REF:
        return False
    source = form.inputs[step.args[0]]
    return source.dtype is step.result.dtype and source.dtype is not DType.I4 and form.written[step.args[0]] is None


def _rows(step: Step, before: Sequence[Step], form: Form) -> int:
    """Rows of x of a matrix step, elements of a cache row of an append, rows of any other result."""
    if step.matrix:
        return look(step.args[0], before, form).numel // int(step.params["K"])
    if step.op is _K.KV_APPEND:
        return step.result.numel // step.result.shape[0]
    return step.result.rows


def _around(step: Step, before: Sequence[Step], form: Form) -> tuple[int, int, int]:
    """Elements before, along and behind the dimension of a softmax. Raises InvalidProgramError where there is none."""
    shape = look(step.args[0], before, form).shape
    dim = step.params.get("dim", -1)
    if not -len(shape) <= dim < len(shape):
        raise InvalidProgramError(f"dim={dim} of a tensor of rank {len(shape)}")
    if prod(shape) != step.result.numel:
        raise InvalidProgramError(f"SOFTMAX of {prod(shape)} elements makes {step.result.numel}")
    dim %= len(shape)
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])


def _loose(steps: Sequence[Step]) -> frozenset[int]:
    return frozenset(
        ref
        for step in steps
        for place, ref in enumerate(step.reads)
        if ref < RESULT_REF and not (place == 1 and (step.matrix or step.op is _K.EMBED))
    )


def _shared_operands(
    steps: Sequence[Step], form: Form, placed: Placement
) -> tuple[StagedValue | None, StagedValue | None]:
    """(operand that an earlier task may have staged, operand that a later one finds staged)."""
    if len(placed.stagings) != 1 or any(step.op is _K.ATTENTION_TILE for step in steps):
        return None, None  # an attention has taken the operand's place
    if any(step.streams for step in steps if step.matrix):
        return None, None  # or a later slice of it
    (staging,) = placed.stagings
    inputs: list[int] = []
    formula = _formula(staging.ref, steps, form, inputs)
    if formula is None:
        return None, None
    first = staging.steps[0]
    layout = (steps[first].params["K"], look(staging.ref, steps, form).dtype, staging.scaled_later)
    value = StagedValue((formula, layout), tuple(inputs))
    return (value if _is_for_operand_alone(steps, staging.ref, first) else None), value


def _is_for_operand_alone(steps: Sequence[Step], x: int, first: int) -> bool:
    """Whether nothing but matrix operands comes of the steps before matrix step `first`."""
    if any(step.out != ABSENT for step in steps[:first]):
        return False
    for step in steps[first:]:
        read = step.reads[1:] if step.matrix and step.args[0] == x else step.reads
        if any(RESULT_REF <= ref < RESULT_REF + first for ref in read):
            return False
    return True


def _formula(ref: int, steps: Sequence[Step], form: Form, inputs: list[int]) -> Hashable | None:
    """The value of a ref over `inputs`, to which it adds; None where it depends on the task's params or on weights."""
    if ref < RESULT_REF:
        if form.written[ref] is not None:
            return None
        if ref not in inputs:
            inputs.append(ref)
        return "input", inputs.index(ref)
    step = steps[ref - RESULT_REF]
    if step.matrix or any(inherited(step, form, name) for name in _takes(step)):
        return None
    args = tuple(_formula(arg, steps, form, inputs) for arg in step.args)
    if None in args:
        return None
    return step.op, args, tuple(sorted(step.params.items())), step.result.dtype, step.result.shape


def _takes(step: Step) -> frozenset[str]:
    """Params of the task that the step's op would use."""
    if step.op is _K.COPY:
        return frozenset({"n_off", "N_tile"})
    return INHERITED_PARAMS if step.op in (_K.ATTENTION_TILE, _K.KV_APPEND) else frozenset()
