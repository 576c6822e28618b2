"""The judge on the CUDA VM's own sources with quantised weights: right programs are far from the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from lies import MARGIN

from flywheel.decode.judge import Judge
from flywheel.decode.verify import default_positions
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.eager import OracleWeights
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "qwen2", 256, 384, 2, 4, 2, 64, 520, 1e5, 1e-5, 512, qkv_bias=True)
CONTEXT = 96
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIG = ScheduleConfig(
    {"attention": {"kv_block": 32}, "hand_off": {"data": 1}}, FUSED, page_allocation="none", threads_per_block=192
)


@pytest.mark.parametrize(
    ("text", "dtype", "batch"),
    [("int4-zeros,lm_head=int8", "bf16", 1), ("fp8-block,q_proj=int4,down_proj=int8-tensor", "f16", 8)],
)
def test_right_programs_of_quantised_weights_are_far_from_the_bound(text: str, dtype: str, batch: int) -> None:
    gpu, formats, kind = EmulatedGpu(), parse_formats(text, dtype), DTYPES[dtype]
    weights = random_quantised(SPEC, 1, formats, kind)
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    program = lower(decode_step(SPEC, CONTEXT, kind, batch, formats), CONFIG, target)
    judge = Judge(OracleWeights(SPEC, weights, TORCH_DTYPES[kind]), kind, CONTEXT, default_positions(CONTEXT), batch)
    with emulated_session(gpu, program, SPEC, weights) as session:
        verdict = judge.examine(session).verdict
    assert MARGIN * verdict.error <= verdict.bound, verdict
