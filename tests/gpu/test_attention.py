"""Attention and the merge of its partials on the GPU, against the reference VM."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch

from flywheel.ir import BufferKind, DType

pytestmark = pytest.mark.gpu

IN, OUT, ACT, CACHE = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.KV_CACHE
WEIGHT = BufferKind.WEIGHT
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
FLOATS = (F32, F16, BF16)
Conform = Callable[..., None]

HEADS = [
    (1, 1, 64), (4, 1, 64), (8, 2, 128), (5, 1, 16), (6, 2, 8), (7, 1, 128), (32, 8, 64), (3, 3, 96), (2, 1, 256),
    (9, 3, 64), (12, 1, 256), (9, 1, 96), (4, 2, 112), (4, 1, 192), (1, 1, 240),
]  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def window(
    heads: tuple[int, int, int], max_seq: int, start: int, length: int, dtype: DType, partial: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """Buffers, params and tensors: rows outside of the window hold NaN."""
    n_heads, n_kv_heads, head_dim = heads
    cache = (CACHE, dtype, (max_seq, n_kv_heads, head_dim))
    width = head_dim + 2 if partial else head_dim
    buffers = {
        "q": (IN, dtype, (n_heads, head_dim)), "k": cache, "v": cache,
        "y": (OUT, F32 if partial else dtype, (n_heads, width)),
    }  # fmt: skip
    params = {
        "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5,
        "kv_start": start, "kv_len": length,
    }  # fmt: skip
    tensors = {}
    for number, name in enumerate("kv"):
        tensors[name] = torch.full((max_seq, n_kv_heads, head_dim), torch.nan)
        tensors[name][start : start + length] = random(length, n_kv_heads, head_dim, seed=number)
    return buffers, params, tensors


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("max_seq", "start", "length"), [(1, 0, 1), (40, 0, 40), (40, 5, 9), (300, 17, 200), (64, 63, 1)]
)
@pytest.mark.parametrize("partial", [False, True])
def test_attention_over_a_window(
    check_gpu: Conform, dtype: DType, heads: tuple[int, int, int], max_seq: int, start: int, length: int, partial: bool
) -> None:
    buffers, params, tensors = window(heads, max_seq, start, length, dtype, partial)
    split = heads[2] if partial else None
    check_gpu(buffers, [("ATTENTION_TILE", ["q", "k", "v"], "y", params)], tensors, split=split)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threads", [192, 320, 448, 512])
@pytest.mark.parametrize("length", [511, 4096])
def test_attention_over_long_windows(check_gpu: Conform, dtype: DType, threads: int, length: int) -> None:
    """What sums in another order may be off by grows with what is summed up."""
    for heads in ((4, 1, 64), (4, 1, 128), (3, 1, 80), (4, 1, 256), (9, 1, 96)):
        buffers, params, tensors = window(heads, 4096, 4096 - length, length, dtype, True)
        tasks = [("ATTENTION_TILE", ["q", "k", "v"], "y", params)]
        check_gpu(buffers, tasks, tensors, threads=threads, split=heads[2], extra=length * 1e-8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "heads",
    [(2, 1, 128), (3, 1, 64), (12, 1, 128), (9, 3, 64), (4, 1, 16), (3, 1, 96), (4, 2, 256), (2, 1, 112), (2, 1, 192)],
    ids=str,
)
@pytest.mark.parametrize("normed", ["no", "each head", "twice"])
@pytest.mark.parametrize("length", [0, 7, 200])
@pytest.mark.parametrize("by_data", [False, True])
def test_queries_are_normed_and_turned_on_the_way(
    check_gpu: Conform, step: Callable[..., dict[str, Any]], dtype: DType, heads: tuple[int, int, int], normed: str,
    length: int, by_data: bool,
) -> None:
    """A result that the norm's step makes for others too is made there."""
    n_heads, _, head_dim = heads
    width = n_heads * head_dim
    buffers, params, tensors = window(heads, 256, 3, length, dtype, False)
    buffers |= {
        "raw": (IN, dtype, (1, 2 * width)), "q": (ACT, dtype, (1, 2 * width)), "w": (WEIGHT, dtype, (head_dim,)),
        "pos": (IN, DType.I32, (1,)), "z": (OUT, dtype, (1, width)), "y": (OUT, dtype, (1, width)),
    }  # fmt: skip
    steps = [step("COPY", ["in0"], 0, width, dtype, n_off=width, N_tile=width)]
    if normed != "no":
        steps.append(step("RMSNORM", ["s0", "in1"], 1, width, dtype, eps=1e-6, hidden=head_dim))
    rotated = "s0" if normed == "no" else "s1"
    own = {name: params[name] for name in ("n_heads", "n_kv_heads", "head_dim", "scale")}
    steps += [
        step("ROPE", [rotated, "in2"], 2, width, dtype, head_dim=head_dim, theta=1e4),
        step("ATTENTION_TILE", ["s2", "in3", "in4"], "final", width, dtype, **own),
        step("MUL", ["s1" if normed == "twice" else "s2"], {"out": 1}, width, dtype, scale=1.0),
    ]
    task = {"kv_start": 3, "kv_len": length, "recipe": {"steps": steps}}
    tasks = [
        ("MUL", ["raw"], "q", {"scale": 1.0}),
        ("FUSED", ["q", "w", "pos", "k", "v"], ["y", "z"], task),
    ]
    tensors["pos"] = torch.tensor([77], dtype=torch.int32)
    check_gpu(buffers, tasks, tensors, roundings=3, threads=448, by_data=by_data, extra=1e-6)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("heads", [(4, 1, 64), (5, 1, 16)], ids=str)
def test_an_empty_window_gives_nothing(check_gpu: Conform, heads: tuple[int, int, int], partial: bool) -> None:
    for dtype in FLOATS:
        buffers, params, tensors = window(heads, 16, 5, 0, dtype, partial)
        check_gpu(buffers, [("ATTENTION_TILE", ["q", "k", "v"], "y", params)], tensors, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [(4, 1, 64), (6, 2, 8), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_a_mask_is_added_to_the_scores(
    check_gpu: Conform, dtype: DType, heads: tuple[int, int, int], shared: bool, partial: bool
) -> None:
    buffers, params, tensors = window(heads, 48, 3, 40, dtype, partial)
    buffers["mask"] = (IN, F32, (48,) if shared else (heads[0], 48))
    mask = random(*buffers["mask"][2])
    mask[..., 8:30] = -inf
    if not shared:
        mask[1] = -inf  # a head that sees nothing
    tensors["mask"] = mask
    split = heads[2] if partial else None
    check_gpu(buffers, [("ATTENTION_TILE", ["q", "k", "v", "mask"], "y", params)], tensors, split=split)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_large_scores_do_not_overflow(check_gpu: Conform, scale: float) -> None:
    buffers, params, tensors = window((4, 1, 64), 200, 0, 200, F32, False)
    # Scores as large as 1e4 carry their own round-off into the exponent.
    tasks = [("ATTENTION_TILE", ["q", "k", "v"], "y", {**params, "scale": scale})]
    check_gpu(buffers, tasks, tensors, extra=scale * 2e-4)


def parts(count: int, n_heads: int, head_dim: int, empty: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for number in range(count):
        part = random(n_heads, head_dim + 2, seed=number)
        part[:, -2] *= 5
        part[:, -1] = part[:, -1].abs() + 1
        if number >= count - empty:
            part[:, :-2], part[:, -2], part[:, -1] = 0, -inf, 0
        tensors[f"p{number}"] = part
    return tensors


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 2), (4, 16), (32, 64), (7, 128), (3, 5), (2, 256), (3, 80)])
@pytest.mark.parametrize("out", ["F32", "BF16", "F16", "partial"])
@pytest.mark.parametrize("threads", [192, 512])
def test_combine_merges_partials(
    check_gpu: Conform, count: int, n_heads: int, head_dim: int, out: str, threads: int
) -> None:
    tensors = parts(count, n_heads, head_dim, empty=count // 3)
    buffers = dict.fromkeys(tensors, (IN, F32, (n_heads, head_dim + 2)))
    partial = out == "partial"
    y = (OUT, F32 if partial else DType[out], (n_heads, head_dim + 2 * partial))
    params = {"n_heads": n_heads, "head_dim": head_dim} if partial or count % 2 else {}
    tasks = [("ATTENTION_COMBINE", list(tensors), "y", params)]
    check_gpu({**buffers, "y": y}, tasks, tensors, threads=threads, split=head_dim if partial else None)


@pytest.mark.parametrize("partial", [False, True])
def test_combining_empty_parts_gives_nothing(check_gpu: Conform, partial: bool) -> None:
    tensors = parts(3, 4, 64, empty=3)
    buffers = dict.fromkeys(tensors, (IN, F32, (4, 66)))
    y = (OUT, F32, (4, 66 if partial else 64))
    params = {"n_heads": 4, "head_dim": 64}
    check_gpu({**buffers, "y": y}, [("ATTENTION_COMBINE", list(tensors), "y", params)], tensors, exact=True)


@pytest.mark.parametrize("params", [{"n_heads": 4}, {"head_dim": 16}, {}], ids=str)
def test_combine_finds_its_layout(check_gpu: Conform, params: dict[str, int]) -> None:
    tensors = parts(2, 4, 16, empty=0)
    buffers = dict.fromkeys(tensors, (IN, F32, (1, 72)))
    check_gpu({**buffers, "y": (OUT, F32, (64,))}, [("ATTENTION_COMBINE", list(tensors), "y", params)], tensors)


@pytest.mark.parametrize("dtype", FLOATS)
def test_split_attention_equals_its_reference(check_gpu: Conform, dtype: DType) -> None:
    buffers, params, tensors = window((8, 2, 64), 100, 0, 100, dtype, False)
    buffers |= {f"p{number}": (ACT, F32, (8, 66)) for number in range(4)}
    tasks = [
        ("ATTENTION_TILE", ["q", "k", "v"], f"p{number}", {**params, "kv_start": 25 * number, "kv_len": 25})
        for number in range(4)
    ]
    tasks.append(("ATTENTION_COMBINE", [f"p{number}" for number in range(4)], "y", {}))
    check_gpu(buffers, tasks, tensors)
