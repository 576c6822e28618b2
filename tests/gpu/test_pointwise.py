"""Operations element by element, copies, gathers and integers on the GPU, against the reference VM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
import torch

from flywheel.errors import TensorError
from flywheel.ir import BufferKind, DType

pytestmark = pytest.mark.gpu

IN, OUT, ACT, WEIGHT, CACHE = (
    BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT, BufferKind.KV_CACHE,
)  # fmt: skip
F32, F16, BF16, I32, I8, I4, U8 = (
    DType.F32, DType.F16, DType.BF16, DType.I32, DType.I8, DType.I4, DType.U8,
)  # fmt: skip
FLOATS = (F32, F16, BF16)
MIXED = [(BF16, F32, BF16), (F16, F16, F32), (F32, BF16, F32), (F32, F32, F16)]
Conform = Callable[..., None]


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("op", ["ADD", "MUL", "SILU_MUL"])
@pytest.mark.parametrize("types", [*((dtype,) * 3 for dtype in FLOATS), *MIXED], ids=str)
@pytest.mark.parametrize("size", [1, 7, 1000, 28672])
def test_two_operands(check_gpu: Conform, op: str, types: tuple[DType, ...], size: int) -> None:
    a, b, y = types
    check_gpu({"a": (IN, a, (1, size)), "b": (IN, b, (size,)), "y": (OUT, y, (1, size))}, [(op, ["a", "b"], "y", {})])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["GELU", "MUL"])
@pytest.mark.parametrize("size", [3, 8, 4099])
def test_one_operand(check_gpu: Conform, op: str, dtype: DType, size: int) -> None:
    params = {"scale": 0.3} if op == "MUL" else {}
    check_gpu({"x": (IN, dtype, (size,)), "y": (OUT, dtype, (1, size))}, [(op, ["x"], "y", params)])


@pytest.mark.parametrize("op", ["SILU_MUL", "GELU"])
def test_activations_of_large_and_infinite_values(check_gpu: Conform, op: str) -> None:
    x = torch.tensor([[-inf, -1e4, -100.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 100.0, 1e4]])
    inputs = ["x", "u"] if op == "SILU_MUL" else ["x"]
    buffers = dict.fromkeys(inputs, (IN, F32, (1, 12)))
    check_gpu({**buffers, "y": (OUT, F32, (1, 12))}, [(op, inputs, "y", {})], {"x": x})


@pytest.mark.parametrize("dtype", [*FLOATS, I32, I8])
@pytest.mark.parametrize("size", [1, 16, 129, 4099])
def test_a_copy_is_exact(check_gpu: Conform, dtype: DType, size: int) -> None:
    given = {} if dtype in FLOATS else {"x": integers(-128, 128, 1, size)}
    buffers = {"x": (IN, dtype, (1, size)), "y": (OUT, dtype, (size,))}
    check_gpu(buffers, [("COPY", ["x"], "y", {})], given, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("start", "width"), [(0, 16), (5, 9), (16, 64), (3, 4000), (64, 1)])
def test_a_copy_of_columns_is_exact(check_gpu: Conform, dtype: DType, start: int, width: int) -> None:
    buffers = {"x": (IN, dtype, (3, 1400)), "y": (OUT, dtype, (1, width))}
    check_gpu(buffers, [("COPY", ["x"], "y", {"n_off": start, "N_tile": width})], exact=True)


@pytest.mark.parametrize(("source", "rounded"), [(F32, BF16), (F32, F16), (BF16, F32), (F16, F32)])
def test_a_copy_rounds_to_its_output(check_gpu: Conform, source: DType, rounded: DType) -> None:
    buffers = {"x": (IN, source, (1, 333)), "y": (OUT, rounded, (333,))}
    check_gpu(buffers, [("COPY", ["x"], "y", {})], exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("vocab", "width", "hidden"), [(37, 64, 64), (50, 100, 100), (9, 33, 33), (300, 2048, 2048)])
def test_embed_gathers_rows(check_gpu: Conform, dtype: DType, vocab: int, width: int, hidden: int) -> None:
    buffers = {"ids": (IN, I32, (3,)), "table": (WEIGHT, dtype, (vocab, width)), "y": (OUT, dtype, (3, hidden))}
    ids = torch.tensor([vocab - 1, 0, vocab // 2], dtype=torch.int32)
    check_gpu(buffers, [("EMBED", ["ids", "table"], "y", {"hidden": hidden})], {"ids": ids}, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("vocab", "hidden"), [(37, 64), (48, 100), (7, 24)])
def test_embed_reads_the_table_that_is_the_head_too(check_gpu: Conform, dtype: DType, vocab: int, hidden: int) -> None:
    buffers = {
        "ids": (IN, I32, (1,)), "table": (WEIGHT, dtype, (vocab, hidden)), "x": (ACT, dtype, (1, hidden)),
        "row": (OUT, dtype, (1, hidden)), "y": (OUT, F32, (1, vocab)),
    }  # fmt: skip
    tasks = [
        ("EMBED", ["ids", "table"], "x", {"hidden": hidden}),
        ("COPY", ["x"], "row", {}),
        ("GEMV_TILE", ["x", "table"], "y", {"K": hidden, "n_off": 0, "N_tile": vocab}),
    ]
    for row in (0, vocab // 2, vocab - 1):
        check_gpu(buffers, tasks, {"ids": torch.tensor([row], dtype=torch.int32)})


@pytest.mark.parametrize("bad", [-1, 37, 2**31 - 1])
@pytest.mark.parametrize("tied", [False, True])
def test_an_id_that_is_no_row_is_reported(check_gpu: Conform, bad: int, tied: bool) -> None:
    buffers: dict[str, Any] = {
        "ids": (IN, I32, (1,)), "table": (WEIGHT, BF16, (37, 64)), "x": (IN, BF16, (1, 64)),
        "row": (OUT, BF16, (1, 64)),
    }  # fmt: skip
    tasks: list[Any] = [("EMBED", ["ids", "table"], "row", {"hidden": 64})]
    if tied:
        buffers["y"] = (OUT, F32, (1, 37))
        tasks.append(("GEMV_TILE", ["x", "table"], "y", {"K": 64, "n_off": 0, "N_tile": 37}))
    ids = torch.tensor([bad], dtype=torch.int32)
    with pytest.raises(TensorError, match=f"task 0 .*id {bad} is no row"):
        check_gpu(buffers, tasks, {"ids": ids}, on_gpu_alone=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("qdtype", [I8, U8, I4])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "width", "group"), [(1, 64, 32), (5, 100, 32), (3, 14, 7), (2, 4096, 128)])
def test_dequant_scales_groups_of_rows(
    check_gpu: Conform, dtype: DType, qdtype: DType, zeros: bool, rows: int, width: int, group: int
) -> None:
    groups = -(-width // group)
    buffers: dict[str, Any] = {
        "q": (IN, qdtype, (rows, width)), "scales": (IN, dtype, (rows, groups)), "zeros": (IN, dtype, (rows, groups)),
        "y": (OUT, dtype, (rows, width)),
    }  # fmt: skip
    q = {
        I8: integers(-128, 128, rows, width, dtype=torch.int8),
        U8: integers(0, 256, rows, width, dtype=torch.uint8),
        I4: integers(0, 256, rows, width // 2, dtype=torch.uint8),
    }[qdtype]
    inputs = ["q", "scales", "zeros"] if zeros else ["q", "scales"]
    if not zeros:
        del buffers["zeros"]
    check_gpu(buffers, [("DEQUANT", inputs, "y", {"qdtype": int(qdtype), "group": group})], {"q": q})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "heads", "pos"), [(1, 1, 0), (1, 1, 31), (1, 4, 17), (3, 2, 5)])
@pytest.mark.parametrize("head_dim", [5, 64, 128])
def test_an_append_writes_its_rows_and_no_other(
    check_gpu: Conform, dtype: DType, rows: int, heads: int, pos: int, head_dim: int
) -> None:
    buffers = {"k": (IN, dtype, (rows, heads * head_dim)), "cache": (CACHE, dtype, (32, heads, head_dim))}
    check_gpu(buffers, [("KV_APPEND", ["k", "cache"], "cache", {"pos": pos})], exact=True)


def test_an_append_rounds_to_its_cache(check_gpu: Conform) -> None:
    buffers = {"k": (IN, F32, (1, 64)), "cache": (CACHE, BF16, (8, 1, 64))}
    check_gpu(buffers, [("KV_APPEND", ["k", "cache"], "cache", {"pos": 3})], exact=True)


def logits() -> Iterator[Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))

    for size in (1, 5, 31, 128, 1000, 128256, 152064):
        yield pytest.param(random(1, size), id=f"{size}")
    yield pytest.param(random(3, 1003), id="rows")
    for place in (0, 77_777, 128_255):
        x = random(1, 128256)
        x[0, place] = 100.0
        yield pytest.param(x, id=f"largest at {place}")
    yield pytest.param(torch.zeros(1, 50_000), id="all equal")
    yield pytest.param(torch.full((2, 3000), -inf), id="all -inf")
    yield pytest.param(torch.full((1, 17), -1e30), id="all very low")
    yield pytest.param(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), id="zeros of both signs")
    yield pytest.param(random(1, 2000).round(), id="many ties")
    x = random(2, 5000)
    x[0, 4321] = x[0, 1234] = torch.nan
    x[1, 7] = inf
    yield pytest.param(x, id="nan")
    x = random(4, 3000)
    x[0, ::2] = -inf
    x[1, 2999] = inf
    x[2, 7] = -torch.nan
    x[3] = -inf
    x[3, 2998] = torch.finfo(torch.float16).min
    yield pytest.param(x, id="some infinite")


@pytest.mark.parametrize("x", list(logits()))
@pytest.mark.parametrize("dtype", FLOATS)
def test_argmax_is_the_first_of_the_largest_unless_that_is_not_finite(
    check_gpu: Conform, x: torch.Tensor, dtype: DType
) -> None:
    buffers = {"x": (IN, dtype, tuple(x.shape)), "y": (OUT, I32, (len(x),))}
    check_gpu(buffers, [("SAMPLE_ARGMAX", ["x"], "y", {})], {"x": x}, exact=True)
