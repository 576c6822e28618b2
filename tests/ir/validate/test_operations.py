"""Operands that are not as the table of operations has them: each is refused with its task, the fact and the bound."""

from __future__ import annotations

from typing import Any

import pytest

from flywheel.errors import IrFormatError
from flywheel.ir import TARGETS, Buffer, BufferKind, Counter, DType, InstructionKind, MegakernelProgram, Task, validate
from flywheel.ir.recipe import recipe_from_dict, recipe_to_dict

_F32, _BF16, _I32, _I4 = DType.F32, DType.BF16, DType.I32, DType.I4
_IN, _OUT, _CACHE, _ACT = BufferKind.IO_INPUT, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE, BufferKind.ACTIVATION
Shape = tuple[int, ...]
Described = tuple[BufferKind, DType, Shape]

HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "scale": 1.0, "kv_start": 0, "kv_len": 6}


def f32(*shape: int, kind: BufferKind = _IN) -> Described:
    return kind, _F32, shape


def program(
    op: str, inputs: list[Described], output: Described, in_place: int | None = None, **params: Any
) -> MegakernelProgram:
    """One task over buffers of its own; `in_place` is the input that is the output."""
    buffers = [Buffer(number, f"in{number}", *described) for number, described in enumerate(inputs)]
    out = len(inputs) if in_place is None else in_place
    if in_place is None:
        buffers.append(Buffer(out, "out", *output))
    task = Task(7, InstructionKind[op], tuple(range(len(inputs))), (out,), 0, (), params, 0, label="made")
    return MegakernelProgram(target=TARGETS["h100"], buffers=buffers, counters=[Counter(0)], tasks=[task])


def faults(tested: MegakernelProgram) -> list[tuple[str, str]]:
    found = validate(tested, strict=True).errors
    assert all(finding.task in (7, None) for finding in found)
    return [(finding.code, finding.message) for finding in found]


def only(tested: MegakernelProgram) -> tuple[str, str]:
    ((code, message),) = faults(tested)
    op = tested.tasks[0].op.name
    assert message.startswith(f"task 7 (made): {op}: ")
    return code, message.removeprefix(f"task 7 (made): {op}: ")


OUT8 = f32(1, 8, kind=_OUT)


def test_an_append_to_what_is_no_cache_is_rejected() -> None:
    wrong = program("KV_APPEND", [f32(1, 8), f32(4, 1, 8, kind=_ACT)], OUT8, in_place=1, pos=0)
    assert only(wrong)[1] == "cache (in1 [4, 1, 8]) is a ACTIVATION, not KV_CACHE"
    elsewhere = program("KV_APPEND", [f32(1, 8), f32(4, 1, 8, kind=_CACHE)], f32(4, 1, 8, kind=_OUT), pos=0)
    assert "kv-target" in dict(faults(elsewhere))


def test_an_append_of_rows_that_are_not_the_cache_s_is_rejected() -> None:
    wrong = program("KV_APPEND", [f32(1, 12), f32(4, 1, 8, kind=_CACHE)], OUT8, in_place=1, pos=0)
    assert only(wrong) == ("operand-size", "x (in0 [1, 12]) holds 12 elements, not a multiple of row=8")


def test_an_append_past_the_cache_is_rejected() -> None:
    wrong = program("KV_APPEND", [f32(2, 8), f32(4, 1, 8, kind=_CACHE)], OUT8, in_place=1, pos=3)
    assert only(wrong) == ("kv-bounds", "pos + T = 5 is past the 4 rows of cache (in1 [4, 1, 8])")


def test_a_flat_cache_has_rows_of_one_element() -> None:
    """So an append and a window, which see it by its shape alone, cannot take its rows for two widths."""
    flat = f32(256, kind=_CACHE)
    code, text = only(program("ATTENTION_TILE", [f32(4, 8), flat, flat], f32(4, 8, kind=_OUT), **HEADS))
    assert code == "operand-size"
    assert text == "k (in1 [256]) holds 1 elements in a row, not n_kv_heads=2 * head_dim=8 = 16"
    code, text = only(program("KV_APPEND", [f32(1, 32), f32(64, kind=_CACHE)], OUT8, in_place=1, pos=40))
    assert (code, text) == ("kv-bounds", "pos + T = 72 is past the 64 rows of cache (in1 [64])")


@pytest.mark.parametrize("width", [8, 32])
def test_a_window_over_rows_of_another_width_is_rejected(width: int) -> None:
    caches = [f32(8, 1, width, kind=_CACHE)] * 2
    code, text = only(program("ATTENTION_TILE", [f32(4, 8), *caches], f32(4, 8, kind=_OUT), **HEADS))
    assert code == "operand-size"
    assert f"holds {width} elements in a row" in text


def test_keys_and_values_have_as_many_rows() -> None:
    caches = [f32(8, 2, 8, kind=_CACHE), f32(6, 2, 8, kind=_CACHE)]
    code, text = only(program("ATTENTION_TILE", [f32(4, 8), *caches], f32(4, 8, kind=_OUT), **HEADS))
    assert (code, text) == ("operand-size", "v (in2 [6, 2, 8]) holds 6 rows, not max_seq=8")


@pytest.mark.parametrize(("shape", "fits"), [((4, 8), True), ((4, 10), True), ((4, 9), False), ((6, 8), False)])
def test_an_output_of_attention_is_whole_or_a_partial(shape: Shape, fits: bool) -> None:
    caches = [f32(8, 2, 8, kind=_CACHE)] * 2
    tested = program("ATTENTION_TILE", [f32(4, 8), *caches], f32(*shape, kind=_OUT), **HEADS)
    assert faults(tested) == [] if fits else only(tested)[0] == "operand-size"


def test_a_partial_is_in_f32() -> None:
    caches = [f32(8, 2, 8, kind=_CACHE)] * 2
    assert only(program("ATTENTION_TILE", [f32(4, 8), *caches], (_OUT, _BF16, (4, 10)), **HEADS))[0] == "operand-size"
    parts = [(_IN, _BF16, (4, 10))] * 2
    code, text = only(program("ATTENTION_COMBINE", parts, f32(4, 8, kind=_OUT), n_heads=4, head_dim=8))
    assert (code, text) == ("operand-size", "part (in0 [4, 10]) is BF16, not F32")


def test_a_merge_of_more_heads_than_parts_have_is_rejected() -> None:
    parts = [f32(4, 10)] * 2
    code, text = only(program("ATTENTION_COMBINE", parts, f32(4, 8, kind=_OUT), n_heads=8, head_dim=8))
    assert code == "operand-size"
    assert text == "part (in0 [4, 10]) holds 40 elements, not n_heads=8 * (head_dim + 2 = 10) = 80"


def test_a_merge_into_fewer_heads_than_parts_have_is_rejected() -> None:
    parts = [f32(4, 10)] * 2
    assert only(program("ATTENTION_COMBINE", parts, f32(2, 8, kind=_OUT), n_heads=4, head_dim=8))[0] == "operand-size"


@pytest.mark.parametrize(
    ("out", "params", "fits"),
    [
        ((4, 8), {}, True),
        ((4, 8), {"n_heads": 4}, True),
        ((4, 8), {"head_dim": 8}, True),
        ((4, 10), {"head_dim": 8}, True),
        ((4, 10), {}, False),
        ((4, 7), {}, False),
        ((4, 8), {"n_heads": 20}, False),
    ],
)
def test_params_or_sizes_tell_the_heads_of_a_merge(out: Shape, params: dict[str, int], fits: bool) -> None:
    tested = program("ATTENTION_COMBINE", [f32(4, 10)] * 2, f32(*out, kind=_OUT), **params)
    assert faults(tested) == [] if fits else only(tested)[0] == "operand-size"


def test_embed_into_more_rows_than_ids_is_rejected() -> None:
    ids: Described = (_IN, _I32, (2,))
    code, text = only(program("EMBED", [ids, f32(9, 16)], f32(3, 16, kind=_OUT), hidden=16))
    assert (code, text) == ("operand-size", "out (out [3, 16]) holds 48 elements, not S=2 * hidden=16 = 32")


def test_a_norm_into_one_and_a_half_rows_is_rejected() -> None:
    params = {"eps": 1e-5, "hidden": 16}
    code, text = only(program("RMSNORM", [f32(2, 16), f32(16)], f32(24, kind=_OUT), **params))
    assert (code, text) == ("operand-size", "out (out [24]) holds 24 elements, not R=2 * hidden=16 = 32")
    assert only(program("RMSNORM", [f32(24), f32(16)], f32(24, kind=_OUT), **params))[0] == "operand-size"


def test_a_norm_s_weight_has_one_element_a_column() -> None:
    params = {"eps": 1e-5, "hidden": 16}
    code, text = only(program("RMSNORM", [f32(2, 16), f32(17)], f32(2, 16, kind=_OUT), **params))
    assert (code, text) == ("operand-size", "w (in1 [17]) holds 17 elements, not hidden=16")


def test_an_argmax_of_rows_that_are_not_whole_is_rejected() -> None:
    code, text = only(program("SAMPLE_ARGMAX", [f32(1, 100)], (_OUT, _I32, (3,))))
    assert (code, text) == ("operand-size", "logits (in0 [1, 100]) holds 100 elements, not a multiple of S=3")


def test_an_argmax_is_an_i32() -> None:
    assert only(program("SAMPLE_ARGMAX", [f32(1, 8)], f32(1, kind=_OUT)))[0] == "operand-type"


def test_a_sum_of_different_sizes_is_rejected() -> None:
    code, text = only(program("ADD", [f32(100), f32(64)], f32(100, kind=_OUT)))
    assert (code, text) == ("operand-size", "b (in1 [64]) holds 64 elements, not n=100")
    assert only(program("ADD", [f32(100), f32(100)], f32(64, kind=_OUT)))[0] == "operand-size"


TILE = {"K": 8, "N_tile": 4, "n_off": 0}


@pytest.mark.parametrize(
    ("x", "weight", "out", "wanted"),
    [
        ((1, 12), (4, 8), (1, 4), "x (in0 [1, 12]) holds 12 elements, not a multiple of K=8"),
        ((1, 8), (4, 7), (1, 4), "W (in1 [4, 7]) has rows of 7 elements, not of at least K=8"),
        ((1, 8), (33,), (1, 4), "W (in1 [33]) holds 33 elements, not a multiple of K=8"),
        ((2, 8), (4, 8), (1, 4), "out (out [1, 4]) holds 4 elements, not M=2 * N_out=4 = 8"),
        ((1, 8), (4, 8), (1, 6), "out (out [1, 6]) holds 6 elements, not M=1 * N_out=4 = 4"),
    ],
)
def test_a_product_of_rows_that_are_not_whole_is_rejected(x: Shape, weight: Shape, out: Shape, wanted: str) -> None:
    assert only(program("GEMV_TILE", [f32(*x), f32(*weight)], f32(*out, kind=_OUT), **TILE)) == ("operand-size", wanted)


@pytest.mark.parametrize("weight", [(4, 8), (4, 9), (4, 1, 8), (32,)])
def test_a_weight_may_have_longer_rows_than_x(weight: Shape) -> None:
    assert faults(program("GEMV_TILE", [f32(1, 8), f32(*weight)], f32(1, 4, kind=_OUT), **TILE)) == []


def test_a_bias_has_the_width_of_the_output() -> None:
    inputs = [f32(1, 8), f32(4, 8), f32(3)]
    assert only(program("GEMV_TILE", inputs, f32(1, 4, kind=_OUT), **TILE))[0] == "operand-size"


def test_a_tile_past_the_matrix_is_rejected() -> None:
    code, text = only(program("GEMV_TILE", [f32(1, 8), f32(4, 8)], f32(1, 4, kind=_OUT), **{**TILE, "n_off": 2}))
    assert (code, text) == ("tile-bounds", "n_off + N_tile = 6 is past the 4 rows of W (in1 [4, 8])")


def test_m_tile_is_the_number_of_rows() -> None:
    tile = {**TILE, "M_tile": 2}
    assert faults(program("GEMM_TILE", [f32(2, 8), f32(4, 8)], f32(2, 4, kind=_OUT), **tile)) == []
    assert only(program("GEMM_TILE", [f32(3, 8), f32(4, 8)], f32(3, 4, kind=_OUT), **tile))[0] == "operand-size"


def test_nibbles_reach_dequant_alone_and_come_in_whole_bytes() -> None:
    found = dict(faults(program("COPY", [(_IN, _I4, (1, 8))], f32(1, 8, kind=_OUT))))
    assert set(found) == {"operand-type"}
    odd = program("DEQUANT", [(_IN, _I4, (2, 7)), f32(2, 1)], f32(2, 7, kind=_OUT), qdtype=int(_I4), group=7)
    assert faults(odd) == [("bad-shape", "buffer 0 (in0): I4 rows of an odd number of elements, 7")]


def test_only_floats_change_their_type() -> None:
    assert faults(program("COPY", [(_IN, _I32, (8,))], (_OUT, _I32, (8,)))) == []
    assert faults(program("COPY", [(_IN, _BF16, (8,))], f32(8, kind=_OUT))) == []
    code, text = only(program("COPY", [(_IN, _I32, (8,))], f32(8, kind=_OUT)))
    assert (code, text) == ("operand-type", "I32 to F32: only floats change their type")


def test_integers_are_no_operands_of_arithmetic() -> None:
    assert only(program("ADD", [(_IN, _I32, (8,)), f32(8)], f32(8, kind=_OUT)))[0] == "operand-type"


def test_rope_is_scaled_by_all_of_its_params_or_none() -> None:
    step = {"op": "ROPE", "args": [{"in": 0}, {"in": 1}], "out": "final", "out_shape": [1, 8], "out_dtype": "F32"}
    recipe = recipe_from_dict({"steps": [{**step, "params": {"head_dim": 8, "theta": 1e4, "rope_factor": 8.0}}]})
    code, text = only(program("FUSED", [f32(1, 8), (_IN, _I32, (1,))], OUT8, recipe=recipe))
    assert code == "bad-param"
    assert text.startswith("step 0: ROPE: rope_factor without all of rope_factor, rope_low_freq_factor,")


def test_one_factor_alone_needs_a_scale() -> None:
    assert only(program("MUL", [f32(8)], f32(8, kind=_OUT)))[0] == "missing-param"
    assert faults(program("MUL", [f32(8)], f32(8, kind=_OUT), scale=2.0)) == []


def turned(**params: Any) -> MegakernelProgram:
    step = {"op": "ROPE", "args": [{"in": 0}, {"in": 1}], "out": "final", "out_shape": [1, 8], "out_dtype": "F32"}
    recipe = recipe_from_dict({"steps": [{**step, "params": {"head_dim": 8, **params}}]})
    return program("FUSED", [f32(1, 8), (_IN, _I32, (1,))], OUT8, recipe=recipe)


def test_rope_may_have_its_frequencies_in_place_of_a_base() -> None:
    assert faults(turned(frequencies=[1.0, 0.5, 1, 0.0], scale=1.2)) == []
    assert only(turned(frequencies=[1.0] * 3))[1] == (
        "step 0: ROPE: frequencies has 3 numbers, not half of head_dim=8"
    )
    assert only(turned(frequencies=[1.0] * 4, theta=1e4))[1] == "step 0: ROPE: theta beside frequencies"
    for table, fault in {
        (1.0, 0.5, -1.0, 0.0): "frequencies has -1.0, not a float of at least 0",
        (1e39,) * 4: "frequencies has 1e+39, not a float of at least 0",
        (): "frequencies=[] is not 1..4096 numbers",
    }.items():
        wanted = [("bad-recipe", f"task 7 (made): recipe: step 0: ROPE: param {fault}")]
        assert faults(turned(frequencies=list(table))) == wanted
    assert "is not 1..4096 numbers" in faults(turned(frequencies=[0.0] * 4097))[0][1]
    ((code, text),) = faults(program("ROPE", [f32(1, 8), (_IN, _I32, (1,))], OUT8, head_dim=8, theta=1e4,
                                     frequencies=(1.0,) * 4))  # fmt: skip
    assert (code, text) == ("bad-param", "task 7 (made): frequencies is a param of a recipe's step alone")


@pytest.mark.parametrize("given", [1.0, "x", [None], [[1.0]], [True], [2**40], {"0": 1.0}])
def test_frequencies_that_are_no_list_of_numbers_are_not_read(given: object) -> None:
    with pytest.raises(IrFormatError, match="frequencies: expected a"):
        turned(frequencies=given)


def test_equal_frequencies_are_one_recipe_and_are_written_as_they_are_read() -> None:
    tables = [1, 0.5, 0.25, -0.0], [1.0, 0.5, 0.25, 0.0]
    first, second = (turned(frequencies=table).tasks[0].params["recipe"] for table in tables)
    assert first is second
    assert recipe_to_dict(first)["steps"][0]["params"] == {"head_dim": 8, "frequencies": [1.0, 0.5, 0.25, 0.0]}
    assert recipe_from_dict(recipe_to_dict(first)) is first
