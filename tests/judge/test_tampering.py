"""Programs that lie are no pass, wherever they do it, by a margin; programs that do not are one, by a margin."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import isinf

import pytest
import torch
from effort import examples, pairs
from lies import LIES, MARGIN, Judges, Lie, examine, layers_of, smallest, tell

from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import default_positions, make_judge
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

CONTEXT = examples(512, 256)
SPLIT = ScheduleConfig(
    {"attention": {"kv_block": 64}, "gemv": {"N_tile": 64}, "hand_off": {"data": 1}},
    (
        ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
        ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
        ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
    ),
    page_allocation="none",
)  # fmt: skip
CASES = {
    # What a layer makes does not depend on how many there are. The whole models have 30 layers and 16.
    "smollm2-135m, fused, split KV": (
        replace(CATALOG["smollm2-135m"], n_layers=examples(30, 3), vocab=examples(49152, 2048)), SPLIT,
    ),
    "llama3.2-1b of three layers, unfused": (
        replace(
            CATALOG["llama3.2-1b"], n_layers=3, n_heads=examples(32, 16), n_kv_heads=examples(8, 4),
            hidden=examples(2048, 1024), intermediate=examples(8192, 1024), vocab=examples(8192, 2048),
        ),
        ScheduleConfig(page_allocation="none"),
    ),
}  # fmt: skip


@cache
def weights_of(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    return random_weights(spec, 1)


@cache
def judges_of(spec: DecoderSpec) -> Judges:
    return Judges(OracleWeights(spec, weights_of(spec), torch.bfloat16), DType.BF16, CONTEXT)


@cache
def program_of(case: str, batch: int) -> MegakernelProgram:
    spec, config = CASES[case]
    return lower(decode_step(spec, CONTEXT, DType.BF16, batch), config, TARGETS["h100"])


@pytest.mark.parametrize(
    ("lie", "case"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in pairs(LIES, CASES)]
)
def test_a_lie_in_the_first_a_middle_or_the_last_layer_is_no_pass(lie: Lie, case: str) -> None:
    spec = CASES[case][0]
    told = tell(lie, program_of(case, lie.batch), spec, weights_of(spec))
    examined = examine(told, spec, judges_of(spec).of(lie))
    assert not examined.verdict.passed
    error, where = smallest(examined, layers_of(spec))
    assert isinf(error) or error >= lie.margin * examined.verdict.bound, where


@pytest.mark.parametrize(("dtype", "case"), pairs([DType.F32, DType.F16, DType.BF16], CASES))
def test_a_right_program_is_far_from_the_bound(dtype: DType, case: str) -> None:
    spec, config = CASES[case]
    spec = replace(spec, n_layers=3)
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype])
    for batch in (1, 2):
        program = lower(decode_step(spec, CONTEXT, dtype, batch), config, TARGETS["h100"])
        session = ReferenceSession(program, spec, weights)
        verdict = make_judge(session, weights, default_positions(CONTEXT)).examine(session).verdict
        assert MARGIN * verdict.error <= verdict.bound, verdict
