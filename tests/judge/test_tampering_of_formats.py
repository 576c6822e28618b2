"""Programs that take other codes, scales or zero points than they have are no pass, by a margin, in every format; right
ones are one, by a margin, up to context 4096."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isinf
from typing import Final

import pytest
import torch
from effort import pairs, sample
from lies import MARGIN, Judges, Lie, Told, examine, layers_of, smallest, tell
from lies_of_formats import lies_of

from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import default_positions, make_judge
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import HEAD, LAYER_MATRICES, parse_formats
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec

SPEC: Final = DecoderSpec("small", "llama", 512, 640, 2, 8, 2, 64, 520, 1e5, 1e-5, 4096)
CONTEXT: Final = 32
FUSED: Final = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
SPLIT: Final = ScheduleConfig({"attention": {"kv_block": 512}, "gemv": {"N_tile": 64}}, FUSED, page_allocation="none")
FORMATS: Final = (
    "fp8", "fp8-tensor", "fp8-block", "fp8-g128", "int8", "int8-tensor", "int8-block", "int8-zeros", "int8-g128",
    "int8-g128-zeros", "int4", "int4-zeros", "int4-g64-zeros-f32", "int4-row", "int4-tensor",
)  # fmt: skip


@cache
def weights_of(text: str) -> dict[str, torch.Tensor]:
    return random_quantised(SPEC, 1, parse_formats(text, "bf16"), DType.BF16)


@cache
def program_of(text: str, batch: int = 1) -> MegakernelProgram:
    return lower(decode_step(SPEC, CONTEXT, DType.BF16, batch, parse_formats(text, "bf16")), SPLIT, TARGETS["h100"])


@cache
def judges_of(text: str) -> Judges:
    return Judges(OracleWeights(SPEC, weights_of(text), torch.bfloat16), DType.BF16, CONTEXT)


def told() -> list[tuple[str, Lie]]:
    """Each lie of each format, of one role after the other."""
    shapes = layer_weight_shapes(SPEC)
    found = []
    for text in FORMATS:
        format = parse_formats(text, "bf16").usual
        assert format is not None
        for number in range(len(lies_of(format, (512, 256), "q_proj"))):
            role = LAYER_MATRICES[(number + FORMATS.index(text)) % len(LAYER_MATRICES)]
            found.append((text, lies_of(format, (shapes[role][0], shapes[role][1]), role)[number]))
    return found


@pytest.mark.parametrize(("text", "lie"), [pytest.param(*each, id=each[1].name) for each in sample(told())])
def test_other_codes_scales_or_zero_points_are_no_pass(text: str, lie: Lie) -> None:
    examined = examine(tell(lie, program_of(text), SPEC, weights_of(text)), SPEC, judges_of(text).of(lie))
    assert not examined.verdict.passed
    error, where = smallest(examined, layers_of(SPEC))
    assert isinf(error) or error >= MARGIN * examined.verdict.bound, where


@pytest.mark.parametrize("text", sample(FORMATS, 5))
def test_other_codes_scales_or_zero_points_are_no_pass_for_eight_sequences(text: str) -> None:
    for lie in [replace(each, batch=8) for own, each in told() if own == text][FORMATS.index(text) % 2 :: 2]:
        examined = examine(tell(lie, program_of(text, 8), SPEC, weights_of(text)), SPEC, judges_of(text).of(lie))
        error, where = smallest(examined, layers_of(SPEC))
        assert not examined.verdict.passed, lie.name
        assert isinf(error) or error >= MARGIN * examined.verdict.bound, (lie.name, where)


@pytest.mark.parametrize(("text", "batch"), sample(pairs(FORMATS, [1, 8]), 5))
def test_a_head_of_other_codes_scales_or_zero_points_is_no_pass(text: str, batch: int) -> None:
    own, whole = parse_formats(text, "bf16").usual, f"int8,lm_head={text}"
    assert own is not None
    for lie in (replace(each, batch=batch) for each in lies_of(own, (SPEC.vocab, SPEC.hidden), HEAD)):
        other = lie.tell(Told(program_of(whole, batch), weights_of(whole)), SPEC, 0)
        examined = examine(other, SPEC, judges_of(whole).of(lie))
        error = max(float(each.max()) for name, each in examined.scores.by_name().items() if name[0] != "L")
        assert not examined.verdict.passed, lie.name
        assert isinf(error) or error >= MARGIN * examined.verdict.bound, lie.name


@pytest.mark.parametrize(("text", "batch"), sample(pairs(FORMATS, [1, 8])))
def test_a_right_program_is_far_from_the_bound_up_to_context_4096(text: str, batch: int) -> None:
    spec, formats = replace(SPEC, n_layers=1), parse_formats(text, "bf16")
    program = lower(decode_step(spec, 4096, DType.BF16, batch, formats), SPLIT, TARGETS["h100"])
    weights = random_quantised(spec, 1, formats, DType.BF16)
    session = ReferenceSession(program, spec, weights)
    verdict = make_judge(session, weights, default_positions(4096)).examine(session).verdict
    assert MARGIN * verdict.error <= verdict.bound, verdict
