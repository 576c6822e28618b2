"""The lies of test_tampering, told to the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from lies import LIES, MARGIN, Judges, Lie, layers_of, smallest, tell

from flywheel.decode.cuda import CudaModel
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.pack import pack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONTEXT = 512
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
TILING = {"attention": {"kv_block": 64}, "gemv": {"N_tile": 64}}
CONFIGS = {
    "by data": ScheduleConfig({**TILING, "hand_off": {"data": 1}}, FUSED, page_allocation="none"),
    "by counters": ScheduleConfig(TILING, FUSED),
}
MODELS = ("smollm2-135m", "llama3.2-1b")
# The kernel itself moves appends to positions, so none goes to another row.
TOLD = [lie for lie in LIES if lie.name != "an append to the row before"]


@cache
def weights_of(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    return random_weights(spec, 1, device="cuda")


@cache
def oracle_of(spec: DecoderSpec) -> OracleWeights:
    return OracleWeights(spec, weights_of(spec), torch.bfloat16, "cuda")


@cache
def judges_of(spec: DecoderSpec) -> Judges:
    return Judges(oracle_of(spec), DType.BF16, CONTEXT)


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    """Other tests have the GPU's memory when these are over."""
    yield
    for kept in (weights_of, oracle_of, judges_of):
        kept.cache_clear()


def lowered(gpu: Gpu, spec: DecoderSpec, config: ScheduleConfig, batch: int) -> MegakernelProgram:
    target = replace(
        TARGETS["h100"], name="here", sm_arch=gpu.sm_arch, num_sms=gpu.num_sms,
        smem_bytes_per_block_optin=gpu.smem_optin_bytes,
    )  # fmt: skip
    return lower(decode_step(spec, CONTEXT, DType.BF16, batch), config, target)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lie", TOLD, ids=lambda lie: lie.name)
def test_a_lie_is_no_pass_on_the_gpu(lie: Lie, model: str, gpu: Gpu) -> None:
    spec = CATALOG[model]
    told = tell(lie, lowered(gpu, spec, CONFIGS["by data"], lie.batch), spec, weights_of(spec))
    with (
        CudaModel(gpu, spec, DType.BF16, CONTEXT, told.weights, lie.batch) as cuda,
        cuda.load_packed(pack(told.program)) as session,
    ):
        examined = judges_of(spec).of(lie).examine(session)
    assert not examined.verdict.passed
    error, where = smallest(examined, layers_of(spec))
    assert error >= lie.margin * examined.verdict.bound, where


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_right_program_is_far_from_the_bound_on_the_gpu(model: str, name: str, batch: int, gpu: Gpu) -> None:
    spec = CATALOG[model]
    judge = Judge(oracle_of(spec), DType.BF16, CONTEXT, default_positions(CONTEXT), batch)
    program = lowered(gpu, spec, CONFIGS[name], batch)
    with CudaModel(gpu, spec, DType.BF16, CONTEXT, weights_of(spec), batch) as cuda, cuda.load(program) as session:
        verdict = judge.examine(session).verdict
    assert MARGIN * verdict.error <= verdict.bound, verdict
