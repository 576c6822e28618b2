"""Matrix tiles on the GPU, against the reference VM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flywheel.ir import BufferKind, DType

pytestmark = pytest.mark.gpu

IN, OUT, ACT, WEIGHT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
FLOATS = (F32, F16, BF16)
Conform = Callable[..., None]

SPLITS = {
    "whole": [(0, 40)],
    "aligned": [(0, 16), (16, 16), (32, 8)],
    "odd": [(0, 5), (5, 16), (21, 18), (39, 1)],
}


def tiles(op: str, inputs: list[str], spans: list[tuple[int, int]], **params: int) -> list[Any]:
    return [(op, inputs, "y", {**params, "n_off": start, "N_tile": width}) for start, width in spans]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spans", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("depth", [1, 16, 17, 33, 100, 2048])
@pytest.mark.parametrize("biased", [False, True])
def test_gemv_tiles(check_gpu: Conform, dtype: DType, spans: list[tuple[int, int]], depth: int, biased: bool) -> None:
    buffers = {
        "x": (IN, dtype, (1, depth)), "w": (WEIGHT, dtype, (40, depth)), "b": (WEIGHT, dtype, (40,)),
        "y": (OUT, dtype, (1, 40)),
    }  # fmt: skip
    if not biased:
        del buffers["b"]
    check_gpu(buffers, tiles("GEMV_TILE", ["x", "w", "b"] if biased else ["x", "w"], spans, K=depth))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threads", [192, 320, 448, 512])
@pytest.mark.parametrize("chunk", [4096, 16384])
@pytest.mark.parametrize(("depth", "width"), [(64, 1000), (4096, 300), (14336, 40), (2064, 129)])
def test_gemv_of_many_chunks_and_passes(
    check_gpu: Conform, dtype: DType, threads: int, chunk: int, depth: int, width: int
) -> None:
    buffers = {"x": (IN, dtype, (1, depth)), "w": (WEIGHT, dtype, (width, depth)), "y": (OUT, F32, (1, width))}
    spans = [(0, width // 3), (width // 3, width - width // 3)]
    check_gpu(buffers, tiles("GEMV_TILE", ["x", "w"], spans, K=depth), threads=threads, chunk_bytes=chunk)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("spans", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("depth", [16, 40, 512])
@pytest.mark.parametrize("biased", [False, True])
def test_gemm_tiles_of_several_rows(
    check_gpu: Conform, dtype: DType, rows: int, spans: list[tuple[int, int]], depth: int, biased: bool
) -> None:
    buffers = {
        "x": (IN, dtype, (rows, depth)), "w": (WEIGHT, dtype, (40, depth)), "b": (WEIGHT, dtype, (40,)),
        "y": (OUT, dtype, (rows, 40)),
    }  # fmt: skip
    if not biased:
        del buffers["b"]
    inputs = ["x", "w", "b"] if biased else ["x", "w"]
    check_gpu(buffers, tiles("GEMM_TILE", inputs, spans, K=depth, M_tile=rows))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("depth", "width"), [(32, 64), (20, 50), (16, 17)])
def test_a_matrix_may_be_wider_than_its_operand(
    check_gpu: Conform, dtype: DType, rows: int, depth: int, width: int
) -> None:
    buffers = {"x": (IN, dtype, (rows, depth)), "w": (WEIGHT, dtype, (40, width)), "y": (OUT, F32, (rows, 40))}
    check_gpu(buffers, tiles("GEMM_TILE", ["x", "w"], SPLITS["odd"], K=depth, M_tile=rows))


LONG = {"one row": (1, 100000), "an odd row": (1, 50001), "rows": (8, 14336), "odd rows": (7, 20011)}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "depth"), LONG.values(), ids=LONG)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [192, 448])
def test_operands_longer_than_the_staging_area(
    check_gpu: Conform, dtype: DType, rows: int, depth: int, biased: bool, threads: int
) -> None:
    """Slices of K, tile after tile on the same SM, some of more than one pass."""
    width = 400
    buffers = {
        "x": (IN, dtype, (rows, depth)), "w": (WEIGHT, dtype, (width, depth)), "b": (WEIGHT, dtype, (width,)),
        "y": (OUT, dtype, (rows, width)),
    }  # fmt: skip
    if not biased:
        del buffers["b"]
    inputs = ["x", "w", "b"] if biased else ["x", "w"]
    spans = [(0, 5), (5, 300), (305, 32), (337, 63)]
    check_gpu(buffers, tiles("GEMM_TILE", inputs, spans, K=depth, M_tile=rows), threads=threads)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "depth"), [(8, 3840), (4, 7680), (8, 4096), (3, 4100), (2, 8191)])
@pytest.mark.parametrize("threads", [192, 448])
def test_short_slices_that_take_each_other_s_place(
    check_gpu: Conform, monkeypatch: pytest.MonkeyPatch, dtype: DType, rows: int, depth: int, threads: int
) -> None:
    """Each of fewer chunks than warps that multiply; even ones of a narrow tile are in one segment."""
    monkeypatch.setattr("flywheel.plan.staging.MAX_INPUT_ROWS_BYTES", 16384)
    buffers = {
        "given": (IN, dtype, (rows, depth)), "x": (ACT, dtype, (rows, depth)), "w": (WEIGHT, dtype, (80, depth)),
        "y": (OUT, dtype, (rows, 80)),
    }  # fmt: skip
    spans = [(0, 16), (16, 50), (66, 14)]
    tasks = [("GELU", ["given"], "x", {}), *tiles("GEMM_TILE", ["x", "w"], spans, K=depth, M_tile=rows)]
    check_gpu(buffers, tasks, roundings=1, sms=3, parallel=True, threads=threads, by_data=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "depth"), [(1, 50000), (8, 14336), (7, 20011)])
@pytest.mark.parametrize("by_data", [False, True])
def test_slices_of_what_other_tasks_write(
    check_gpu: Conform, dtype: DType, rows: int, depth: int, by_data: bool
) -> None:
    """A residual and a gate taken in by the last slice, of an activation that another SM makes meanwhile."""
    buffers = {
        "given": (IN, dtype, (rows, depth)), "x": (ACT, dtype, (rows, depth)), "w": (WEIGHT, dtype, (64, depth)),
        "v": (WEIGHT, dtype, (64, depth)), "r": (IN, dtype, (rows, 64)), "y": (OUT, dtype, (rows, 64)),
        "z": (OUT, dtype, (rows, 64)),
    }  # fmt: skip

    def made(op: str, args: list[dict[str, int]], out: Any, width: int, **params: int) -> dict[str, Any]:
        shape = [rows, width]
        return {"op": op, "args": args, "out": out, "params": params, "out_shape": shape, "out_dtype": dtype.name}

    tasks: list[Any] = [("GELU", ["given"], "x", {})]
    for start, width in ((0, 31), (31, 33)):
        tile = {"n_off": start, "N_tile": width, "M_tile": rows}
        first = made("GEMM_TILE", [{"in": 0}, {"in": 1}], 0, width, K=depth, M_tile=rows)
        residual = [
            first, made("COPY", [{"in": 2}], 1, width, M_tile=rows),
            made("ADD", [{"s": 0}, {"s": 1}], "final", width),
        ]  # fmt: skip
        gated = [
            first, made("GEMM_TILE", [{"in": 0}, {"in": 2}], 1, width, K=depth, M_tile=rows),
            made("SILU_MUL", [{"s": 0}, {"s": 1}], "final", width),
        ]  # fmt: skip
        tasks.append(("FUSED", ["x", "w", "r"], "y", {**tile, "recipe": {"steps": residual}}))
        tasks.append(("FUSED", ["x", "w", "v"], "z", {**tile, "recipe": {"steps": gated}}))
    check_gpu(buffers, tasks, roundings=3, sms=3, parallel=True, threads=448, by_data=by_data)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("depth", [40, 64, 2048])
def test_rows_that_a_step_before_has_made(check_gpu: Conform, dtype: DType, depth: int) -> None:
    """They lie in shared memory or in the SM's workspace."""
    buffers = {"x": (IN, dtype, (3, depth)), "w": (WEIGHT, dtype, (32, depth)), "y": (OUT, dtype, (3, 32))}

    def made(op: str, args: list[dict[str, int]], out: Any, width: int, **params: int) -> dict[str, Any]:
        return {"op": op, "args": args, "out": out, "params": params, "out_shape": [3, width], "out_dtype": dtype.name}

    steps = [
        made("GELU", [{"in": 0}], 0, depth), made("GELU", [{"s": 0}], 1, depth),
        made("GEMM_TILE", [{"s": 0}, {"in": 1}], 2, 32, K=depth, M_tile=3, n_off=0, N_tile=32),
        made("GEMM_TILE", [{"s": 1}, {"in": 1}], 3, 32, K=depth, M_tile=3, n_off=0, N_tile=32),
        made("ADD", [{"s": 2}, {"s": 3}], "final", 32),
    ]  # fmt: skip
    check_gpu(buffers, [("FUSED", ["x", "w"], "y", {"recipe": {"steps": steps}})], roundings=4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_operand_stays_staged_between_tiles(check_gpu: Conform, dtype: DType) -> None:
    """Tiles of two matrices and two operands in turn, on the same SMs."""
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (1, 96)), "x2": (IN, dtype, (1, 96)), "w": (WEIGHT, dtype, (64, 96)),
        "w2": (WEIGHT, dtype, (64, 96)), "y": (OUT, F32, (1, 64)), "y2": (OUT, F32, (1, 64)), "y3": (OUT, F32, (1, 64)),
    }  # fmt: skip
    tasks = [
        ("GEMV_TILE", inputs, out, {"K": 96, "n_off": start, "N_tile": 32})
        for start in (0, 32)
        for inputs, out in ((["x", "w"], "y"), (["x", "w2"], "y2"), (["x2", "w"], "y3"))
    ]
    check_gpu(buffers, tasks, sms=1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_chain_of_layers_over_all_sms(check_gpu: Conform, dtype: DType, depth: int) -> None:
    """Each layer waits for all tiles of the one before, so that a lost or early signal shows."""
    layers, width = 6, 256
    buffers: dict[str, Any] = {"x0": (IN, dtype, (1, width))}
    tasks: list[Any] = []
    for layer in range(layers):
        kind = OUT if layer == layers - 1 else ACT
        buffers[f"w{layer}"] = (WEIGHT, dtype, (width, width))
        buffers[f"x{layer + 1}"] = (kind, dtype, (1, width))
        tasks += [
            ("GEMV_TILE", [f"x{layer}", f"w{layer}"], f"x{layer + 1}", {"K": width, "n_off": start, "N_tile": 24})
            for start in range(0, width - 16, 24)
        ]
        tasks.append(
            ("GEMV_TILE", [f"x{layer}", f"w{layer}"], f"x{layer + 1}", {"K": width, "n_off": 240, "N_tile": 16})
        )
    check_gpu(buffers, tasks, sms=16, parallel=True, pipelining_depth=depth, roundings=layers)
