"""The judge on the CUDA VM's own sources with quantised weights: right programs are far from the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import LONG
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from lies import MARGIN

from flywheel.decode.reference import stream_by_steps
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.measure.verdict import Verdict
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.formats import parse_formats
from flywheel.models.oracle import OracleWeights
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
    verdict = _examine(SPEC, CONFIG, text, dtype, batch)
    assert MARGIN * verdict.error <= verdict.bound, verdict


@pytest.mark.parametrize("threads", [192, 256])
def test_a_row_may_end_within_a_block_of_digits(threads: int) -> None:
    """K is 2.5 and 9.5 blocks, of which a warp takes one or several."""
    tiling = {**CONFIG.tiling, "hand_off": {"data": 1}}
    spec = replace(SPEC, hidden=640, intermediate=2432, n_layers=1)
    verdict = _examine(spec, replace(CONFIG, tiling=tiling, threads_per_block=threads), "int4", "bf16", 1)
    assert MARGIN * verdict.error <= verdict.bound, verdict


def _examine(spec: DecoderSpec, config: ScheduleConfig, text: str, dtype: str, batch: int) -> Verdict:
    gpu, formats, kind = EmulatedGpu(), parse_formats(text, dtype), DTYPES[dtype]
    weights = random_quantised(spec, 1, formats, kind)
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    program = lower(decode_step(spec, CONTEXT, kind, batch, formats), config, target)
    judge = Judge(OracleWeights(spec, weights, TORCH_DTYPES[kind]), kind, CONTEXT, default_positions(CONTEXT), batch)
    with emulated_session(gpu, program, spec, weights) as session:
        return judge.examine(session).verdict


@LONG
def test_launches_that_follow_each_other_forget_the_ones_before_where_some_sms_multiply_nothing() -> None:
    gpu, formats = EmulatedGpu(num_sms=16), parse_formats("int4-zeros,lm_head=int8", "bf16")
    spec = replace(SPEC, n_layers=1)
    weights = random_quantised(spec, 1, formats, DTYPES["bf16"])
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    few = replace(CONFIG, tiling={**CONFIG.tiling, "gemv": {"N_tile": 256}})
    program = lower(decode_step(spec, CONTEXT, DTYPES["bf16"], 1, formats), few, target)
    products = [task for task in program.tasks if "GEMV_TILE" in str(task.params.get("recipe", task.op.name))]
    assert len({task.sm for task in products}) < gpu.num_sms
    with emulated_session(gpu, program, spec, weights) as session:
        streamed = list(session.stream((5, 3, 17), 10))
        assert streamed == list(stream_by_steps(session, (5, 3, 17), 10))
    assert len(set(streamed)) > 1
