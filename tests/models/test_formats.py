from __future__ import annotations

import pytest

from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir import DType
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.formats import LAYER_MATRICES, PLAIN, WeightFormat, parse_formats, weights_name


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("int4", WeightFormat(DType.I4, 1, 128)),
        ("int4-g128", WeightFormat(DType.I4, 1, 128)),
        ("int4-g64-zeros", WeightFormat(DType.I4, 1, 64, zeros=True)),
        ("int4-g32-f32", WeightFormat(DType.I4, 1, 32, wide=True)),
        ("int8", WeightFormat(DType.I8, 1, None)),
        ("int8-tensor", WeightFormat(DType.I8, None, None)),
        ("fp8", WeightFormat(DType.F8E4M3, 1, None)),
        ("fp8-block", WeightFormat(DType.F8E4M3, 128, 128)),
    ],
)
def test_a_name_means_a_format_and_the_format_says_it(text: str, wanted: WeightFormat) -> None:
    found = parse_formats(text, "bf16").usual
    assert found == wanted
    assert parse_formats(wanted.name, "bf16").usual == wanted
    assert weights_name(text, "bf16") == wanted.name


def test_the_head_stays_as_it_is_unless_it_is_named() -> None:
    formats = parse_formats("int4,lm_head=fp8,down_proj=int8,q_proj=bf16", "bf16")
    assert [formats.of(role) is None for role in LAYER_MATRICES] == [role == "q_proj" for role in LAYER_MATRICES]
    named = formats.of("lm_head"), formats.of("down_proj")
    assert [each and each.codes for each in named] == [DType.F8E4M3, DType.I8]
    assert formats.of("embed") is None
    assert parse_formats("int4", "bf16").of("lm_head") is None


def test_one_name_stands_for_all_that_mean_the_same() -> None:
    assert weights_name("int4-g128, up_proj=int4,lm_head=bf16", "bf16") == "int4"
    assert weights_name("int4,down_proj=int8,q_proj=fp8", "f16") == "int4,q_proj=fp8,down_proj=int8"
    assert weights_name(None, "f16") == weights_name("f16", "f16") == "f16"
    assert parse_formats("bf16", "bf16") == PLAIN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f16", "weights 'f16': unquantised weights have the type of the computation, bf16"),
        ("int5", "weights 'int5': 'int5' is not one of bf16, fp8, int8, int4"),
        ("int4-g0", "weights 'int4-g0': is not int4[-tensor|-row|-block|-gN][-zeros][-f32]"),
        ("int4-row-g64", "weights 'int4-row-g64': is not int4"),
        ("int4-zeros-zeros", "weights 'int4-zeros-zeros': is not int4"),
        ("fp8-zeros", "weights 'fp8-zeros': floats of 8 bits have no zero points"),
        ("int4,embed=int8", "weights 'int4,embed=int8': 'embed=int8' is not ROLE=FORMAT with one of q_proj"),
        ("int4,lm_head", "weights 'int4,lm_head': 'lm_head' is not ROLE=FORMAT"),
        ("int4,q_proj=int8,q_proj=fp8", "weights 'int4,q_proj=int8,q_proj=fp8': q_proj has two formats"),
        ("", "weights '': '' is not one of"),
    ],
)
def test_a_name_that_means_no_format_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_formats(text, "bf16")
    assert str(caught.value).startswith(message)


def test_groups_that_do_not_divide_a_matrix_are_refused_with_its_width() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m: q_proj: groups of 128 do not divide K=576; format int4"):
        decode_step(CATALOG["smollm2-135m"], 16, formats=parse_formats("int4", "bf16"))


@pytest.mark.parametrize(
    ("text", "bits"), [("int8", 8 + 32 / 4096), ("int4", 4 + 16 / 128), ("int4-zeros", 4 + 24 / 128), ("fp8-block", 8)]
)
def test_bytes_count_codes_scales_and_zero_points(text: str, bits: float) -> None:
    own = parse_formats(text, "bf16").usual
    assert own is not None
    nbytes = own.nbytes((4096, 4096), DType.BF16)
    assert nbytes == 4096 * 4096 * bits / 8 + (32 * 32 * 4 if text == "fp8-block" else 0)


def test_a_quantised_tied_head_is_a_matrix_beside_the_embedding() -> None:
    spec = CATALOG["llama3.2-1b"]
    graph = decode_step(spec, 16, formats=parse_formats("int4,lm_head=int8", "bf16"))
    assert graph.prologue.tensors["embed.w"].dtype is DType.BF16
    head = graph.epilogue.tensors["lm_head.w"]
    assert (head.dtype, head.source) == (DType.I8, "lm_head.weight.codes")
    assert graph.epilogue.tensors["lm_head.w.scales"].shape == (spec.vocab, 1)
    assert graph.weights == "int4,lm_head=int8"
