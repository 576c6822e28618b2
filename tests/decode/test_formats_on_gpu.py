"""Quantised programs on a GPU: every format in which the kernels multiply, batches 1 and 8, contexts up to 4096."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from lies import MARGIN, Judges, Lie, layers_of, smallest, tell
from lies_of_formats import lies_of

from flywheel.decode.cuda import CudaModel
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.drawn import random_quantised
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import parse_formats
from flywheel.models.oracle import OracleWeights
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SPEC = DecoderSpec("small", "qwen2", 512, 640, 2, 8, 2, 64, 520, 1e5, 1e-5, 4096, qkv_bias=True)
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
FORMATS = (
    ("fp8", "bf16"), ("fp8-tensor", "bf16"), ("fp8-block", "bf16"), ("fp8-g128", "bf16"), ("fp8-g128", "f16"),
    ("int8", "bf16"), ("int8-tensor", "f16"), ("int8-g128", "bf16"), ("int8-g128", "f16"), ("int8-g128-zeros", "bf16"),
    ("int8-g128-zeros", "f16"), ("int8-block", "bf16"), ("int4", "bf16"), ("int4", "f16"), ("int4-zeros", "bf16"),
    ("int4-zeros", "f16"), ("int4-row", "bf16"), ("int4,lm_head=int8,down_proj=fp8", "bf16"),
)  # fmt: skip
"""Every format of the stream in `plan.formats`, and one program of several."""

TOLD = {"fp8-block": (1, 512), "fp8-g128": (8, 512), "int8": (1, 4096), "int8-g128-zeros": (8, 512),
        "int4": (8, 4096), "int4-zeros": (1, 512), "int4-row": (8, 512)}  # fmt: skip
"""Batch and context of what lies are told about; one kernel multiplies for one sequence, another for several."""


@cache
def weights_of(text: str, dtype: str) -> dict[str, torch.Tensor]:
    return random_quantised(SPEC, 1, parse_formats(text, dtype), DTYPES[dtype], "cuda")


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    """Other tests have the GPU's memory when these are over."""
    yield
    weights_of.cache_clear()


def lowered(gpu: Gpu, text: str, dtype: str, config: str, context: int, batch: int) -> MegakernelProgram:
    target = replace(
        TARGETS["h100"], name="here", sm_arch=gpu.sm_arch, num_sms=gpu.num_sms,
        smem_bytes_per_block_optin=gpu.smem_optin_bytes,
    )  # fmt: skip
    formats = parse_formats(text, dtype)
    return lower(decode_step(SPEC, context, DTYPES[dtype], batch, formats), CONFIGS[config], target)


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (1, 4096), (8, 4096)])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("text", "dtype"), FORMATS)
def test_a_right_program_is_far_from_the_bound(
    text: str, dtype: str, config: str, batch: int, context: int, gpu: Gpu
) -> None:
    weights, kind = weights_of(text, dtype), DTYPES[dtype]
    program = lowered(gpu, text, dtype, config, context, batch)
    own = OracleWeights(SPEC, weights, TORCH_DTYPES[kind], "cuda")
    judge = Judge(own, kind, context, default_positions(context), batch)
    with CudaModel(gpu, SPEC, kind, context, weights, batch) as model, model.load(program) as session:
        verdict = judge.examine(session).verdict
    assert MARGIN * verdict.error <= verdict.bound, verdict


def told(text: str) -> list[Lie]:
    format = parse_formats(text, "bf16").usual
    assert format is not None
    shape = layer_weight_shapes(SPEC)["down_proj"]
    return [replace(each, batch=TOLD[text][0]) for each in lies_of(format, (shape[0], shape[1]), "down_proj")]


@pytest.mark.parametrize(
    ("text", "lie"), [pytest.param(text, lie, id=lie.name) for text in TOLD for lie in told(text)]
)
def test_other_codes_scales_or_zero_points_are_no_pass_on_the_gpu(text: str, lie: Lie, gpu: Gpu) -> None:
    weights, (batch, context) = weights_of(text, "bf16"), TOLD[text]
    told = tell(lie, lowered(gpu, text, "bf16", "by data", context, batch), SPEC, weights)
    judge = Judges(OracleWeights(SPEC, weights, torch.bfloat16, "cuda"), DType.BF16, context).of(lie)
    with CudaModel(gpu, SPEC, DType.BF16, context, told.weights, batch) as model, model.load(told.program) as session:
        examined = judge.examine(session)
    assert not examined.verdict.passed
    assert smallest(examined, layers_of(SPEC))[0] >= MARGIN * examined.verdict.bound
