"""Products of quantised matrices: a DEQUANT of the rows of a tile, and the product of what it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    program_from_json,
    program_to_json,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict
from flywheel.ir.work import Work, work_of

ROWS, DEPTH, TILE = 24, 32, 8
Shape = tuple[int, ...]
Change = dict[str, Any]


def matrix(
    dtype: DType, rows_per_scale: int, group: int, *, scales: Shape, zeros: bool = False, steps: Change | None = None
) -> MegakernelProgram:
    """Tiles of 8 rows of a [24, 32] matrix; `steps` are changed params of DEQUANT."""
    weight = BufferKind.WEIGHT
    buffers = [
        Buffer(0, "x", BufferKind.IO_INPUT, DType.BF16, (1, DEPTH)),
        Buffer(1, "w", weight, dtype, (ROWS, DEPTH)),
        Buffer(2, "w.scales", weight, DType.F32, scales),
        *([Buffer(3, "w.zeros", weight, DType.I8, scales)] if zeros else []),
        Buffer(9, "y", BufferKind.IO_OUTPUT, DType.BF16, (1, ROWS)),
    ]
    shared = {"qdtype": int(dtype), "group": group, "rows_per_scale": rows_per_scale, **(steps or {})}
    dequant = {
        "op": "DEQUANT", "args": [{"in": 1}, {"in": 2}, *([{"in": 3}] if zeros else [])], "out": 0, "params": shared,
        "out_shape": [TILE, DEPTH], "out_dtype": "F32",
    }  # fmt: skip
    product = {
        "op": "GEMV_TILE", "args": [{"in": 0}, {"s": 0}], "out": "final", "params": {"K": DEPTH, "n_off": 0},
        "out_shape": [1, TILE], "out_dtype": "BF16",
    }  # fmt: skip
    recipe = recipe_from_dict({"steps": [dequant, product]})
    inputs = tuple(range(4 if zeros else 3))
    tasks = [
        Task(place, InstructionKind.FUSED, inputs, (9,), 0, (), {"n_off": n_off, "N_tile": TILE, "recipe": recipe}, 0)
        for place, n_off in enumerate(range(0, ROWS, TILE))
    ]
    return MegakernelProgram(target=TARGETS["h100"], buffers=buffers, counters=[Counter(0)], tasks=tasks)


FORMATS = {
    "a tensor": matrix(DType.F8E4M3, ROWS, DEPTH, scales=(1, 1)),
    "rows": matrix(DType.I8, 1, DEPTH, scales=(ROWS, 1)),
    "groups": matrix(DType.I4, 1, 16, scales=(ROWS, 2)),
    "groups with zeros": matrix(DType.I4, 1, 16, scales=(ROWS, 2), zeros=True),
    "blocks": matrix(DType.F8E4M3, 16, 16, scales=(2, 2)),
}

FAULTS = {
    "scales of too few rows": (matrix(DType.I8, 1, DEPTH, scales=(ROWS - 1, 1)), "operand-size"),
    "scales of blocks that are rounded down": (matrix(DType.F8E4M3, 16, 16, scales=(1, 2)), "operand-size"),
    "groups that do not divide K": (matrix(DType.I4, 1, 24, scales=(ROWS, 2)), "operand-size"),
    "a group longer than K": (matrix(DType.I4, 1, 64, scales=(ROWS, 1)), "operand-size"),
    "rows past the matrix": (matrix(DType.I8, 1, DEPTH, scales=(ROWS, 1), steps={"n_off": 20}), "tile-bounds"),
    "more rows than the product takes": (
        matrix(DType.I8, 1, DEPTH, scales=(ROWS, 1), steps={"N_tile": 4}), "operand-size",
    ),
    "integers called floats": (
        matrix(DType.I8, 1, DEPTH, scales=(ROWS, 1), steps={"qdtype": int(DType.F8E4M3)}), "operand-size",
    ),
    "floats called integers": (
        matrix(DType.F8E4M3, 1, DEPTH, scales=(ROWS, 1), steps={"qdtype": int(DType.I8)}), "operand-size",
    ),
    "no rows a scale": (matrix(DType.I8, 0, DEPTH, scales=(ROWS, 1)), "bad-recipe"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_of_a_quantised_matrix_is_accepted(name: str) -> None:
    result = validate(FORMATS[name], strict=True)
    assert result.errors == result.warnings == ()
    assert validate(program_from_json(program_to_json(FORMATS[name])), strict=True).ok


@pytest.mark.parametrize("name", FAULTS)
def test_scales_rows_and_groups_out_of_bounds_are_rejected(name: str) -> None:
    program, code = FAULTS[name]
    assert code in {finding.code for finding in validate(program, strict=True).errors}


def test_a_tile_past_the_rows_of_the_matrix_is_named_with_its_bound() -> None:
    program = FORMATS["groups"]
    last = program.tasks[-1]
    wide = [*program.tasks[:-1], replace(last, params={**last.params, "n_off": 20})]
    messages = [finding.message for finding in validate(replace(program, tasks=wide), strict=True).errors]
    assert any("n_off + N_tile = 28 is past the 24 rows of q (w [24, 32])" in message for message in messages)


def test_a_group_that_does_not_divide_K_is_named_with_both() -> None:
    (finding, *_) = validate(FAULTS["groups that do not divide K"][0], strict=True).errors
    assert "q (w [24, 32]) has rows of 32, not a multiple of group=24" in finding.message


def test_only_steps_have_rows_per_scale() -> None:
    buffers = [
        Buffer(0, "q", BufferKind.WEIGHT, DType.I8, (2, 16)), Buffer(1, "s", BufferKind.WEIGHT, DType.F32, (2, 1)),
        Buffer(9, "y", BufferKind.IO_OUTPUT, DType.F32, (2, 16)),
    ]  # fmt: skip
    params = {"qdtype": int(DType.I8), "group": 16, "rows_per_scale": 1}
    task = Task(0, InstructionKind.DEQUANT, (0, 1), (9,), 0, (), params, 0)
    program = MegakernelProgram(target=TARGETS["h100"], buffers=buffers, counters=[Counter(0)], tasks=[task])
    assert {finding.code for finding in validate(program, strict=True).errors} == {"bad-param"}


def test_a_tile_reads_its_rows_of_codes_and_of_scales() -> None:
    groups, blocks = FORMATS["groups with zeros"], FORMATS["blocks"]
    flops = 2 * TILE * DEPTH
    read = {"read": DEPTH * 2, "written": TILE * 2, "flops": 2 * flops}

    def of(program: MegakernelProgram) -> Work:
        return work_of(program.tasks[0], {each.id: each for each in program.buffers})

    assert of(groups) == Work(streamed=TILE * DEPTH // 2 + TILE * 2 * (4 + 1), **read)
    assert of(blocks) == Work(streamed=TILE * DEPTH + 2 * 4, **read)
