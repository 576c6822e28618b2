"""Products of quantised matrices on the GPU, against the reference VM, which dequantises them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch

from flywheel.errors import InvalidProgramError
from flywheel.ir import BufferKind, DType
from flywheel.plan.formats import CODES
from flywheel.tensors import TORCH_DTYPES

pytestmark = pytest.mark.gpu

IN, OUT, ACT, WEIGHT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT
F32, F16, BF16, I8, I4, F8 = DType.F32, DType.F16, DType.BF16, DType.I8, DType.I4, DType.F8E4M3
Conform = Callable[..., None]
Run = Callable[..., dict[str, torch.Tensor]]

FORMATS = {
    "int8, rows": (I8, 1, None, F32, False), "int8, a tensor": (I8, 0, None, F32, False),
    "int8, groups": (I8, 1, 128, BF16, False), "int8, groups with zeros": (I8, 1, 128, F16, True),
    "fp8, rows": (F8, 1, None, BF16, False), "fp8, blocks": (F8, 128, 128, F32, False),
    "int4, groups": (I4, 1, 128, BF16, False), "int4, wide groups": (I4, 1, 256, F16, False),
    "int4, groups with zeros": (I4, 1, 128, BF16, True), "int4, rows": (I4, 1, None, F16, False),
    "int8, blocks": (I8, 128, 128, F32, False), "int8, groups of F16": (I8, 1, 128, F16, False),
    "int8, groups with zeros, BF16": (I8, 1, 128, BF16, True), "fp8, groups": (F8, 1, 128, BF16, False),
    "fp8, groups of F16": (F8, 1, 256, F16, False), "int4, groups with zeros, F16": (I4, 1, 128, F16, True),
}  # fmt: skip
"""dtype, rows that share a scale (0: all), columns that do (None: all), type of the scales, with zero points."""


DIGITS = 4e-5
"""Share of the largest element that a product of int4 may be off by, where one row of F16 is rounded to 16 bits.

An element is off by up to 2^-15 of the largest of 256, which is 3.2 times the mean size here. Such errors add up to
1.1e-5 of the largest sum, and some of 80 sums have 3.5 times as much. Most elements of BF16 are exact in 16 bits."""


def matrix(name: str, rows: int, depth: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(buffers, tensors, params of its DEQUANT) of a random matrix `w`, of every code there is."""
    dtype, shared, group, scale, zeros = FORMATS[name]
    draw = torch.Generator().manual_seed(seed)
    shared, group = shared or rows, group or depth
    shape = (-(-rows // shared), depth // group)
    buffers = {"w": (WEIGHT, dtype, (rows, depth)), "w.scales": (WEIGHT, scale, shape)}
    tensors = {"w.scales": (torch.rand(shape, generator=draw) + 0.25) / depth**0.5 / (8 if dtype is not I8 else 128)}
    codes = torch.randint(0, 256, (rows, depth if dtype is not I4 else depth // 2), generator=draw).to(torch.uint8)
    if dtype is F8:
        codes = torch.where(codes & 0x7F == 0x7F, 0x12, codes).to(torch.uint8)
        tensors["w.scales"] /= 16
    tensors["w"] = codes if dtype is I4 else codes.view(TORCH_DTYPES[dtype])
    if zeros:
        most = 8 if dtype is I4 else 128
        buffers["w.zeros"] = (WEIGHT, I8, shape)
        tensors["w.zeros"] = torch.randint(-most, most, shape, generator=draw).to(torch.int8)
    return buffers, tensors, {"qdtype": int(dtype), "group": group, "rows_per_scale": shared}


def tiles(
    names: Sequence[str], params: dict[str, Any], spans: Sequence[tuple[int, int]], rows: int, depth: int, out: DType
) -> list[Any]:
    """A task for each tile of `x @ w.T`."""
    tasks = []
    weights = [{"in": 1 + place} for place in range(len(names) - 1)]
    for start, width in spans:
        dequant = {
            "op": "DEQUANT", "args": weights, "out": 0, "params": params, "out_shape": [width, depth],
            "out_dtype": "F32",
        }  # fmt: skip
        product = {
            "op": "GEMM_TILE", "args": [{"in": 0}, {"s": 0}], "out": "final",
            "params": {"K": depth, "n_off": 0, "M_tile": rows},
            "out_shape": [rows, width], "out_dtype": out.name,
        }  # fmt: skip
        given = {"n_off": start, "N_tile": width, "recipe": {"steps": [dequant, product]}}
        tasks.append(("FUSED", list(names), "y", given | ({"M_tile": rows} if rows > 1 else {})))
    return tasks


SPANS = {"whole": [(0, 80)], "odd": [(0, 5), (5, 16), (21, 58), (79, 1)]}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 1), (BF16, 8), (F16, 1), (F16, 3)])
@pytest.mark.parametrize(("depth", "spans"), [(128, "odd"), (1024, "odd"), (1280, "whole"), (2048, "odd")])
def test_products_of_each_format(
    check_gpu: Conform, name: str, dtype: DType, rows: int, depth: int, spans: str
) -> None:
    if FORMATS[name][2] is not None and depth % FORMATS[name][2]:
        depth = 256
    buffers, tensors, params = matrix(name, 80, depth)
    names = ["x", *buffers]
    all_buffers = {"x": (IN, dtype, (rows, depth)), **buffers, "y": (OUT, F32, (rows, 80))}
    extra = DIGITS if rows == 1 and dtype is F16 and FORMATS[name][0] is I4 else 0.0
    check_gpu(all_buffers, tiles(names, params, SPANS[spans], rows, depth, F32), tensors, extra=extra)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("name", ["int8, rows", "int4, groups"])
def test_operands_that_come_in_slices(
    check_gpu: Conform, monkeypatch: pytest.MonkeyPatch, name: str, slices: int
) -> None:
    """Of whole units, each in the place of the one before it, in tiles of one row block and of more."""
    monkeypatch.setattr("flywheel.plan.staging.MAX_INPUT_ROWS_BYTES", 3 * 2 * 1100 * slices)
    buffers, tensors, params = matrix(name, 80, 2560)
    all_buffers = {"given": (IN, BF16, (3, 2560)), "x": (ACT, BF16, (3, 2560)), **buffers, "y": (OUT, F32, (3, 80))}
    tasks = [("GELU", ["given"], "x", {}), *tiles(["x", *buffers], params, [(0, 16), (16, 50), (66, 14)], 3, 2560, F32)]
    check_gpu(all_buffers, tasks, tensors, roundings=1)


@pytest.mark.parametrize("name", ["int4, groups with zeros", "fp8, rows", "fp8, blocks"])
def test_one_row_with_scales_in_slices(check_gpu: Conform, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A slice of one unit at a time, with its own scales."""
    monkeypatch.setattr("flywheel.plan.staging.MAX_STAGED_BYTES", 2 * 1100)
    buffers, tensors, params = matrix(name, 80, 2432)
    all_buffers = {"given": (IN, BF16, (1, 2432)), "x": (ACT, BF16, (1, 2432)), **buffers, "y": (OUT, F32, (1, 80))}
    tasks = [("GELU", ["given"], "x", {}), *tiles(["x", *buffers], params, [(0, 16), (16, 64)], 1, 2432, F32)]
    check_gpu(all_buffers, tasks, tensors, roundings=1, by_data=True)


@pytest.mark.parametrize("name", ["int4, rows", "fp8, rows"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_blocks_of_zeros_of_small_numbers_and_of_one_large_one(check_gpu: Conform, name: str, dtype: DType) -> None:
    """Blocks of 256 elements have scales of their own. 255 elements are off by up to 2^-15 of 1000, which is 3e-2; with
    weights of 2e-2 such errors add up to about 4e-3 of sums of up to 30."""
    buffers, tensors, params = matrix(name, 16, 1024)
    x = torch.zeros(1, 1024)
    x[0, 256:512] = torch.linspace(-1, 1, 256) * 2.0**-12
    x[0, 512:768] = torch.linspace(-1, 1, 256) * 0.5
    x[0, 600] = 1000.0
    x[0, 768:] = -(2.0 - 2.0**-7)  # its mantissa is all ones
    all_buffers = {"x": (IN, dtype, (1, 1024)), **buffers, "y": (OUT, F32, (1, 16))}
    tasks = tiles(["x", *buffers], params, [(0, 16)], 1, 1024, F32)
    check_gpu(all_buffers, tasks, {**tensors, "x": x}, extra=4e-4 if FORMATS[name][0] is I4 else 0.0)


@pytest.mark.parametrize("size", [2.0**-100, 2.0**30, 2.0**60])
def test_fp8_takes_bf16_that_f16_has_no_place_for(check_gpu: Conform, size: float) -> None:
    """With elements 2^-20 times as large, which keep all of their bits. More than a thread stages at once."""
    buffers, tensors, params = matrix("fp8, rows", 16, 9216)
    x = torch.linspace(-1, 1, 9216)[None] * size
    x[0, ::3] *= 2.0**-20
    all_buffers = {"x": (IN, BF16, (1, 9216)), **buffers, "y": (OUT, F32, (1, 16))}
    check_gpu(all_buffers, tiles(["x", *buffers], params, [(0, 16)], 1, 9216, F32), {**tensors, "x": x})


@pytest.mark.parametrize("value", [inf, nan])
@pytest.mark.parametrize("name", ["int4, groups", "fp8, rows", "fp8, blocks"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_is_no_number_makes_no_number(launched: Run, name: str, dtype: DType, value: float) -> None:
    buffers, tensors, params = matrix(name, 16, 512)
    all_buffers = {"x": (IN, dtype, (1, 512)), **buffers, "y": (OUT, F32, (1, 16))}
    x = torch.ones(1, 512)
    x[0, 300] = value
    found = launched(all_buffers, tiles(["x", *buffers], params, [(0, 16)], 1, 512, F32), {**tensors, "x": x})
    assert not found["y"].isfinite().any()


@pytest.mark.parametrize(("rows", "hidden"), [(1, 1024), (2, 1024), (1, 1280), (1, 1664)])
def test_a_gated_projection_of_two_quantised_matrices_takes_a_norm_and_a_residual(
    check_gpu: Conform, rows: int, hidden: int
) -> None:
    """SwiGLU of two matrices behind a norm, and a product with what it is added to, which is not quantised. The
    64 threads that stage the norm's row have two groups of 1,024 elements each, three of 1,280 and up to four of 1,664.
    """
    wide = 32
    gates, gate_tensors, params = matrix("int4, groups", wide, hidden, 1)
    ups, up_tensors, _ = matrix("int4, groups", wide, hidden, 2)
    named = {"g": gates["w"], "g.scales": gates["w.scales"], "u": ups["w"], "u.scales": ups["w.scales"]}
    tensors = {
        "g": gate_tensors["w"], "g.scales": gate_tensors["w.scales"], "u": up_tensors["w"],
        "u.scales": up_tensors["w.scales"],
    }  # fmt: skip
    op, over = ("GEMV_TILE", {}) if rows == 1 else ("GEMM_TILE", {"M_tile": rows})

    def step(op: str, args: list[Any], out: Any, shape: list[int], dtype: DType, **its: Any) -> dict[str, Any]:
        return {"op": op, "args": args, "out": out, "params": its, "out_shape": shape, "out_dtype": dtype.name}

    def rows_of(q: int, slot: int) -> dict[str, Any]:
        return step("DEQUANT", [{"in": q}, {"in": q + 1}], slot, [wide, hidden], F32, **params)

    steps = [
        step("RMSNORM", [{"in": 0}, {"in": 1}], 0, [rows, hidden], BF16, hidden=hidden, eps=1e-5),
        rows_of(2, 1),
        step(op, [{"s": 0}, {"s": 1}], 2, [rows, wide], BF16, K=hidden, n_off=0, **over),
        rows_of(4, 3),
        step(op, [{"s": 0}, {"s": 3}], 4, [rows, wide], BF16, K=hidden, n_off=0, **over),
        step("SILU_MUL", [{"s": 2}, {"s": 4}], "final", [rows, wide], BF16),
    ]
    add = [
        step(op, [{"in": 0}, {"in": 1}], 0, [rows, 16], BF16, K=wide, **over),
        step("COPY", [{"in": 2}], 1, [rows, 16], BF16, **over),
        step("ADD", [{"s": 0}, {"s": 1}], "final", [rows, 16], BF16),
    ]
    buffers = {
        "x": (IN, BF16, (rows, hidden)), "n": (WEIGHT, BF16, (hidden,)), **named, "h": (ACT, BF16, (rows, wide)),
        "d": (WEIGHT, BF16, (16, wide)), "r": (IN, BF16, (rows, 16)), "y": (OUT, BF16, (rows, 16)),
    }  # fmt: skip
    given = {"n_off": 0, "N_tile": wide, "recipe": {"steps": steps}, **over}
    last = {"n_off": 0, "N_tile": 16, "recipe": {"steps": add}, **over}
    tasks = [("FUSED", ["x", "n", *named], "h", given), ("FUSED", ["h", "d", "r"], "y", last)]
    check_gpu(buffers, tasks, tensors, roundings=4)


REFUSED = {
    "groups of 64": ({"group": 64}, (80, 16), BF16, "by groups of 64, not a multiple of 128"),
    "scales of groups that are F32": ({"group": 128}, (80, 8), F32, "with F32 scales"),
    "blocks of 8 rows": ({"group": 128, "rows_per_scale": 8}, (10, 8), F32, "by blocks of 8 x 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(check_gpu: Conform, name: str) -> None:
    changed, shape, scale, text = REFUSED[name]
    buffers, tensors, params = matrix("int8, groups", 80, 1024)
    buffers["w.scales"] = (WEIGHT, scale, shape)
    tensors["w.scales"] = torch.ones(shape)
    all_buffers = {"x": (IN, BF16, (1, 1024)), **buffers, "y": (OUT, F32, (1, 80))}
    tasks = tiles(["x", *buffers], params | changed, [(0, 80)], 1, 1024, F32)
    with pytest.raises(InvalidProgramError, match=rf"task 0 \(t0\): FUSED .*{text}"):
        check_gpu(all_buffers, tasks, tensors)


def test_every_code_has_formats_here() -> None:
    assert {dtype for dtype, *_ in FORMATS.values()} == set(CODES.values())
