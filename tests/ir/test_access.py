from __future__ import annotations

from typing import Any

import pytest
from spelled import spelled_steps

from flywheel.ir import Buffer, BufferKind, DType, InstructionKind, Task
from flywheel.ir.access import multi_row_buffers, read_regions, tile, written_region

_K = InstructionKind
TILE = {"n_off": 16, "N_tile": 8}


def task(op: InstructionKind, params: dict[str, Any]) -> Task:
    return Task(0, op, (0, 1, 2), (3,), 0, (), params)


def fused(params: dict[str, Any], *steps: dict[str, Any]) -> Task:
    return task(_K.FUSED, {**params, "recipe": spelled_steps(steps)})


def test_a_tile_needs_both_params_and_ints() -> None:
    assert tile(TILE) == (16, 24)
    for params in ({}, {"n_off": 0}, {"N_tile": 8}, {"n_off": True, "N_tile": 8}, {"n_off": 0, "N_tile": 8.0}):
        assert tile(params) is None


@pytest.mark.parametrize("op", [_K.GEMV_TILE, _K.GEMM_TILE, _K.FUSED])
def test_tiled_operations_write_their_columns(op: InstructionKind) -> None:
    assert written_region(task(op, TILE)) == (16, 24)
    assert written_region(task(op, {})) is None


@pytest.mark.parametrize("op", [_K.COPY, _K.ADD, _K.ATTENTION_TILE, _K.KV_APPEND])
def test_other_operations_write_the_whole(op: InstructionKind) -> None:
    assert written_region(task(op, TILE)) is None


def test_a_copy_reads_the_columns_that_it_names() -> None:
    assert read_regions(task(_K.COPY, TILE), 0) == [(16, 24)]
    assert read_regions(task(_K.COPY, {}), 0) is None


def test_matrix_tiles_read_their_vector_whole() -> None:
    assert read_regions(task(_K.GEMV_TILE, TILE), 0) is None


def test_a_recipe_reads_columns_where_only_slices_use_an_input() -> None:
    own = {"op": "COPY", "args": [{"in": 0}], "params": {}}
    named = {"op": "COPY", "args": [{"in": 0}], "params": {"n_off": 40, "N_tile": 4}}
    shifted = {"op": "COPY", "args": [{"in": 0}], "params": {"n_off": 40}}
    whole = {"op": "GELU", "args": [{"in": 0}]}
    other = {"op": "GELU", "args": [{"in": 1}]}
    assert read_regions(fused(TILE, own, other), 0) == [(16, 24)]
    assert read_regions(fused(TILE, own, named, other), 0) == [(16, 24), (40, 44)]
    assert read_regions(fused(TILE, shifted), 0) == [(40, 48)]
    assert read_regions(fused({}, own), 0) is None
    assert read_regions(fused(TILE, own, whole), 0) is None
    assert read_regions(fused(TILE, own, other), 1) is None


def test_an_input_that_no_step_uses_is_not_read() -> None:
    assert read_regions(fused(TILE, {"op": "GELU", "args": [{"in": 1}]}), 0) == []


def test_rows_of_matrix_tiles_are_counted_and_disagreement_told() -> None:
    def buffer(number: int, shape: tuple[int, ...]) -> Buffer:
        return Buffer(number, "b", BufferKind.ACTIVATION, DType.F32, shape)

    buffers = {b.id: b for b in (buffer(0, (1, 8)), buffer(1, (3, 8)), buffer(2, (2, 8)), buffer(3, (3, 16)))}

    def gemm(x: int) -> Task:
        return Task(0, _K.GEMM_TILE, (x, 9), (3,), 0, (), {"K": 8, "M_tile": 1, **TILE})

    assert multi_row_buffers([gemm(0)], buffers) == {}
    assert multi_row_buffers([gemm(1), gemm(1)], buffers) == {3: 3}
    assert multi_row_buffers([gemm(1), gemm(2)], buffers) == {3: None}
    assert multi_row_buffers([gemm(1), gemm(0)], buffers) == {3: None}


def test_a_fused_tile_of_several_rows_has_columns_of_each() -> None:
    buffers = {3: Buffer(3, "y", BufferKind.ACTIVATION, DType.F32, (4, 32))}
    several, other, flat = (fused({**TILE, **rows}) for rows in ({"M_tile": 4}, {"M_tile": 2}, {"M_tile": 1}))
    assert written_region(several) == (16, 24)
    assert multi_row_buffers([several, several], buffers) == {3: 4}
    assert multi_row_buffers([several, other], buffers) == {3: None}
    assert multi_row_buffers([several, flat], buffers) == {3: 4}
    assert multi_row_buffers([flat, fused({"M_tile": 4})], buffers) == {}


def test_a_copy_of_columns_of_several_rows_reads_the_whole() -> None:
    step = {"op": "COPY", "args": [{"in": 0}], "out": 0, "params": {"M_tile": 2}}
    assert read_regions(fused(TILE, step), 0) is None
    assert read_regions(fused(TILE, {**step, "params": {}}), 0) == [(16, 24)]
    assert read_regions(task(_K.COPY, {**TILE, "M_tile": 2}), 0) is None
