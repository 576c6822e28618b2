"""The judge on the CUDA VM's own sources: right programs are far from the bound, programs that lie beyond it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from effort import pairs, sample
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session
from lies import LIES, MARGIN, Judges, Lie, layers_of, smallest, tell
from shared_pages import in_pages

from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 256, 384, 2, 4, 2, 64, 520, 1e5, 1e-5, 512)
CONTEXT, THREADS = 512, 192
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIGS = {
    "step by step": ScheduleConfig(threads_per_block=THREADS),
    "fused, by counters, pages shared": ScheduleConfig(
        {"attention": {"kv_block": 64}, "gemv": {"N_tile": 48}}, FUSED,
        threads_per_block=THREADS,
    ),
    "fused, by data": ScheduleConfig(
        {"attention": {"kv_block": 64}, "hand_off": {"data": 1}}, FUSED, pipelining_depth=1,
        page_allocation="none", threads_per_block=THREADS,
    ),
}  # fmt: skip
# The kernel itself moves appends to positions, so none goes to another row; tiles of one projection stand for all.
TOLD = [
    lie
    for lie in LIES
    if lie.name != "an append to the row before" and (not lie.name.startswith("a tile") or "down_proj" in lie.name)
]


def lowered(config: str, dtype: DType, batch: int) -> MegakernelProgram:
    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    program = lower(decode_step(SPEC, CONTEXT, dtype, batch), CONFIGS[config], target)
    return in_pages(program, "shared" if "pages" in config else "none")


@cache
def weights_of(dtype: DType) -> dict[str, torch.Tensor]:
    return random_weights(SPEC, 1, TORCH_DTYPES[dtype])


@cache
def oracle_of(dtype: DType) -> OracleWeights:
    return OracleWeights(SPEC, weights_of(dtype), TORCH_DTYPES[dtype])


@cache
def judges() -> Judges:
    return Judges(oracle_of(DType.BF16), DType.BF16, CONTEXT)


@pytest.mark.parametrize(
    ("work", "config"), pairs([(DType.BF16, 1), (DType.BF16, 3), (DType.F16, 1), (DType.F32, 2)], CONFIGS)
)
def test_right_programs_are_far_from_the_bound(work: tuple[DType, int], config: str) -> None:
    dtype, batch = work
    judge = Judge(oracle_of(dtype), dtype, CONTEXT, default_positions(CONTEXT), batch)
    with emulated_session(EmulatedGpu(), lowered(config, dtype, batch), SPEC, weights_of(dtype)) as session:
        assert session.shares_memory == ("pages" in config)
        verdict = judge.examine(session).verdict
    assert MARGIN * verdict.error <= verdict.bound, verdict


@pytest.mark.parametrize("lie", sample(TOLD, 4), ids=lambda lie: lie.name)
def test_a_lie_is_no_pass_on_the_kernels(lie: Lie) -> None:
    config = "fused, by counters, pages shared"
    told = tell(lie, lowered(config, DType.BF16, lie.batch), SPEC, weights_of(DType.BF16))
    with emulated_session(EmulatedGpu(), told.program, SPEC, told.weights) as session:
        examined = judges().of(lie).examine(session)
    assert not examined.verdict.passed
    assert smallest(examined, layers_of(SPEC))[0] >= lie.margin * examined.verdict.bound
