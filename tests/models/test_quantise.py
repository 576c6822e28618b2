from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from damage import TARGET, spec_of

from flywheel.errors import WeightsError
from flywheel.ir import DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import WeightFormat, parse_formats
from flywheel.models.quantise import (
    dequantise,
    formats_of_program,
    matrix_of,
    pack,
    quantise,
    quantised,
    same_layouts,
    unpack,
)
from flywheel.models.weights import bind, random_weights

NAMES = ("fp8", "fp8-tensor", "fp8-block", "int8", "int8-zeros", "int8-block", "int4-g32", "int4-g32-zeros", "int4-row")


def named(text: str) -> WeightFormat:
    found = parse_formats(text, "bf16").usual
    assert found is not None
    return found


def matrix(rows: int = 300, width: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)


@pytest.mark.parametrize("text", NAMES)
def test_every_element_is_within_half_a_step_of_its_code(text: str) -> None:
    own, given = named(text), matrix()
    codes, scales, zeros = quantise(given, own, DType.BF16)
    assert scales.shape == own.scale_shape((300, 256))
    assert scales.dtype == (torch.bfloat16 if text.startswith("int4-g") else torch.float32)
    assert (zeros is not None) == own.zeros
    back = dequantise(codes, scales, zeros)
    shared = min(own.rows_per_scale((300, 256)), 300)
    step = scales.float().repeat_interleave(shared, 0)[:300].repeat_interleave(own.group_of((300, 256)), 1)
    # Scales of bf16 are rounded, so the largest element may lie a little outside of the codes.
    half = 0.6 if "g" in text else 0.5
    allowed = given.abs() / 16 + step * 2.0**-10 if own.codes is DType.F8E4M3 else step * half
    assert bool(((back - given).abs() <= allowed + 1e-6).all())


@pytest.mark.parametrize("text", NAMES)
def test_the_best_scale_has_no_larger_error(text: str) -> None:
    own, given = named(text), matrix()
    errors = [
        float((dequantise(*quantise(given, own, DType.BF16, best=best)) - given).square().sum())
        for best in (False, True)
    ]
    assert errors[1] <= errors[0]


def test_packing_keeps_every_number_the_low_half_first() -> None:
    numbers = torch.tensor([[1, -8, 7, -1], [0, 2, -3, 5]], dtype=torch.int8)
    assert pack(numbers).tolist() == [[0x81, 0xF7], [0x20, 0x5D]]
    assert torch.equal(unpack(pack(numbers)), numbers)


def test_what_codes_mean_is_the_code_less_the_zero_times_the_scale() -> None:
    codes = torch.tensor([[1, 2, 3, 4], [-1, -2, -3, -4]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, 2.0], [1.0, 4.0]]), torch.tensor([[1, 0], [0, -1]], dtype=torch.int8)
    assert dequantise(codes, scales, zeros).tolist() == [[0.0, 0.5, 6.0, 8.0], [-1.0, -2.0, -8.0, -12.0]]


def test_a_group_of_zeros_has_scale_one() -> None:
    codes, scales, _ = quantise(torch.zeros(16, 64), named("int4-g32"), DType.BF16)
    assert scales.tolist() == [[1.0, 1.0]] * 16
    assert not codes.any()


def test_elements_that_are_not_finite_are_refused_by_the_tensors_key() -> None:
    spec = spec_of("llama", 1)
    given = dict(random_weights(spec, 0))
    given["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.0.mlp.up_proj.weight': .* not finite"):
        quantised(spec, given, parse_formats("int8", "bf16"), DType.BF16)


@pytest.mark.parametrize("text", ["int4-g32,lm_head=int8", "fp8,q_proj=bf16", "int8-zeros", "fp8-tensor"])
def test_programs_tell_their_formats(text: str) -> None:
    spec = replace(spec_of("qwen2", 2), tied_head=True)
    formats = parse_formats(text, "bf16")
    program = lower(decode_step(spec, 64, formats=formats), ScheduleConfig(), TARGET)
    assert formats_of_program(program, DType.BF16) == formats
    assert program.meta["weights"] == text


@pytest.mark.parametrize("text", ["int4", "int4-zeros", "int8-g128", "int4-row"])
def test_weights_bind_where_a_group_is_as_wide_as_a_row(text: str) -> None:
    spec = replace(spec_of("llama", 1), hidden=128, head_dim=32, intermediate=256)
    program = lower(decode_step(spec, 64, formats=parse_formats(text, "bf16")), ScheduleConfig(), TARGET)
    formats = formats_of_program(program, DType.BF16)
    assert same_layouts(spec, formats, parse_formats(text, "bf16"), DType.BF16)
    given = quantised(spec, random_weights(spec, 0), formats, DType.BF16)
    bound = bind(program, given)
    key = next(name for name in bound if "q_proj" in name and name.endswith("scales"))
    assert bound[key].dtype is (torch.float32 if text == "int4-row" else torch.bfloat16)


def test_a_scale_that_its_type_cannot_hold_is_refused() -> None:
    huge = torch.full((2, 128), 65504.0 * 8)
    with pytest.raises(WeightsError, match=r"a group needs a scale of .* more than float16 holds"):
        quantise(huge, named("int4"), DType.F16)


@pytest.mark.parametrize("text", ["int8-g64", "int4-g32", "int4-g32-zeros", "fp8-g64"])
def test_small_weights_keep_all_their_codes_in_f16(text: str) -> None:
    given = matrix(16) * 1e-4
    codes, scales, zeros = quantise(given, named(text), DType.F16)
    exact = quantise(given, named(f"{text}-f32"), DType.F16)
    error, least = ((dequantise(*each) - given).square().mean().sqrt() for each in ((codes, scales, zeros), exact))
    assert scales.dtype is torch.float16
    assert 0 < scales.float().min() < torch.finfo(torch.float16).tiny
    assert error < 1.1 * least + 2.0**-26


def test_what_the_codes_mean_is_near_what_was_quantised() -> None:
    spec = spec_of("llama", 1)
    plain = random_weights(spec, 0)
    held = quantised(spec, plain, parse_formats("int8", "bf16"), DType.BF16)
    key = "model.layers.0.self_attn.q_proj.weight"
    back = matrix_of(held, key)
    assert back is not None
    assert 0 < float((back - plain[key]).abs().max()) < float(plain[key].abs().max()) / 100
    assert held["model.norm.weight"] is plain["model.norm.weight"]
    assert matrix_of(held, "model.norm.weight") is None
