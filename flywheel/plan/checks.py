"""Checks that the kernel has code for each step. Each function raises InvalidProgramError that says what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from flywheel.errors import InvalidProgramError
from flywheel.ir import ABI_MAX_ROWS, Buffer, BufferKind, DType, InstructionKind, Task
from flywheel.ir.operations import FLOATS, OPERATIONS, SCALED_ROPE
from flywheel.ir.recipe import Input, recipe_steps
from flywheel.plan.kernels import KERNELS
from flywheel.plan.nodes import Node
from flywheel.plan.routine import Routine
from flywheel.plan.staging import WORK_BYTES, work_bytes
from flywheel.plan.step import (
    ABSENT,
    MAX_STEPS,
    RESULT_REF,
    Form,
    MatrixCoding,
    PlannedStep,
    StepOperand,
    adds_columns,
    copied_rows,
    is_push,
    look,
    names_columns,
)

_K = InstructionKind

HALVES: Final = (DType.F16, DType.BF16)

MAX_HEAD_DIM: Final = 512
"""Largest head dimension that an attention warp's lanes can hold."""

MAX_WIDTH: Final = 1 << 26
"""Columns of the widest matrix: the bytes of 16 of its rows fit a uint32."""

CACHE_ALIGNMENT: Final = 16
"""Alignment of a KV cache in bytes: the width of the kernels' loads. Caches lie one behind the other."""

_WEIGHT_KINDS: Final = (BufferKind.WEIGHT, BufferKind.CONST)


def check_buffers(buffers: Iterable[Buffer]) -> None:
    """Check that I4 rows are whole bytes, and that a cache begins at a multiple of CACHE_ALIGNMENT behind another."""
    for buffer in buffers:
        if buffer.dtype is DType.I4 and buffer.shape[-1] % 2:
            raise InvalidProgramError(f"{_named(buffer)}: I4 rows of an odd length, {buffer.shape[-1]}")
        if buffer.kind is BufferKind.KV_CACHE and buffer.nbytes % CACHE_ALIGNMENT:
            raise InvalidProgramError(
                f"{_named(buffer)}: a KV cache of {buffer.nbytes} bytes, no multiple of {CACHE_ALIGNMENT}"
            )


def _named(buffer: Buffer) -> str:
    return f"buffer {buffer.id} ({buffer.name})"


def scale_buffers(tasks: Iterable[Task]) -> frozenset[int]:
    """Ids of buffers that hold scales or zero points of quantised matrices. Their types may differ from the
    program's."""
    found: set[int] = set()
    for task in tasks:
        for step in recipe_steps(task):
            if step.op is _K.DEQUANT:
                found.update(task.inputs[arg.number] for arg in step.args[1:] if isinstance(arg, Input))
    return frozenset(found)


def float_type(buffers: Iterable[Buffer], scales: frozenset[int] = frozenset()) -> DType:
    """The float type of a program: its half type, else F32. Raises InvalidProgramError if it has both half types
    outside `scales`."""
    first: dict[DType, Buffer] = {}
    for buffer in buffers:
        if buffer.dtype in HALVES and buffer.id not in scales:
            first.setdefault(buffer.dtype, buffer)
    if len(first) > 1:
        one, other = first.values()
        raise InvalidProgramError(
            f"buffer {other.id} ({other.name}): {other.dtype.name} beside the {one.dtype.name} of "
            f"buffer {one.id} ({one.name}); a kernel computes in one half type"
        )
    return next(iter(first), DType.F32)


def check_count(steps: Sequence[PlannedStep]) -> None:
    """Check that a task slot holds the steps."""
    if len(steps) > MAX_STEPS:
        raise InvalidProgramError(f"has {len(steps)} steps, not 1..{MAX_STEPS}")


def check_steps(
    steps: Sequence[PlannedStep], form: Form, dtype: DType, vector_warps: int, staged_bytes: int, ranked: bool
) -> None:
    """Check that every step has a kernel for its operands, in a block of so many vector warps whose staging area has
    `staged_bytes`; `ranked` kernels are for several GPUs."""
    for index, step in enumerate(steps):
        if step.op not in KERNELS or (KERNELS[step.op].define == "FW_RANKS" and not ranked):
            raise InvalidProgramError(f"step {index}: {step.op.name} has no kernel")
        args = [look(ref, steps[:index], form) for ref in step.args]
        try:
            _check_types(step, args, form, dtype)
            _check_sizes([*args, step.result])
            if not (ranked and (is_push(steps, form) or step.op is _K.ALLREDUCE_SHARD)):
                _check_rows(step, args, form)
            if step.op is _K.ALLREDUCE_SHARD:
                _check_sum(step, args, form)
            if step.matrix:
                _check_matrix(step, args, form, dtype)
            elif step.attends:
                _check_attention(step, vector_warps, staged_bytes)
            elif step.op is _K.ROPE and 0 < len(step.params.keys() & {*SCALED_ROPE}) < len(SCALED_ROPE):
                raise InvalidProgramError(f"RoPE scaling needs all of {', '.join(SCALED_ROPE)}")
        except InvalidProgramError as error:
            raise InvalidProgramError(f"{error}" if form.recipe is None else f"step {index}: {error}") from error


def check_arrivals(
    nodes: Sequence[Node], routines: Sequence[Routine], buffers: Sequence[Buffer], arrived: frozenset[int]
) -> None:
    """Check that only pushes, sums and argmax tasks read data that other GPUs push."""
    rows = {row for row, buffer in enumerate(buffers) if buffer.id in arrived}
    for node in nodes:
        if rows.isdisjoint(node.inputs):
            continue
        routine = routines[node.form]
        taken = {RESULT_REF + view for view in routine.views}
        for index, step in enumerate(routine.steps):
            refs = [ref for ref in step.reads if ref < RESULT_REF and node.inputs[ref] in rows]
            refs += [ref for ref in step.reads if ref in taken]
            if refs and index not in routine.views and not KERNELS[step.op].peers:
                raise InvalidProgramError(
                    f"task {node.task.id} ({node.task.label}): {step.op.name} has no kernel that reads what others push"
                )


def _check_types(step: PlannedStep, args: Sequence[StepOperand], form: Form, dtype: DType) -> None:
    floats = (DType.F32, dtype) if dtype is not DType.F32 else (dtype,)
    stored = step.result.dtype if step.out == ABSENT else form.outputs[step.out].dtype
    if step.op is _K.COPY and len({args[0].dtype, step.result.dtype, stored}) == 1 and stored is not DType.I4:
        return
    if step.other != ABSENT and step.other < RESULT_REF:
        _expect(form.inputs[step.other].dtype, floats, f"what {step.op.name} takes in")
    if step.op is _K.DEQUANT and ("rows_per_scale" in step.params or args[0].dtype is DType.F8E4M3):
        raise InvalidProgramError(f"DEQUANT of rows of a {args[0].dtype.name} matrix has no kernel")
    row = OPERATIONS[step.op]
    for place, operand in enumerate(args):
        if row.operand(place).dtypes >= FLOATS and not (place == 1 and step.coded is not None):
            _expect(operand.dtype, floats, f"{step.op.name} operand {place}")
    if row.output is not None and row.output.dtypes >= FLOATS:
        for result in (step.result.dtype, stored):
            _expect(result, floats, f"{step.op.name} result")


def _expect(found: DType, wanted: Sequence[DType], what: str) -> None:
    if found not in wanted:
        raise InvalidProgramError(f"{what} is {found.name}, not {' or '.join(each.name for each in wanted)}")


def _check_sizes(operands: Iterable[StepOperand]) -> None:
    for operand in operands:
        if operand.numel >= 2**31:
            raise InvalidProgramError(f"an operand of {operand.numel} elements; the kernel counts to 2^31 - 1")


def _check_rows(step: PlannedStep, args: Sequence[StepOperand], form: Form) -> None:
    """Check that only products, with the operations merged into them, have columns of several rows."""
    if step.op is _K.COPY and names_columns(step, form) and copied_rows(step) > 1:
        raise InvalidProgramError(f"a COPY of columns of {copied_rows(step)} rows that no product adds has no kernel")
    if step.out != 0 or form.rows == 1:
        return
    if not step.matrix or {"n_off", "N_tile"} & step.params.keys():
        raise InvalidProgramError(f"{step.op.name} makes a tile of {form.rows} rows without a product of its columns")
    if args[0].numel != form.rows * step.params["K"]:
        raise InvalidProgramError(
            f"{args[0].numel // step.params['K']} rows of x make a tile of M_tile={form.rows} rows"
        )


def _check_sum(step: PlannedStep, args: Sequence[StepOperand], form: Form) -> None:
    """Check that partial sums are in global memory, as columns of the task or whole buffers."""
    if step.out != 0 or any(ref >= RESULT_REF for ref in step.args):
        raise InvalidProgramError("ALLREDUCE_SHARD has no kernel for a summand or a sum in scratch")
    if not adds_columns(step, form) and any(arg.numel != step.result.numel for arg in args):
        raise InvalidProgramError("ALLREDUCE_SHARD adds summands of other sizes than the sum")


def _check_matrix(step: PlannedStep, args: Sequence[StepOperand], form: Form, dtype: DType) -> None:
    x, weight, depth = args[0], args[1], step.params["K"]
    if step.args[1] >= RESULT_REF or weight.kind not in _WEIGHT_KINDS:
        raise InvalidProgramError("the matrix is not a WEIGHT or CONST buffer")
    if len(weight.shape) != 2:
        raise InvalidProgramError(f"the matrix has shape {list(weight.shape)}, not [rows, columns]")
    if weight.shape[1] >= MAX_WIDTH:
        raise InvalidProgramError(f"the matrix has rows of {weight.shape[1]} elements, not fewer than {MAX_WIDTH}")
    if step.coded is not None:
        _check_coded(step.coded, form, dtype)
    for operand, name in ((weight, "matrix"), (x, "vector"))[step.coded is not None :]:
        if operand.dtype is not dtype:
            raise InvalidProgramError(f"the {name} is {operand.dtype.name}, not {dtype.name} as the program is")
    if x.numel // depth > ABI_MAX_ROWS:
        raise InvalidProgramError(f"{x.numel // depth} rows of x, more than {ABI_MAX_ROWS}")


def _check_coded(coded: MatrixCoding, form: Form, dtype: DType) -> None:
    if dtype is DType.F32:
        raise InvalidProgramError("a product of a quantised matrix and an F32 vector has no kernel")
    for ref, name in ((coded.scales, "scales"), (coded.zeros, "zero points")):
        if ref != ABSENT and form.inputs[ref].kind not in _WEIGHT_KINDS:
            raise InvalidProgramError(f"the {name} of the matrix are no WEIGHT or CONST buffer")


def _check_attention(step: PlannedStep, vector_warps: int, staged_bytes: int) -> None:
    head_dim = step.params["head_dim"]
    if head_dim > MAX_HEAD_DIM:
        raise InvalidProgramError(f"head_dim={head_dim} is above {MAX_HEAD_DIM}")
    own = work_bytes(head_dim, vector_warps)
    needed, room = (vector_warps * (head_dim + 2) * 4, own) if own == WORK_BYTES else (own, staged_bytes)
    if needed > room:
        raise InvalidProgramError(f"head_dim={head_dim} on {vector_warps} vector warps takes {needed} bytes of {room}")
