"""Operands that the reference VM refuses, or a GPU would read or write past."""

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
    validate,
)
from flywheel.ir.recipe import recipe_from_dict

_K = InstructionKind
_F32, _I32, _U8, _I4 = DType.F32, DType.I32, DType.U8, DType.I4
Operand = tuple[DType, tuple[int, ...]]
Case = tuple[InstructionKind, list[Operand], Operand, dict[str, Any]]


def f32(*shape: int) -> Operand:
    return _F32, shape


ROPE: Case = (_K.ROPE, [f32(2, 16), (_I32, (2,))], f32(2, 16), {"head_dim": 8, "theta": 1e4})
NORM: Case = (_K.RMSNORM, [f32(2, 16), f32(16)], f32(2, 16), {"eps": 1e-5, "hidden": 16})
LAYER: Case = (_K.LAYERNORM, [f32(2, 16), f32(16), f32(16)], f32(2, 16), {"eps": 1e-5, "hidden": 16})
EMBED: Case = (_K.EMBED, [(_I32, (2,)), f32(8, 16)], f32(2, 16), {"hidden": 16})
SOFTMAX: Case = (_K.SOFTMAX, [f32(2, 16)], f32(2, 16), {"dim": -2})
NIBBLES: Case = (_K.DEQUANT, [(_I4, (2, 16)), f32(2, 2), f32(2, 2)], f32(2, 16), {"qdtype": int(_I4), "group": 8})
PACKED: Case = (_K.DEQUANT, [(_U8, (2, 8)), f32(2, 2)], f32(2, 16), {"qdtype": int(_I4), "group": 8})
OCTETS: Case = (_K.DEQUANT, [(_U8, (2, 16)), f32(2, 2)], f32(2, 16), {"qdtype": int(_U8), "group": 8})
GEMM: Case = (
    _K.GEMM_TILE, [f32(2, 16), f32(8, 16)], f32(2, 8), {"M_tile": 2, "K": 16, "N_tile": 8, "n_off": 0},
)  # fmt: skip
COLUMNS: Case = (_K.COPY, [f32(2, 8)], f32(2, 4), {"n_off": 4, "N_tile": 4, "M_tile": 2})
ATTEND: Case = (
    _K.ATTENTION_TILE,
    [f32(2, 4), f32(8, 1, 4), f32(8, 1, 4), f32(2, 8)],
    f32(2, 4),
    {"head_dim": 4, "n_heads": 2, "n_kv_heads": 1, "kv_start": 0, "kv_len": 8, "scale": 0.5},
)
FITTING = [ROPE, NORM, LAYER, EMBED, SOFTMAX, NIBBLES, PACKED, OCTETS, GEMM, COLUMNS, ATTEND]


def change(
    case: Case, *, operands: dict[int, Operand] | None = None, out: Operand | None = None, **params: Any
) -> Case:
    op, inputs, output, given = case
    changed = [(operands or {}).get(place, operand) for place, operand in enumerate(inputs)]
    return op, changed, out or output, {**given, **params}


def program(case: Case, *, fused: bool = False) -> MegakernelProgram:
    op, inputs, (dtype, shape), params = case
    buffers = [Buffer(n, f"in{n}", BufferKind.IO_INPUT, *operand) for n, operand in enumerate(inputs)]
    buffers.append(Buffer(9, "out", BufferKind.IO_OUTPUT, dtype, shape))
    places = tuple(range(len(inputs)))
    if fused:
        args = [{"in": place} for place in places]
        step = {"op": op.name, "args": args, "params": params, "out": "final"}
        params = {"recipe": recipe_from_dict({"steps": [{**step, "out_shape": list(shape), "out_dtype": dtype.name}]})}
    task = Task(0, _K.FUSED if fused else op, places, (9,), 0, (), params, 0)
    return MegakernelProgram(target=TARGETS["h100"], buffers=buffers, counters=[Counter(0)], tasks=[task])


def codes(tested: MegakernelProgram) -> set[str]:
    return {finding.code for finding in validate(tested, strict=True).errors}


FAULTS = {
    "odd head_dim": (change(ROPE, operands={0: f32(2, 15)}, out=f32(2, 15), head_dim=5), "bad-param"),
    "head_dim that does not divide": (change(ROPE, head_dim=6), "operand-size"),
    "rope into a larger output": (change(ROPE, out=f32(4, 16)), "operand-size"),
    "positions for other rows": (change(ROPE, operands={1: (_I32, (3,))}), "operand-size"),
    "norm into a larger output": (change(NORM, out=f32(4, 16)), "operand-size"),
    "layer norm into a larger output": (change(LAYER, out=f32(4, 16)), "operand-size"),
    "hidden that does not divide": (change(NORM, hidden=12), "operand-size"),
    "layer norm's hidden that does not divide": (change(LAYER, hidden=12), "operand-size"),
    "embed into a smaller output": (change(EMBED, out=f32(1, 16)), "operand-size"),
    "hidden narrower than the table": (change(EMBED, hidden=8), "operand-size"),
    "dim below the rank": (change(SOFTMAX, dim=-3), "bad-param"),
    "dim above the rank": (change(SOFTMAX, dim=2), "bad-param"),
    "qdtype of a float": (change(OCTETS, qdtype=int(_F32)), "bad-param"),
    "qdtype of nothing": (change(OCTETS, qdtype=99), "bad-param"),
    "dequant into a larger output": (change(OCTETS, out=f32(4, 16)), "operand-size"),
    "nibbles read as octets": (change(NIBBLES, qdtype=int(_U8)), "operand-size"),
    "too few scales": (change(NIBBLES, operands={1: f32(2, 1)}), "operand-size"),
    "too few zeros": (change(NIBBLES, operands={2: f32(1, 2)}), "operand-size"),
    "mask shorter than the cache": (change(ATTEND, operands={3: f32(7)}), "operand-size"),
    "mask of too few heads": (change(ATTEND, operands={3: f32(3, 4)}), "operand-size"),
    "more rows than x": (change(GEMM, M_tile=3), "operand-size"),
    "columns past a row": (change(COLUMNS, n_off=5), "tile-bounds"),
    "rows that do not divide": (change(COLUMNS, operands={0: f32(3, 9)}), "operand-size"),
    "columns of fewer rows than the output's": (change(COLUMNS, M_tile=1), "operand-size"),
}


@pytest.mark.parametrize("fused", [False, True], ids=["task", "recipe"])
@pytest.mark.parametrize("case", FITTING, ids=[case[0].name for case in FITTING])
def test_operands_that_fit_are_accepted(case: Case, fused: bool) -> None:
    assert codes(program(case, fused=fused)) == set()


@pytest.mark.parametrize("fused", [False, True], ids=["task", "recipe"])
@pytest.mark.parametrize("name", FAULTS)
def test_operands_that_do_not_fit_are_rejected(name: str, fused: bool) -> None:
    case, code = FAULTS[name]
    assert code in codes(program(case, fused=fused))


@pytest.mark.parametrize("theta", [0, 0.0, -1e4])
def test_theta_is_above_zero(theta: float) -> None:
    case = change(ROPE, theta=theta)
    assert codes(program(case)) == {"bad-param"}
    assert codes(program(case, fused=True)) == {"bad-recipe"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("hbm_bandwidth_gbs", 0), ("hbm_bandwidth_gbs", -1.0), ("hbm_bandwidth_gbs", 10**400), ("num_sms", 65537)],
)
def test_a_target_that_no_gpu_has_is_rejected(field: str, value: float) -> None:
    target = replace(TARGETS["h100"], **{field: value})  # type: ignore[arg-type]
    assert codes(replace(program(NORM), target=target)) == {"not-a-program"}


def test_a_target_of_the_most_sms_is_accepted() -> None:
    assert validate(replace(program(NORM), target=replace(TARGETS["h100"], num_sms=65536)), strict=True).ok


ROWS = {"n_off": 4, "N_tile": 4, "M_tile": 2}


@pytest.mark.parametrize(
    ("params", "made", "fits"),
    [
        ({}, (2, 4), True),
        ({"M_tile": 1}, (1, 4), False),  # nothing writes the rest
        ({"n_off": 5}, (2, 4), False),
        ({"M_tile": 1}, (2, 4), False),
        ({"M_tile": 4}, (4, 4), False),
        ({"M_tile": 3}, (3, 4), False),
        ({}, (1, 4), False),
    ],
)
def test_a_fused_tile_fills_its_columns_of_every_row(params: dict[str, int], made: tuple[int, int], fits: bool) -> None:
    """Beside one of the first four columns, without any order."""

    def task(number: int, own: dict[str, int], shape: tuple[int, int]) -> Task:
        several = {"M_tile": own["M_tile"]}
        result = {"out_shape": list(shape), "out_dtype": "F32"}
        step = {"op": "COPY", "args": [{"in": 0}], "params": several, "out": "final", **result}
        return Task(number, _K.FUSED, (0,), (9,), number, (), {**own, "recipe": recipe_from_dict({"steps": [step]})}, 0)

    buffers = [Buffer(0, "x", BufferKind.IO_INPUT, _F32, (2, 8)), Buffer(9, "y", BufferKind.IO_OUTPUT, _F32, (2, 8))]
    tasks = [task(0, {**ROWS, "n_off": 0}, (2, 4)), task(1, {**ROWS, **params}, made)]
    counters = [Counter(0), Counter(1)]
    tested = MegakernelProgram(target=TARGETS["h100"], buffers=buffers, counters=counters, tasks=tasks)
    assert validate(tested, strict=True).ok is fits
