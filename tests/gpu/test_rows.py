"""Norms, softmax and rope on the GPU, against the reference VM."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch

from flywheel.ir import BufferKind, DType

pytestmark = pytest.mark.gpu

IN, OUT, WEIGHT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.WEIGHT
F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
FLOATS = (F32, F16, BF16)
Conform = Callable[..., None]

ROWS = [(1, 1), (1, 7), (1, 64), (1, 2048), (1, 4096), (1, 20000), (3, 33), (32, 128), (5, 64), (100, 16)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "hidden"), ROWS)
@pytest.mark.parametrize("threads", [192, 512])
def test_rmsnorm(check_gpu: Conform, dtype: DType, rows: int, hidden: int, threads: int) -> None:
    buffers = {
        "x": (IN, dtype, (1, rows * hidden)), "w": (WEIGHT, dtype, (hidden,)), "y": (OUT, dtype, (rows, hidden)),
    }  # fmt: skip
    check_gpu(buffers, [("RMSNORM", ["x", "w"], "y", {"eps": 1e-5, "hidden": hidden})], threads=threads)


@pytest.mark.parametrize("types", [(F32, BF16, BF16), (BF16, F32, F32), (F16, F16, F32), (F32, F32, F16)], ids=str)
@pytest.mark.parametrize("op", ["RMSNORM", "LAYERNORM"])
def test_norms_of_mixed_types(check_gpu: Conform, op: str, types: tuple[DType, ...]) -> None:
    x, w, y = types
    buffers = {"x": (IN, x, (2, 96)), "w": (WEIGHT, w, (96,)), "y": (OUT, y, (2, 96))}
    check_gpu(buffers, [(op, ["x", "w"], "y", {"eps": 1e-3, "hidden": 96})])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), ROWS[1:])
def test_layernorm(check_gpu: Conform, dtype: DType, biased: bool, rows: int, hidden: int) -> None:
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (rows, hidden)), "w": (WEIGHT, dtype, (hidden,)), "y": (OUT, dtype, (rows, hidden)),
    }  # fmt: skip
    inputs = ["x", "w"]
    if biased:
        buffers["b"] = (WEIGHT, dtype, (hidden,))
        inputs.append("b")
    check_gpu(buffers, [("LAYERNORM", inputs, "y", {"eps": 1e-2, "hidden": hidden})])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((5,), {}), ((1, 1), {}), ((3, 5), {}), ((3, 5), {"dim": 0}), ((2, 3, 4, 5), {"dim": 1}),
        ((7, 3, 11), {"dim": -2}), ((2, 3, 4, 5), {"dim": 0}), ((200, 33), {}), ((1, 5000), {}),
        ((2, 5000), {"dim": 1}), ((5000, 2), {"dim": 0}),
    ],
)  # fmt: skip
def test_softmax(check_gpu: Conform, dtype: DType, shape: tuple[int, ...], params: dict[str, int]) -> None:
    check_gpu({"x": (IN, dtype, shape), "y": (OUT, dtype, shape)}, [("SOFTMAX", ["x"], "y", params)])


def test_softmax_of_large_and_infinite_values(check_gpu: Conform) -> None:
    x = torch.tensor([[1e30, 1e30, 0.0], [-inf, 1.0, 2.0], [-inf, -inf, -inf], [nan, 1.0, 2.0], [-1e4, 0.0, 1e4]])
    check_gpu({"x": (IN, F32, (5, 3)), "y": (OUT, F32, (5, 3))}, [("SOFTMAX", ["x"], "y", {})], {"x": x})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim"),
    [(1, 1, 2), (1, 4, 64), (1, 32, 64), (1, 5, 128), (3, 2, 16), (1, 3, 6), (1, 2, 1024)],
)
@pytest.mark.parametrize("position", [0, 1, 4095])
@pytest.mark.parametrize("scaled", [False, True])
def test_rope(
    check_gpu: Conform, step: Callable[..., Any], dtype: DType, rows: int, heads: int, head_dim: int, position: int,
    scaled: bool,
) -> None:  # fmt: skip
    width = rows * heads * head_dim
    buffers = {"x": (IN, dtype, (rows, heads * head_dim)), "pos": (IN, I32, (rows,)), "y": (OUT, dtype, (1, width))}
    params: dict[str, Any] = {"head_dim": head_dim, "theta": 5e5}
    task = ("ROPE", ["x", "pos"], "y", params)
    if scaled:
        params |= {
            "rope_factor": 32.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
            "rope_original_max_position": 8192,
        }  # fmt: skip
        recipe = {"steps": [step("ROPE", ["in0", "in1"], "final", width, dtype, **params)]}
        task = ("FUSED", ["x", "pos"], "y", {"recipe": recipe})
    positions = torch.arange(position, position + rows, dtype=torch.int32)
    # A round-off of a frequency is one of the angle, times the position.
    check_gpu(buffers, [task], {"pos": positions}, extra=(position + rows) * 2.0**-23)
