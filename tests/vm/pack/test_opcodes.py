"""Every opcode and every way of packing a recipe, against the reference VM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import InvalidProgramError
from flywheel.ir import BufferKind, DType, InstructionKind, MegakernelProgram
from flywheel.ir.operations import PRODUCTS
from flywheel.plan.step import Epilogue
from flywheel.vm.abi import StepFlag
from flywheel.vm.pack import pack

IN, WEIGHT, ACT, OUT, KV = (
    BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE,
)  # fmt: skip
F32, F16, BF16, I32, I8, U8, I4 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I8, DType.U8, DType.I4
Chain = Callable[..., MegakernelProgram]
Agree = Callable[..., None]


def step(op: str, args: list[Any], out: Any, width: int, dtype: DType = F32, rows: int = 1, **params: Any) -> Any:
    """A recipe's step; an arg is an input's number, or "s0", "s1".. for scratch."""
    refs = [{"s": int(arg[1:])} if isinstance(arg, str) else {"in": arg} for arg in args]
    shape = [rows, width]
    return {"op": op, "args": refs, "out": out, "params": params, "out_shape": shape, "out_dtype": dtype.name}


def fused(*steps: Any, **params: Any) -> dict[str, Any]:
    return {**params, "recipe": {"steps": list(steps)}}


PLAIN: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "copy": ({"x": (IN, F32, (1, 40)), "y": (OUT, F32, (1, 40))}, [("COPY", ["x"], ["y"], {})]),
    "copy-columns": (
        {"x": (IN, F32, (1, 40)), "y": (OUT, F32, (1, 7))},
        [("COPY", ["x"], ["y"], {"n_off": 5, "N_tile": 7})],
    ),
    "copy-ints": ({"x": (IN, I32, (3,)), "y": (OUT, I32, (3,))}, [("COPY", ["x"], ["y"], {})]),
    "layernorm": (
        {"x": (IN, F32, (2, 24)), "w": (WEIGHT, F32, (24,)), "b": (WEIGHT, F32, (24,)), "y": (OUT, F32, (2, 24))},
        [("LAYERNORM", ["x", "w", "b"], ["y"], {"eps": 1e-5, "hidden": 24})],
    ),
    "gemv-with-bias-in-odd-tiles": (
        {"x": (IN, BF16, (1, 37)), "w": (WEIGHT, BF16, (41, 45)), "b": (WEIGHT, F32, (41,)), "y": (OUT, F32, (1, 41))},
        [("GEMV_TILE", ["x", "w", "b"], ["y"], {"K": 37, "n_off": start, "N_tile": size})
         for start, size in ((0, 5), (5, 17), (22, 19))],
    ),
    "gemm": (
        {"x": (IN, BF16, (5, 48)), "w": (WEIGHT, BF16, (40, 48)), "y": (OUT, BF16, (5, 40))},
        [("GEMM_TILE", ["x", "w"], ["y"], {"K": 48, "n_off": start, "N_tile": 20, "M_tile": 5}) for start in (0, 20)],
    ),
    "tied-embedding": (
        {"ids": (IN, I32, (2,)), "w": (WEIGHT, BF16, (33, 44)), "x": (ACT, BF16, (2, 44)), "y": (OUT, F32, (2, 33))},
        [("EMBED", ["ids", "w"], ["x"], {"hidden": 44}),
         ("GEMV_TILE", ["x", "w"], ["y"], {"K": 44, "n_off": 0, "N_tile": 33})],
    ),
    "masked-attention": (
        {"q": (IN, F32, (4, 8)), "k": (KV, F32, (10, 2, 8)), "v": (KV, F32, (10, 2, 8)), "m": (IN, F32, (4, 10)),
         "y": (OUT, F32, (4, 8))},
        [("ATTENTION_TILE", ["q", "k", "v", "m"], ["y"],
          {"head_dim": 8, "n_heads": 4, "n_kv_heads": 2, "kv_start": 2, "kv_len": 7, "scale": 0.3})],
    ),
    "partials": (
        {"q": (IN, F32, (2, 8)), "k": (KV, F32, (10, 1, 8)), "v": (KV, F32, (10, 1, 8)), "a": (ACT, F32, (2, 10)),
         "b": (ACT, F32, (2, 10)), "y": (OUT, F32, (2, 8))},
        [*(("ATTENTION_TILE", ["q", "k", "v"], [name],
            {"head_dim": 8, "n_heads": 2, "n_kv_heads": 1, "kv_start": start, "kv_len": 5, "scale": 0.3})
           for name, start in (("a", 0), ("b", 5))), ("ATTENTION_COMBINE", ["a", "b"], ["y"], {})],
    ),
    "rope": (
        {"x": (IN, F32, (2, 24)), "positions": (IN, I32, (2,)), "y": (OUT, F32, (2, 24))},
        [("ROPE", ["x", "positions"], ["y"], {"head_dim": 8, "theta": 1e4})],
    ),
    "elementwise": (
        {"a": (IN, F32, (1, 20)), "b": (IN, F32, (1, 20)), **dict.fromkeys("cdefg", (ACT, F32, (1, 20))),
         "y": (OUT, F32, (1, 20))},
        [("SILU_MUL", ["a", "b"], ["c"], {}), ("GELU", ["c"], ["d"], {}), ("ADD", ["d", "b"], ["e"], {}),
         ("MUL", ["e", "a"], ["f"], {}), ("MUL", ["f"], ["g"], {"scale": 1.7}), ("COPY", ["g"], ["y"], {})],
    ),
    "dequant": (
        {"q": (WEIGHT, I8, (3, 10)), "s": (WEIGHT, F32, (3, 3)), "z": (WEIGHT, F32, (3, 3)), "y": (OUT, F32, (3, 10))},
        [("DEQUANT", ["q", "s", "z"], ["y"], {"qdtype": int(I8), "group": 4})],
    ),
    "dequant-nibbles": (
        {"q": (WEIGHT, I4, (3, 10)), "s": (WEIGHT, F32, (3, 3)), "y": (OUT, F32, (3, 10))},
        [("DEQUANT", ["q", "s"], ["y"], {"qdtype": int(I4), "group": 4})],
    ),
    "softmax-of-the-middle": (
        {"x": (IN, F32, (2, 5, 3)), "y": (OUT, F32, (2, 5, 3))}, [("SOFTMAX", ["x"], ["y"], {"dim": -2})],
    ),
    "softmax-of-the-last": ({"x": (IN, F32, (4, 6)), "y": (OUT, F32, (4, 6))}, [("SOFTMAX", ["x"], ["y"], {})]),
    "append": (
        {"x": (IN, F32, (2, 8)), "k": (KV, F32, (6, 2, 4))}, [("KV_APPEND", ["x", "k"], ["k"], {"pos": 3})],
    ),
    "argmax": ({"x": (IN, F32, (2, 30)), "y": (OUT, I32, (2,))}, [("SAMPLE_ARGMAX", ["x"], ["y"], {})]),
    "nop": (
        {"x": (IN, F32, (1, 4)), "y": (OUT, F32, (1, 4))}, [("NOP", [], [], {}), ("COPY", ["x"], ["y"], {})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_an_opcode_is_packed_as_one_step(chain: Chain, check_vm: Agree, name: str) -> None:
    buffers, tasks = PLAIN[name]
    program = chain(buffers, tasks)
    given = {}
    for buffer in program.buffers:
        shape = (*buffer.shape[:-1], buffer.shape[-1] // 2) if buffer.dtype is I4 else tuple(buffer.shape)
        if buffer.dtype in (I8, I4):
            generator = torch.Generator().manual_seed(1)
            drawn = torch.randint(-128, 128, shape, generator=generator)
            given[buffer.name] = drawn.to(torch.int8) if buffer.dtype is I8 else (drawn + 128).to(torch.uint8)
    check_vm(program, **given)
    assert set(pack(program).instructions["n_steps"]) <= {0, 1}


MATRIX = {"x": (IN, F32, (1, 48)), "w": (WEIGHT, F32, (32, 48)), "v": (WEIGHT, F32, (32, 48)), "r": (IN, F32, (1, 32))}
TILE = {"n_off": 10, "N_tile": 15}


def one_tile(chain: Chain, *steps: Any, dtype: DType = F32, out: DType | None = None) -> MegakernelProgram:
    """A task over x, w, v and r that writes columns 10..24 of y, and one that copies these."""
    made = dtype if out is None else out
    buffers = {name: (kind, dtype, shape) for name, (kind, _, shape) in MATRIX.items()}
    buffers |= {"y": (ACT, made, (1, 32)), "z": (OUT, made, (1, 15))}
    tasks = [("FUSED", ["x", "w", "v", "r"], ["y"], fused(*steps, **TILE)), ("COPY", ["y"], ["z"], TILE)]
    return chain(buffers, tasks)


def gemv(x: Any, weight: int, out: Any, dtype: DType = F32) -> Any:
    return step("GEMV_TILE", [x, weight], out, 15, dtype, K=48)


def packed_steps(program: MegakernelProgram) -> Any:
    tables = pack(program)
    first = tables.instructions[tables.instructions["task"] == 0][0]
    return tables.steps[first["first_step"] :][: first["n_steps"]]


@pytest.mark.parametrize("args", [["s0", "s1"], ["s1", "s0"]])
def test_a_residual_is_added_by_the_matrix_step(chain: Chain, check_vm: Agree, args: list[str]) -> None:
    program = one_tile(chain, gemv(0, 1, 0), step("COPY", [3], 1, 15), step("ADD", args, "final", 15))
    (only,) = packed_steps(program)
    assert (only["as"]["product"]["epilogue"], only["as"]["product"]["epilogue_arg"]) == (Epilogue.ADD, 3)
    check_vm(program)


def test_a_gate_is_applied_by_the_matrix_step_wherever_it_was_made(chain: Chain, check_vm: Agree) -> None:
    for first, second in ((1, 2), (2, 1)):
        gate, up = ("s0", "s1") if first == 1 else ("s1", "s0")
        program = one_tile(chain, gemv(0, first, 0), gemv(0, second, 1), step("SILU_MUL", [gate, up], "final", 15))
        steps = packed_steps(program)
        one, two = steps["as"]["product"]
        assert (one["epilogue"], two["epilogue"], two["epilogue_arg"]) == (Epilogue.NONE, Epilogue.SILU_MUL, 16)
        assert steps["flags"][1] & StepFlag.REUSE_X
        check_vm(program)


UNFUSED = {
    "twice used": [gemv(0, 1, 0), step("COPY", [3], 1, 15), step("ADD", ["s0", "s1"], 2, 15),
                   step("MUL", ["s2", "s0"], "final", 15)],
    "its own columns": [gemv(0, 1, 0), step("COPY", [3], 1, 15, n_off=2, N_tile=15),
                        step("ADD", ["s0", "s1"], "final", 15)],
    "a copied scratch": [gemv(0, 1, 0), step("GELU", [3], 3, 32), step("COPY", ["s3"], 1, 15),
                         step("ADD", ["s0", "s1"], "final", 15)],
    "the gate as up": [gemv(0, 1, 0), step("COPY", [3], 1, 15), step("SILU_MUL", ["s0", "s1"], "final", 15)],
    "the same twice": [gemv(0, 1, 0), step("ADD", ["s0", "s0"], "final", 15)],
}  # fmt: skip


@pytest.mark.parametrize("name", UNFUSED)
def test_what_no_epilogue_can_do_stays_a_step(chain: Chain, check_vm: Agree, name: str) -> None:
    program = one_tile(chain, *UNFUSED[name])
    steps = packed_steps(program)
    products = steps["as"]["product"][np.isin(steps["op"], list(PRODUCTS))]
    assert not products["epilogue"].any() and len(steps) == len(UNFUSED[name])
    check_vm(program)


@pytest.mark.parametrize(
    ("product", "copied", "total", "out", "absorbed"),
    [
        (BF16, BF16, BF16, BF16, True),
        (BF16, BF16, F32, BF16, True),
        (F32, F32, F32, F32, True),
        (BF16, BF16, BF16, F32, False),
    ],
)
def test_an_addition_is_absorbed_only_if_rounding_stays_the_same(
    chain: Chain, check_vm: Agree, product: DType, copied: DType, total: DType, out: DType, absorbed: bool
) -> None:
    steps = [gemv(0, 1, 0, product), step("COPY", [3], 1, 15, copied), step("ADD", ["s0", "s1"], "final", 15, total)]
    program = one_tile(chain, *steps, dtype=BF16, out=out)
    assert (len(packed_steps(program)) == 1) is absorbed
    check_vm(program)


def test_a_copy_that_rounds_is_no_residual(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, BF16, (1, 48)), "w": (WEIGHT, BF16, (32, 48)), "r": (IN, F32, (1, 32)),
               "y": (ACT, BF16, (1, 32)), "z": (OUT, BF16, (1, 15))}  # fmt: skip
    steps = [gemv(0, 1, 0, BF16), step("COPY", [2], 1, 15, BF16), step("ADD", ["s0", "s1"], "final", 15, BF16)]
    program = chain(buffers, [("FUSED", ["x", "w", "r"], ["y"], fused(*steps, **TILE)), ("COPY", ["y"], ["z"], TILE)])
    assert len(packed_steps(program)) == 3
    check_vm(program)


def test_an_operand_made_by_a_step_is_multiplied_where_it_lies(chain: Chain, check_vm: Agree) -> None:
    program = one_tile(chain, step("GELU", [0], 0, 48), gemv("s0", 1, "final"))
    gelu, matrix = packed_steps(program)
    assert gelu["scratch"] == 0 and matrix["flags"] & StepFlag.X_IN_PLACE
    check_vm(program)


def test_each_head_of_a_normed_operand_is_multiplied_where_it_lies(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, BF16, (1, 48)), "n": (WEIGHT, BF16, (16,)), "w": (WEIGHT, BF16, (32, 48)),
               "y": (ACT, F32, (1, 32)), "z": (OUT, F32, (1, 15))}  # fmt: skip
    steps = [step("RMSNORM", [0, 1], 0, 48, BF16, eps=1e-5, hidden=16), gemv("s0", 2, "final")]
    program = chain(buffers, [("FUSED", ["x", "n", "w"], ["y"], fused(*steps, **TILE)), ("COPY", ["y"], ["z"], TILE)])
    norm, matrix = packed_steps(program)
    assert norm["flags"] & StepFlag.ANNOUNCES and matrix["flags"] & StepFlag.X_IN_PLACE
    check_vm(program)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("others", [False, True])
def test_a_norm_leaves_its_scale_to_products_that_alone_read_it(
    chain: Chain, check_vm: Agree, dtype: DType, others: bool
) -> None:
    """And where halves have room for what is not scaled."""
    buffers = {"x": (IN, dtype, (1, 48)), "n": (WEIGHT, dtype, (48,)), "w": (WEIGHT, dtype, (32, 48)),
               "y": (ACT, dtype, (1, 32)), "z": (OUT, dtype, (1, 15))}  # fmt: skip
    steps = [
        step("RMSNORM", [0, 1], 0, 48, dtype, eps=1e-5, hidden=48),
        gemv("s0", 2, 1, dtype),
        gemv("s0", 2, 2, dtype),
        step("COPY", ["s0" if others else 0], 3, 15, dtype, n_off=0, N_tile=15),
        step("ADD", ["s1", "s3" if others else "s2"], "final", 15, dtype),
    ]
    program = chain(buffers, [("FUSED", ["x", "n", "w"], ["y"], fused(*steps, **TILE)), ("COPY", ["y"], ["z"], TILE)])
    norm, *matrices = (
        each for each in packed_steps(program) if each["op"] in (InstructionKind.RMSNORM, InstructionKind.GEMV_TILE)
    )
    leaves = dtype is BF16 and not others
    assert norm["flags"] & StepFlag.ANNOUNCES and bool(norm["flags"] & StepFlag.LEAVES_SCALE) == leaves
    assert [bool(each["flags"] & StepFlag.TAKES_SCALE) for each in matrices] == [leaves] * 2
    check_vm(program)


def test_nothing_is_announced_ahead_of_an_attention(chain: Chain, check_vm: Agree) -> None:
    """Matrix warps would leave their partials where attention has its own."""
    buffers = {"q": (IN, F32, (1, 16)), "k": (KV, F32, (10, 1, 16)), "v": (KV, F32, (10, 1, 16)),
               "w": (WEIGHT, F32, (32, 16)), "y": (ACT, F32, (1, 32)), "z": (OUT, F32, (1, 15))}  # fmt: skip
    window = {"head_dim": 16, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "kv_len": 10, "scale": 0.3}
    steps = [
        step("GELU", [0], 0, 16), step("ATTENTION_TILE", ["s0", 1, 2], 1, 16, **window), gemv("s0", 3, 2),
        gemv("s1", 3, 3), step("ADD", ["s2", "s3"], "final", 15),
    ]  # fmt: skip
    for each in steps[2:4]:
        each["params"]["K"] = 16
    task = ("FUSED", ["q", "k", "v", "w"], ["y"], fused(*steps, **TILE))
    program = chain(buffers, [task, ("COPY", ["y"], ["z"], TILE)])
    made = packed_steps(program)
    assert not made[0]["flags"] & StepFlag.ANNOUNCES
    check_vm(program)


def test_an_operand_still_needed_beside_another_is_staged_from_elsewhere(chain: Chain, check_vm: Agree) -> None:
    steps = [
        step("GELU", [0], 0, 48), gemv("s0", 1, 1), gemv(0, 2, 2), gemv("s0", 2, 3),
        step("ADD", ["s1", "s2"], 4, 15), step("ADD", ["s4", "s3"], "final", 15),
    ]  # fmt: skip
    program = one_tile(chain, *steps)
    made = packed_steps(program)
    assert [bool(each["flags"] & StepFlag.STAGE) for each in made if each["op"] in PRODUCTS] == [True, True, True]
    check_vm(program)


def test_several_rows_are_multiplied_within_a_recipe(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, BF16, (3, 40)), "w": (WEIGHT, BF16, (24, 40)), "y": (OUT, BF16, (3, 20))}
    steps = [
        step("GELU", [0], 0, 40, BF16, 3),
        step("GEMV_TILE", ["s0", 1], 1, 20, BF16, 3, K=40, n_off=3, N_tile=20),
        step("GEMV_TILE", ["s0", 1], 2, 20, BF16, 3, K=40, n_off=0, N_tile=20),
        step("SILU_MUL", ["s1", "s2"], "final", 20, BF16, 3),
    ]
    check_vm(chain(buffers, [("FUSED", ["x", "w"], ["y"], fused(*steps))]))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_tile_of_several_rows_takes_its_columns_of_each(
    chain: Chain, check_vm: Agree, rows: int, dtype: DType
) -> None:
    """A norm, a product with its bias, its residual and its gate, in two tasks that share a buffer."""
    buffers = {
        "x": (IN, dtype, (rows, 48)), "g": (WEIGHT, dtype, (48,)), "w": (WEIGHT, dtype, (32, 48)),
        "b": (WEIGHT, dtype, (32,)), "r": (IN, dtype, (rows, 32)), "v": (WEIGHT, dtype, (32, 48)),
        "y": (OUT, dtype, (rows, 32)), "z": (OUT, dtype, (rows, 32)),
    }  # fmt: skip
    tasks = []
    for start, width in ((0, 16), (16, 10), (26, 6)):
        params = {"n_off": start, "N_tile": width, "M_tile": rows}
        residual = [
            step("RMSNORM", [0, 1], 0, 48, dtype, rows, eps=1e-5, hidden=48),
            step("GEMM_TILE", ["s0", 2, 3], 1, width, dtype, rows, K=48, M_tile=rows),
            step("COPY", [4], 2, width, dtype, rows, M_tile=rows),
            step("ADD", ["s1", "s2"], "final", width, dtype, rows),
        ]
        gated = [
            step("GEMV_TILE", [0, 1], 0, width, dtype, rows, K=48),
            step("GEMV_TILE", [0, 2], 1, width, dtype, rows, K=48),
            step("SILU_MUL", ["s0", "s1"], "final", width, dtype, rows),
        ]
        tasks.append(("FUSED", ["x", "g", "w", "b", "r"], ["y"], fused(*residual, **params)))
        tasks.append(("FUSED", ["x", "w", "v"], ["z"], fused(*gated, **params)))
    program = chain(buffers, tasks)
    assert list(packed_steps(program)["as"]["product"]["epilogue"]) == [Epilogue.NONE, Epilogue.ADD]
    check_vm(program)


@pytest.mark.parametrize("copied", [1, 2])
def test_a_residual_of_other_rows_is_not_the_products(chain: Chain, check_vm: Agree, copied: int) -> None:
    """A task whose tile is flat adds columns of one row, or of two, to a product of two."""
    buffers = {"x": (IN, F32, (2, 48)), "w": (WEIGHT, F32, (32, 48)), "r": (IN, F32, (2, 32)), "y": (OUT, F32, (2, 10))}
    steps = [
        step("GEMV_TILE", [0, 1], 0, 10, F32, 2, K=48, n_off=10, N_tile=10),
        step("COPY", [2], 1, 10, F32, 2, **({"M_tile": 2} if copied == 2 else {"n_off": 0, "N_tile": 20})),
        step("ADD", ["s0", "s1"], "final", 10, F32, 2),
    ]
    program = chain(buffers, [("FUSED", ["x", "w", "r"], ["y"], fused(*steps, n_off=0, N_tile=10, M_tile=2))])
    with pytest.raises(InvalidProgramError, match="2 rows"):
        pack(program)


def test_scratch_that_does_not_fit_on_chip_is_spilled(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, F32, (1, 3000)), "y": (OUT, F32, (1, 3000))}
    steps = [step("GELU", [0], 0, 3000), step("MUL", [0], 1, 3000, scale=2.0), step("ADD", ["s0", "s1"], "final", 3000)]
    program = chain(buffers, [("FUSED", ["x"], ["y"], fused(*steps))])
    assert pack(program).workspace_stride >= 24000
    check_vm(program)


def test_a_cache_is_written_whole_whatever_columns_its_task_names(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, F32, (1, 24)), "k": (KV, F32, (6, 1, 8))}
    append = {**step("KV_APPEND", ["s0", 1], "final", 48), "out_shape": [6, 1, 8]}
    params = fused(step("COPY", [0], 0, 8), append, pos=3, n_off=8, N_tile=8)
    check_vm(chain(buffers, [("FUSED", ["x", "k"], ["k"], params)]))


def test_no_operand_is_reused_around_attention_which_borrows_the_partials(chain: Chain, check_vm: Agree) -> None:
    buffers = {"x": (IN, F32, (1, 48)), "w": (WEIGHT, F32, (32, 48)), "k": (KV, F32, (4, 1, 16)),
               "v": (KV, F32, (4, 1, 16)), "y": (OUT, F32, (1, 16))}  # fmt: skip
    heads = {"head_dim": 16, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "kv_len": 4, "scale": 0.3}
    steps = [
        step("GEMV_TILE", [0, 1], 0, 16, K=48, n_off=0, N_tile=16),
        step("ATTENTION_TILE", ["s0", 2, 3], 1, 16, **heads),
        step("GEMV_TILE", [0, 1], 2, 16, K=48, n_off=16, N_tile=16),
        step("ADD", ["s1", "s2"], "final", 16),
    ]
    program = chain(buffers, [("FUSED", ["x", "w", "k", "v"], ["y"], fused(*steps))])
    assert [bool(each["flags"] & StepFlag.STAGE) for each in packed_steps(program)] == [True, False, True, False]
    check_vm(program)


@st.composite
def recipes(draw: st.DrawFn) -> list[list[Any]]:
    """Three recipes over x48 (in 0), x40 (1), x3000 (2), weights [64, K] (3, 4, 5), gains [48] (6), [3000] (7)."""
    made = []
    for _ in range(3):
        values: list[tuple[Any, int]] = [(0, 48), (1, 40), (2, 3000)]
        steps = []
        for slot in range(draw(st.integers(1, 7))):
            value, width = draw(st.sampled_from(values))
            place = (48, 40, 3000).index(width)
            alike = [other for other, size in values if size == width]
            kind = draw(st.sampled_from(("GEMV_TILE", "GEMV_TILE", "ADD", "RMSNORM", "GELU", "COPY")))
            if kind == "GEMV_TILE":
                size = draw(st.sampled_from((48, 40)))
                start = draw(st.integers(0, 64 - size))
                steps.append(step(kind, [value, 3 + place], slot, size, K=width, n_off=start, N_tile=size))
                width = size
            elif kind == "ADD":
                steps.append(step(kind, [value, draw(st.sampled_from(alike))], slot, width))
            elif kind == "RMSNORM" and width != 40:
                steps.append(step(kind, [value, 6 if width == 48 else 7], slot, width, eps=1e-5, hidden=width))
            elif kind == "COPY" and width > 40:
                steps.append(step(kind, [value], slot, 40, n_off=draw(st.integers(0, width - 40)), N_tile=40))
                width = 40
            else:
                steps.append(step("GELU", [value], slot, width))
            values.append((f"s{slot}", width))
        value, _ = draw(st.sampled_from(values))
        steps.append(step("COPY", [value], "final", 40, n_off=0, N_tile=40))
        made.append(steps)
    return made


@given(recipes())
def test_any_recipes_one_after_the_other_mean_what_they_say(
    chain: Chain, check_vm: Agree, drawn: list[list[Any]]
) -> None:
    buffers: dict[str, Any] = {f"x{width}": (IN, F32, (1, width)) for width in (48, 40, 3000)}
    buffers |= {f"w{width}": (WEIGHT, F32, (64, width)) for width in (48, 40, 3000)}
    buffers |= {f"gain{width}": (WEIGHT, F32, (width,)) for width in (48, 3000)}
    names = list(buffers)
    buffers |= {f"y{number}": (OUT, F32, (1, 40)) for number in range(len(drawn))}
    tasks = [("FUSED", names, [f"y{number}"], fused(*steps)) for number, steps in enumerate(drawn)]
    program = chain(buffers, tasks)
    check_vm(program)
    check_vm(replace(program, tasks=tuple(replace(task, waits=()) for task in program.tasks)))
