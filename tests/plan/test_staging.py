from __future__ import annotations

from collections.abc import Callable

import pytest

from flywheel.ir import Buffer, BufferKind, DType, InstructionKind, MegakernelProgram, Task
from flywheel.ir.recipe import recipe_from_dict
from flywheel.plan.staging import (
    MAX_INPUT_ROWS_BYTES,
    MAX_STAGED_BYTES,
    MAX_STAGED_ROWS_BYTES,
    MIN_STAGED_BYTES,
    operand_bytes,
    operand_stride,
    operands_of,
    slice_depth,
    staged_bytes,
)


def test_the_longest_operand_is_staged_whatever_the_ids_of_its_buffers(
    tiny: MegakernelProgram, with_task: Callable[..., MegakernelProgram]
) -> None:
    assert staged_bytes(operands_of(tiny.tasks, tiny.buffers)) == MIN_STAGED_BYTES
    deep = with_task(tiny, 102, params={"K": 10007})
    assert staged_bytes(operands_of(deep.tasks, deep.buffers)) == 10016 * 2
    assert staged_bytes(operands_of(deep.tasks, list(reversed(deep.buffers)))) == 10016 * 2
    deepest = with_task(tiny, 102, params={"K": 10**6})
    assert MAX_STAGED_BYTES - 4096 < staged_bytes(operands_of(deepest.tasks, deepest.buffers)) <= MAX_STAGED_BYTES


def test_several_rows_are_staged_apart() -> None:
    shapes = {"x": (4, 4000), "w": (32, 4000), "y": (4, 32)}
    buffers = [Buffer(number, name, BufferKind.CONST, DType.F16, shape) for number, (name, shape) in
               enumerate(shapes.items())]  # fmt: skip
    task = Task(0, InstructionKind.GEMV_TILE, (0, 1), (2,), 0, params={"K": 4000, "N_tile": 32, "n_off": 0})
    assert staged_bytes(operands_of([task], buffers)) == 4 * 4016 * 2


def test_an_operand_made_by_its_recipe_is_staged_in_the_type_of_its_weight() -> None:
    steps = [
        {"op": "COPY", "args": [{"in": 0}], "out": 0, "params": {}, "out_shape": [1, 10000], "out_dtype": "F32"},
        {"op": "GEMV_TILE", "args": [{"s": 0}, {"in": 1}], "out": "final", "params": {"K": 10000},
         "out_shape": [1, 8], "out_dtype": "F32"},
    ]  # fmt: skip
    buffers = [
        Buffer(0, "x", BufferKind.IO_INPUT, DType.F32, (1, 10000)),
        Buffer(1, "w", BufferKind.WEIGHT, DType.BF16, (8, 10000)),
    ]
    params = {"N_tile": 8, "n_off": 0, "recipe": recipe_from_dict({"steps": steps})}
    assert staged_bytes(operands_of([Task(0, InstructionKind.FUSED, (0, 1), (2,), 0, params=params)], buffers)) == 20000
    steps[0]["out_shape"] = [8, 10000]
    params["recipe"] = recipe_from_dict({"steps": steps})
    assert staged_bytes(operands_of([Task(0, InstructionKind.FUSED, (0, 1), (2,), 0, params=params)], buffers)) == (
        MAX_STAGED_ROWS_BYTES
    )


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("depth", [4096, 8192, 14336, 28672, 53248, 99991])
def test_what_does_not_fit_is_cut_into_the_fewest_even_slices(dtype: DType, rows: int, depth: int) -> None:
    most = MAX_STAGED_BYTES if rows == 1 else MAX_INPUT_ROWS_BYTES
    each, taken = slice_depth(dtype, rows, depth), operand_bytes(dtype, rows, depth)
    whole = dtype.nbytes(rows * operand_stride(rows, depth))
    if whole <= most:
        assert (each, taken) == (depth, whole)
        return
    slices = -(-depth // each)
    assert taken == dtype.nbytes(rows * operand_stride(rows, each)) <= most
    assert slices > 1
    assert each % 32 == 0 and each * slices - depth < 32 * slices
    assert slices == -(-depth // _widest(dtype, rows, most))


def _widest(dtype: DType, rows: int, room: int) -> int:
    """The longest slice that fits."""
    return max(each for each in range(32, 65536, 32) if dtype.nbytes(rows * operand_stride(rows, each)) <= room)
