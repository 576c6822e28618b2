"""Products of quantised matrices on the GPU, against the reference VM, which dequantises them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flywheel.ir import BufferKind, DType
from flywheel.plan.formats import CODES, Code
from flywheel.tensors import TORCH_DTYPES

pytestmark = pytest.mark.gpu

IN, OUT, ACT, WEIGHT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT
F32, F16, BF16, I8, I4, F8 = DType.F32, DType.F16, DType.BF16, DType.I8, DType.I4, DType.F8E4M3
Conform = Callable[..., None]

FORMATS = {
    "int8, rows": (I8, 1, None, F32, False), "int8, a tensor": (I8, 0, None, F32, False),
    "int8, groups": (I8, 1, 128, BF16, False), "int8, groups with zeros": (I8, 1, 128, F16, True),
    "fp8, rows": (F8, 1, None, BF16, False), "fp8, blocks": (F8, 128, 128, F32, False),
    "int4, groups": (I4, 1, 128, BF16, False), "int4, wide groups": (I4, 1, 256, F16, False),
    "int4, groups with zeros": (I4, 1, 128, BF16, True), "int4, rows": (I4, 1, None, F16, False),
}  # fmt: skip
"""dtype, rows that share a scale (0: all), columns that do (None: all), type of the scales, with zero points."""


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
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("depth", "spans"), [(128, "odd"), (1024, "odd"), (1280, "whole"), (2048, "odd")])
def test_products_of_each_format(conform: Conform, name: str, dtype: DType, rows: int, depth: int, spans: str) -> None:
    if FORMATS[name][2] is not None and depth % FORMATS[name][2]:
        depth = 256
    buffers, tensors, params = matrix(name, 80, depth)
    names = ["x", *buffers]
    all_buffers = {"x": (IN, dtype, (rows, depth)), **buffers, "y": (OUT, F32, (rows, 80))}
    conform(all_buffers, tiles(names, params, SPANS[spans], rows, depth, F32), tensors)


def test_every_code_has_formats_here() -> None:
    assert {CODES[dtype] for dtype, *_ in FORMATS.values()} == set(Code)
