"""FUSED recipes on the GPU, against the reference VM, which knows nothing of fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flywheel.ir import BufferKind, DType, KvRows

pytestmark = pytest.mark.gpu

IN, OUT, ACT, WEIGHT, CACHE = (
    BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.ACTIVATION, BufferKind.WEIGHT, BufferKind.KV_CACHE,
)  # fmt: skip
F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
FLOATS = (F32, F16, BF16)
Conform = Callable[..., None]
Step = Callable[..., dict[str, Any]]

SPANS = {"aligned": [(0, 16), (16, 24)], "odd": [(0, 7), (7, 32), (39, 1)]}


def fused(inputs: list[str], output: Any, steps: list[Any], **params: Any) -> tuple[str, list[str], Any, Any]:
    return ("FUSED", inputs, output, {**params, "recipe": {"steps": steps}})


@pytest.mark.parametrize(("dtype", "inner"), [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_projection_with_its_residual(
    check_gpu: Conform, step: Step, dtype: DType, spans: list[tuple[int, int]], swapped: bool, inner: DType
) -> None:
    buffers = {
        "x": (IN, dtype, (1, 72)), "w": (WEIGHT, dtype, (40, 72)), "r": (IN, dtype, (1, 40)),
        "y": (OUT, dtype, (1, 40)),
    }  # fmt: skip
    tasks = []
    for start, width in spans:
        terms = ["s1", "s0"] if swapped else ["s0", "s1"]
        steps = [
            step("GEMV_TILE", ["in0", "in1"], 0, width, inner, K=72),
            step("COPY", ["in2"], 1, width, dtype),
            step("ADD", terms, "final", width, dtype),
        ]
        tasks.append(fused(["x", "w", "r"], "y", steps, n_off=start, N_tile=width))
    check_gpu(buffers, tasks, roundings=inner is not F32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("hidden", [64, 200])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sms", [1, 2])
def test_a_gated_projection(
    check_gpu: Conform, step: Step, dtype: DType, spans: list[tuple[int, int]], hidden: int, normed: bool, sms: int
) -> None:
    """SwiGLU, with and without the norm before it; on one SM its tiles share the normed operand."""
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (1, hidden)), "norm": (WEIGHT, dtype, (hidden,)), "gate": (WEIGHT, dtype, (40, hidden)),
        "up": (WEIGHT, dtype, (40, hidden)), "y": (OUT, dtype, (1, 40)),
    }  # fmt: skip
    tasks = []
    for start, width in spans:
        steps = [step("RMSNORM", ["in0", "in1"], 9, hidden, dtype, eps=1e-5, hidden=hidden)] if normed else []
        x = "s9" if normed else "in0"
        steps += [
            step("GEMV_TILE", [x, "in2"], 0, width, dtype, K=hidden),
            step("GEMV_TILE", [x, "in3"], 1, width, dtype, K=hidden),
            step("SILU_MUL", ["s0", "s1"], "final", width, dtype),
        ]
        tasks.append(fused(["x", "norm", "gate", "up"], "y", steps, n_off=start, N_tile=width))
    check_gpu(buffers, tasks, roundings=3, sms=sms)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_in_each_tile(check_gpu: Conform, step: Step, dtype: DType, sms: int, biased: bool) -> None:
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (1, 96)), "norm": (WEIGHT, dtype, (96,)), "w": (WEIGHT, dtype, (64, 96)),
        "b": (WEIGHT, dtype, (64,)), "y": (OUT, F32, (1, 64)),
    }  # fmt: skip
    steps = [
        step("RMSNORM", ["in0", "in1"], 0, 96, dtype, eps=1e-5, hidden=96),
        step("GEMV_TILE", ["s0", "in2", "in3"] if biased else ["s0", "in2"], "final", 16, F32, K=96),
    ]
    tasks = [fused(["x", "norm", "w", "b"], "y", steps, n_off=start, N_tile=16) for start in (0, 16, 32, 48)]
    if not biased:
        tasks = [fused(["x", "norm", "w"], "y", steps, n_off=start, N_tile=16) for start in (0, 16, 32, 48)]
        del buffers["b"]
    check_gpu(buffers, tasks, roundings=1, sms=sms)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_of_each_head_in_a_tile(check_gpu: Conform, step: Step, dtype: DType) -> None:
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (1, 256)), "norm": (WEIGHT, dtype, (64,)), "w": (WEIGHT, dtype, (32, 256)),
        "y": (OUT, F32, (1, 32)),
    }  # fmt: skip
    steps = [
        step("RMSNORM", ["in0", "in1"], 0, 256, dtype, eps=1e-5, hidden=64),
        step("GEMV_TILE", ["s0", "in2"], "final", 16, F32, K=256),
    ]
    tasks = [fused(["x", "norm", "w"], "y", steps, n_off=start, N_tile=16) for start in (0, 16)]
    check_gpu(buffers, tasks, roundings=1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "hidden"), [(2, 136), (4, 136), (8, 136), (2, 1040), (3, 1040), (4, 2048), (5, 600), (8, 1040), (8, 4096)]
)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("sms", [1, 2])
def test_a_tile_takes_its_columns_of_every_row(
    check_gpu: Conform, step: Step, dtype: DType, rows: int, hidden: int, spans: list[tuple[int, int]], sms: int
) -> None:
    """A norm, a product with its bias and its residual, and a gated product, of several rows, short and long."""
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (rows, hidden)), "norm": (WEIGHT, dtype, (hidden,)), "w": (WEIGHT, dtype, (40, hidden)),
        "b": (WEIGHT, dtype, (40,)), "r": (IN, dtype, (rows, 40)), "up": (WEIGHT, dtype, (40, hidden)),
        "y": (OUT, dtype, (rows, 40)), "z": (OUT, dtype, (rows, 40)),
    }  # fmt: skip

    def of_rows(op: str, args: list[str], out: Any, width: int, **params: Any) -> dict[str, Any]:
        return {**step(op, args, out, width, dtype, **params), "out_shape": [rows, width]}

    tasks = []
    for start, width in spans:
        tile = {"n_off": start, "N_tile": width, "M_tile": rows}
        normed = of_rows("RMSNORM", ["in0", "in1"], 9, hidden, eps=1e-5, hidden=hidden)
        residual = [
            normed,
            of_rows("GEMM_TILE", ["s9", "in2", "in3"], 0, width, K=hidden, M_tile=rows),
            of_rows("COPY", ["in4"], 1, width, M_tile=rows),
            of_rows("ADD", ["s0", "s1"], "final", width),
        ]
        gated = [
            normed,
            of_rows("GEMM_TILE", ["s9", "in2"], 0, width, K=hidden, M_tile=rows),
            of_rows("GEMM_TILE", ["s9", "in3"], 1, width, K=hidden, M_tile=rows),
            of_rows("SILU_MUL", ["s0", "s1"], "final", width),
        ]
        tasks.append(fused(["x", "norm", "w", "b", "r"], "y", residual, **tile))
        tasks.append(fused(["x", "norm", "w", "up"], "z", gated, **tile))
    check_gpu(buffers, tasks, roundings=3, sms=sms)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_a_norm_of_long_rows_while_an_operand_is_staged(
    check_gpu: Conform, step: Step, dtype: DType, rows: int, normed: bool
) -> None:
    """Between two products of it, or once it is announced where it is made: products behind may be under way."""
    hidden, long = 64, 1032
    matrices = dict.fromkeys(("a", "b", "c"), (WEIGHT, dtype, (40, hidden)))
    buffers: dict[str, Any] = {
        "x": (IN, dtype, (rows, hidden)), **matrices, "r": (IN, dtype, (rows, long)), "norm": (WEIGHT, dtype, (long,)),
        "short": (WEIGHT, dtype, (hidden,)), "y": (OUT, dtype, (rows, 40)), "z": (OUT, dtype, (rows, long)),
    }  # fmt: skip

    def of_rows(op: str, args: list[str], out: Any, width: int, **params: Any) -> dict[str, Any]:
        return {**step(op, args, out, width, dtype, **params), "out_shape": [rows, width]}

    between = of_rows("RMSNORM", ["in4", "in5"], {"out": 1}, long, eps=1e-5, hidden=long)
    if normed:
        steps = [of_rows("RMSNORM", ["in0", "in6"], 9, hidden, eps=1e-5, hidden=hidden), between]
    else:
        steps = [of_rows("GEMM_TILE", ["in0", "in2"], 1, 40, K=hidden, M_tile=rows), between]
    x = "s9" if normed else "in0"
    steps += [
        of_rows("GEMM_TILE", [x, "in1"], 0, 40, K=hidden, M_tile=rows),
        of_rows("GEMM_TILE", [x, "in3"], 2, 40, K=hidden, M_tile=rows),
        of_rows("SILU_MUL", ["s0", "s2"], "final", 40),
    ]
    inputs = ["x", "a", "b", "c", "r", "norm", "short"]
    check_gpu(buffers, [fused(inputs, ["y", "z"], steps, n_off=0, N_tile=40, M_tile=rows)], roundings=4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_wide_operand_that_more_steps_read(check_gpu: Conform, step: Step, dtype: DType) -> None:
    """Scratch beyond the staging area spills; a value read by a GEMV and again behind it is not overwritten."""
    hidden = 12000
    buffers = {
        "x": (IN, dtype, (1, hidden)), "norm": (WEIGHT, dtype, (hidden,)), "w": (WEIGHT, dtype, (8, hidden)),
        "y": (OUT, F32, (1, 8)), "z": (OUT, dtype, (1, hidden)),
    }  # fmt: skip
    steps = [
        step("RMSNORM", ["in0", "in1"], 0, hidden, dtype, eps=1e-5, hidden=hidden),
        step("MUL", ["s0"], 1, hidden, F32, scale=0.5),
        step("GEMV_TILE", ["s0", "in2"], "final", 8, F32, K=hidden, n_off=0, N_tile=8),
        step("ADD", ["s1", "s0"], {"out": 1}, hidden, dtype),
    ]
    check_gpu(buffers, [fused(["x", "norm", "w"], ["y", "z"], steps)], roundings=2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("start", "width"), [(0, 33), (7, 33), (3, 64)])
def test_a_result_at_any_column(check_gpu: Conform, step: Step, dtype: DType, start: int, width: int) -> None:
    """Operations whose output is not aligned."""
    buffers: dict[str, Any] = {"x": (IN, dtype, (1, width)), "w": (WEIGHT, dtype, (width,))}
    makers = {
        "norm": ("RMSNORM", ["in0", "in1"], {"eps": 1e-5, "hidden": width}),
        "layer": ("LAYERNORM", ["in0", "in1"], {"eps": 1e-5, "hidden": width}),
        "add": ("ADD", ["in0", "in1"], {}),
        "gelu": ("GELU", ["in0"], {}),
        "copy": ("COPY", ["in0"], {"n_off": 0, "N_tile": width}),
        "softmax": ("SOFTMAX", ["in0"], {}),
    }
    tasks = []
    for name, (op, args, params) in makers.items():
        buffers[name] = (OUT, dtype, (1, start + width + 2))
        spans = [(first, size) for first, size in ((0, start), (start, width), (start + width, 2)) if size]
        for first, size in spans:
            if size == width:
                steps = [step(op, args, "final", width, dtype, **params)]
            else:
                steps = [step("COPY", ["in0"], "final", size, dtype, n_off=0, N_tile=size)]
            tasks.append(fused(["x", "w"], name, steps, n_off=first, N_tile=size))
    check_gpu(buffers, tasks)


@pytest.mark.parametrize(("dtype", "inner"), [(F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)])
def test_steps_round_to_their_own_dtype(check_gpu: Conform, step: Step, dtype: DType, inner: DType) -> None:
    buffers = {"x": (IN, dtype, (1, 40)), "h": (IN, inner, (1, 40)), "y": (OUT, F32, (1, 40)), "z": (OUT, F32, (1, 40))}
    steps = [
        step("ADD", ["in0", "in1"], 0, 40, inner),
        step("MUL", ["s0"], "final", 40, inner, scale=1.37),
        step("MUL", ["s0", "in0"], {"out": 1}, 40, F32),
    ]
    check_gpu(buffers, [fused(["x", "h"], ["y", "z"], steps)], exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("position", [0, 1, 30, 63])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("rows", ["all", "new", "normed"])
def test_append_and_attend_in_one_task(
    check_gpu: Conform, step: Step, dtype: DType, position: int, head_dim: int, rows: str
) -> None:
    group, context, width = 3, 64, 3 * head_dim
    cache = (CACHE, dtype, (context, 1, head_dim))
    buffers = {
        "q": (IN, dtype, (1, 2 * width)), "k": (IN, dtype, (1, head_dim)), "v": (IN, dtype, (1, head_dim)),
        "pos": (IN, I32, (1,)), "kc": cache, "vc": cache, "y": (OUT, dtype, (1, 2 * width)),
        "rest": (OUT, dtype, (1, width)), "norm": (WEIGHT, dtype, (head_dim,)),
    }  # fmt: skip
    rope = {"head_dim": head_dim, "theta": 1e4}
    heads = {"head_dim": head_dim, "n_heads": group, "n_kv_heads": 1, "scale": head_dim**-0.5}
    steps = [
        step("ROPE", ["in1", "in3"], 0, head_dim, dtype, **rope),
        step("KV_APPEND", ["s0", "in4"], {"out": 1}, context * head_dim, dtype),
        step("KV_APPEND", ["in2", "in5"], {"out": 2}, context * head_dim, dtype),
        step("COPY", ["in0"], 1, width, dtype, n_off=width, N_tile=width),
        step("ROPE", ["s1", "in3"], 2, width, dtype, **rope),
        step("ATTENTION_TILE", ["s2", "in4", "in5"], "final", width, dtype, **heads),
    ]
    inputs = ["q", "k", "v", "pos", "kc", "vc"]
    if rows == "normed":
        norm = {"eps": 1e-5, "hidden": head_dim}
        steps = [
            steps[3],
            step("RMSNORM", ["s1", "in6"], 3, width, dtype, **norm),
            step("RMSNORM", ["in1", "in6"], 4, head_dim, dtype, **norm),
            step("ROPE", ["s4", "in3"], 0, head_dim, dtype, **rope),
            *steps[1:3],
            step("ROPE", ["s3", "in3"], 2, width, dtype, **rope),
            steps[5],
        ]
        inputs.append("norm")
    window = {"kv_start": 0, "kv_len": context}
    if rows != "all":
        window = {"kv_start": context - 1, "kv_len": 1, "kv_rows": KvRows.NEW.value}
    params = {"n_off": width, "N_tile": width, "pos": context - 1, **window}
    first = [step("COPY", ["in0"], "final", width, dtype)]
    tasks = [fused(["q"], "y", first, n_off=0, N_tile=width), fused(inputs, ["y", "kc", "vc"], steps, **params)]
    tasks.append(("COPY", ["q"], "rest", {"n_off": 0, "N_tile": width}))
    past = {}
    for seed, name in enumerate(("kc", "vc")):
        past[name] = torch.full((context, 1, head_dim), torch.nan)
        past[name][:position] = torch.randn((position, 1, head_dim), generator=torch.Generator().manual_seed(seed))
    tensors = {"pos": torch.tensor([position], dtype=torch.int32), **past}
    roundings = 3 if rows == "normed" else 2
    check_gpu(buffers, tasks, tensors, pos=position, roundings=roundings, extra=(position + 1) * 2.0**-23)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 6])
def test_partials_merge_in_the_projection_that_reads_them(
    check_gpu: Conform, step: Step, dtype: DType, count: int
) -> None:
    n_heads, head_dim = 6, 32
    depth = n_heads * head_dim
    generator = torch.Generator().manual_seed(count)
    parts = {f"p{number}": torch.randn((n_heads, head_dim + 2), generator=generator) for number in range(count)}
    for part in parts.values():
        part[:, -1] = part[:, -1].abs() + 1
    buffers: dict[str, Any] = dict.fromkeys(parts, (IN, F32, (n_heads, head_dim + 2)))
    buffers |= {
        "w": (WEIGHT, dtype, (40, depth)), "r": (IN, dtype, (1, 40)), "y": (OUT, dtype, (1, 40)),
    }  # fmt: skip
    tasks = []
    for start, width in SPANS["odd"]:
        steps = [
            step(
                "ATTENTION_COMBINE", [f"in{place}" for place in range(count)], 0, depth, dtype, n_heads=n_heads,
                n_kv_heads=2, head_dim=head_dim,
            ),
            step("GEMV_TILE", ["s0", f"in{count}"], 1, width, dtype, K=depth),
            step("COPY", [f"in{count + 1}"], 2, width, dtype),
            step("ADD", ["s1", "s2"], "final", width, dtype),
        ]  # fmt: skip
        tasks.append(fused([*parts, "w", "r"], "y", steps, n_off=start, N_tile=width))
    check_gpu(buffers, tasks, parts, roundings=2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_any_recipe_is_the_composition_of_its_steps(check_gpu: Conform, step: Step, dtype: DType) -> None:
    buffers = {"x": (IN, dtype, (1, 48)), "w": (WEIGHT, dtype, (48,)), "y": (OUT, F32, (1, 48))}
    steps = [
        step("LAYERNORM", ["in0", "in1"], 0, 48, F32, eps=1e-5, hidden=48),
        step("GELU", ["s0"], 5, 48, F32),
        step("MUL", ["s5", "s0"], 1, 48, F32),
        step("SOFTMAX", ["s1"], "final", 48, F32),
    ]
    check_gpu(buffers, [fused(["x", "w"], "y", steps)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_two_matrices_one_behind_the_other_in_a_task(check_gpu: Conform, step: Step, dtype: DType) -> None:
    """The second multiplies what the first made, so its operand is announced only then."""
    buffers = {
        "x": (IN, dtype, (1, 64)), "w": (WEIGHT, dtype, (48, 64)), "w2": (WEIGHT, dtype, (40, 48)),
        "y": (OUT, F32, (1, 40)),
    }  # fmt: skip
    steps = [
        step("GEMV_TILE", ["in0", "in1"], 0, 48, dtype, K=64, n_off=0, N_tile=48),
        step("GELU", ["s0"], 1, 48, dtype),
        step("GEMV_TILE", ["s1", "in2"], "final", 40, F32, K=48, n_off=0, N_tile=40),
    ]
    check_gpu(buffers, [fused(["x", "w", "w2"], "y", steps)], roundings=2)
